"""Commands of flash-attn-deterministic-lab, which need not be installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

_GROUP = "flash_attn_deterministic.commands"
_COMMANDS = {
    "bench": "time attention on this machine",
    "scoreboard": "which promises of equal bits each attention keeps",
    "deviation": "how far low-precision attention is from exact: studies and report",
}


def add_commands(commands: Any) -> None:
    """Adds the lab's commands to a program's subparsers; without the lab they say how to get it."""
    found = {entry.name: entry for entry in entry_points(group=_GROUP)}
    for name, words in _COMMANDS.items():
        if name in found:
            found[name].load()(commands)
        else:
            parser = commands.add_parser(name, help=f"{words} (not installed)", add_help=False)
            parser.add_argument("arguments", nargs=argparse.REMAINDER)
            parser.set_defaults(run=_missing)


def _missing(arguments: argparse.Namespace) -> int:
    print(
        f"error: {arguments.command} is in another package; "
        "run `python -m pip install flash-attn-deterministic[lab]`",
        file=sys.stderr,
    )
    return 6


def run(argv: Sequence[str]) -> int:
    """Runs one of the lab's commands with its arguments, and returns its exit status."""
    parser = argparse.ArgumentParser(prog="flash-attn-deterministic")
    add_commands(parser.add_subparsers(dest="command", required=True))
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status
