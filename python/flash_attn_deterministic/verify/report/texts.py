"""The files of a report, from its record."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from .html import html
from .markdown import markdown
from .record import NAMES, json_text


def render(record: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Returns the text of each file, and why the readable ones could not be made.

    Results that took a GPU minutes to find must not be lost to a slip in a table: then the JSON
    file holds them all the same, and the others say so.

    Args:
        record: of the report.

    Returns:
        Texts by file name, and the reason; "" if there is none.
    """
    data, page, web = NAMES
    texts = {data: json_text(record)}
    try:
        texts |= {page: markdown(record), web: html(record)}
    except Exception as error:  # whatever it is, it is ours
        why = f"{type(error).__name__}: {error}"
        words = f"This page could not be made ({why}). The results are in {data}."
        texts |= {page: f"{words}\n", web: f"<!doctype html>\n<p>{escape(words)}</p>\n"}
        return texts, why
    return texts, ""
