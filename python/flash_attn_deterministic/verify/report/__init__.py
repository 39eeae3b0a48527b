"""The report: one record, written as JSON, Markdown and HTML."""

from __future__ import annotations

from .files import ReportError, write_files
from .html import html
from .markdown import markdown
from .record import NAMES, canonical_digest, json_text

__all__ = [
    "NAMES",
    "ReportError",
    "canonical_digest",
    "html",
    "json_text",
    "markdown",
    "write_files",
]
