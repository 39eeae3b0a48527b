"""The command flash-attn-deterministic."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import lab
from .errors import FlashAttnError

# Modules with a function add_command; they import quickly.
_COMMANDS = ("info.cli", "verify.cli")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: arguments after the program's name; None: those of this process.

    Returns:
        Exit status: 0 done, 1 the package reports an error, 130 interrupted (2 is argparse's, for
        usage); `verify` has more.
    """
    try:
        return _run(argv)
    except FlashAttnError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # Commands that save partial results catch it themselves.
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str] | None) -> int:
    if lab.is_missing(sys.argv[1:] if argv is None else argv):
        return lab.MISSING
    parser = argparse.ArgumentParser(prog="flash-attn-deterministic")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in _COMMANDS:
        importlib.import_module(f".{name}", __package__).add_command(commands)
    lab.add_commands(commands)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
