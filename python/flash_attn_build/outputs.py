"""Values that one job of a CI hands to the next."""

from __future__ import annotations

import os


def set_output(name: str, value: str) -> None:
    """Hands a value on, where a CI asks for it by a file named in GITHUB_OUTPUT.

    Args:
        name: Name of the output.
        value: Its value, one line.
    """
    if path := os.environ.get("GITHUB_OUTPUT"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{name}={value}\n")
