"""The command flash-attn-deterministic."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .errors import FlashAttnError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: arguments after the program's name; None: those of this process.

    Returns:
        Exit status: 0 done, 1 the package reports an error (2 is argparse's, for usage).
    """
    parser = argparse.ArgumentParser(prog="flash-attn-deterministic")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser(
        "info", help="what this wheel holds, and whether this machine can run it"
    )
    info.add_argument("--json", action="store_true", help="one JSON object instead of text")
    arguments = parser.parse_args(argv)
    try:
        print(_info(as_json=arguments.json))
    except FlashAttnError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _info(*, as_json: bool) -> str:
    from .info import collect

    collected = collect()
    return collected.json() if as_json else collected.text()


if __name__ == "__main__":
    sys.exit(main())
