"""The report: one record, written as JSON, Markdown and HTML."""

from __future__ import annotations

from .files import ReportError, write_files
from .record import NAMES, canonical_digest, json_text, render

__all__ = ["NAMES", "ReportError", "canonical_digest", "json_text", "render", "write_files"]
