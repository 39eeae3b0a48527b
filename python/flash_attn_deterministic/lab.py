"""Commands of flash-attn-deterministic-lab, which need not be installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

MISSING = 6  # the exit status without the lab
_GROUP = "flash_attn_deterministic.commands"
_COMMANDS = {
    "bench": "time attention on this machine",
    "scoreboard": "which promises of equal bits each attention keeps",
    "deviation": "how far low-precision attention is from exact: studies and report",
}


def add_commands(commands: Any) -> None:
    """Adds the lab's commands to a program's subparsers; those that are not there to its help."""
    found = _found()
    for name, words in _COMMANDS.items():
        if name in found:
            found[name].load()(commands)
        else:
            commands.add_parser(name, help=f"{words} (not installed)")


def _found() -> dict[str, Any]:
    return {entry.name: entry for entry in entry_points(group=_GROUP)}


def is_missing(argv: Sequence[str]) -> bool:
    """Returns whether a command line is of the lab, which is not installed; says so if it is."""
    command = next(iter(argv), "")
    if command not in _COMMANDS or command in _found():
        return False
    print(
        f"error: {command} is in the package flash-attn-deterministic-lab, which is not installed; "
        "in a clone: python -m pip install ./lab",
        file=sys.stderr,
    )
    return True
