"""The command `flash-attn-deterministic info`."""

from __future__ import annotations

import argparse
from typing import Any


def add_command(commands: Any) -> None:
    """Adds the command to the program's subparsers."""
    parser = commands.add_parser(
        "info", help="what this wheel holds, and whether this machine can run it"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the result of `collect`.

    Raises:
        BuildInfoError: the wheel's own record is missing (a source tree) or unreadable.
    """
    from .collect import collect

    collected = collect()
    print(collected.json() if arguments.json else collected.text())
    return 0
