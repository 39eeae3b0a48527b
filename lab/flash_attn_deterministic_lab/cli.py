"""The command flash-attn-deterministic-lab, and how its commands end."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from .errors import ArgumentError, LabError, UnavailableError

_COMMANDS = ("bench.cli", "scoreboard.cli", "deviation.cli")  # they import quickly
STATUSES = """\
exit status: 0 done; 1 failed; 2 wrong usage; 6 no such device or attention; 7 the results cannot be
written; 130 interrupted (what was measured is written)
"""
USAGE, UNAVAILABLE = 2, 6


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand, and returns its exit status."""
    parser = argparse.ArgumentParser(prog="flash-attn-deterministic-lab")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in _COMMANDS:
        importlib.import_module(f".{name}", __package__).add_command(commands)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


def ended(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Runs a command; an error that is no bug becomes one line and an exit status."""
    from .shared import commands

    statuses: dict[type[Exception], int] = {
        ArgumentError: USAGE,
        UnavailableError: UNAVAILABLE,
        LabError: 1,
    }
    with commands.sigterm_interrupts():
        return commands.ended(lambda: command(arguments), statuses)


def check_device(device: str) -> None:
    """Raises UnavailableError where a CUDA device is asked for and there is none."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(
            "--device: expected a CUDA device for cuda, got a machine without one; --device cpu "
            "runs here"
        )


if __name__ == "__main__":
    sys.exit(main())
