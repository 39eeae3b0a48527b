"""A report's files: JSON, and the pages made from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from html import escape
from typing import Any

from ..shared.files import json_text
from .html import html
from .markdown import markdown

SCHEMA_VERSION = 1
NAMES = ("verification.json", "verification.md", "verification.html")


def canonical_digest(record: Mapping[str, Any]) -> str:
    """Returns the sha256 over a report without its digest, as canonical JSON.

    It detects accidental changes of a file, not tampering: against that stands the attestation of
    the build.
    """
    rest = {name: value for name, value in record.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def render(record: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Returns the text of each file, and why the readable ones could not be made ("": they were).

    Results that took a GPU minutes must not be lost to an error in a table: the JSON file then
    holds them, and the others name the error.
    """
    data, page, web = NAMES
    texts = {data: json_text(record)}
    try:
        texts |= {page: markdown(record), web: html(record)}
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        words = f"This page could not be made ({why}). The results are in {data}."
        return {**texts, page: f"{words}\n", web: f"<!doctype html>\n<p>{escape(words)}</p>\n"}, why
    return texts, ""
