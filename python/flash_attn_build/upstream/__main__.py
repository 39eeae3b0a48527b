"""Command line: prepare upstream's sources, and keep the pin's hashes up to date."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import BuildError
from ..files import exit_on_sigterm, sha256_of, tree_sha256
from .pin import PIN_FILE, load_pin
from .prepare import prepare, refresh
from .source import read_archive


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Arguments; None: the process's.

    Returns:
        Exit status: 0, or the status of the kind of failure.
    """
    exit_on_sigterm()
    try:
        print(json.dumps(_run(_parser().parse_args(arguments))))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(options: argparse.Namespace) -> Any:
    if options.command == "prepare":
        return prepare(options.dest, load_pin(options.pin), patched=not options.unpatched)
    if options.command == "refresh":
        refresh(load_pin(options.pin))
        return load_pin(options.pin).patches
    archive: Path = options.archive
    tree = tree_sha256(read_archive(archive))
    sdist = {"sha256": sha256_of(archive), "size": archive.stat().st_size}
    return {"sdist": sdist, "tree_sha256": tree}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_build.upstream", description=__doc__
    )
    parser.add_argument("--pin", type=Path, default=PIN_FILE, help="the data file")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare", help="fetch, check, unpack and patch the sources")
    command.add_argument("--dest", type=Path, required=True, help="folder to make")
    command.add_argument("--unpatched", action="store_true", help="leave the sources as they are")
    commands.add_parser("refresh", help="write the patches and their hashes to the data file")
    command = commands.add_parser("hash", help="print the hashes that a new pin needs")
    command.add_argument("archive", type=Path, help="source distribution")
    return parser


if __name__ == "__main__":
    sys.exit(main())
