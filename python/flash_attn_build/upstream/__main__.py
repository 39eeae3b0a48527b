"""Command line: prepare upstream's sources, and keep the pin's hashes up to date."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import exit_status
from .pin import PIN_FILE, load_pin
from .prepare import prepare, refresh


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; prints JSON. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_build.upstream", description=__doc__
    )
    parser.add_argument("--pin", type=Path, default=PIN_FILE, help="the data file")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare", help="fetch, check, unpack and patch the sources")
    command.add_argument("--dest", type=Path, required=True, help="folder to make")
    command.add_argument("--unpatched", action="store_true", help="leave the sources as they are")
    commands.add_parser("refresh", help="write patches and hashes of files to the data file")
    given = parser.parse_args(arguments)

    def work() -> Any:
        if given.command == "prepare":
            return prepare(given.dest, load_pin(given.pin), patched=not given.unpatched)
        refresh(load_pin(given.pin))
        return load_pin(given.pin).patches

    return exit_status(lambda: print(json.dumps(work())))


if __name__ == "__main__":
    sys.exit(main())
