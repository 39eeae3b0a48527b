"""The report: one record, written as JSON, Markdown and HTML."""

from __future__ import annotations

from ..shared.files import ReportError, json_text, write_files
from .record import NAMES, canonical_digest, render

__all__ = ["NAMES", "ReportError", "canonical_digest", "json_text", "render", "write_files"]
