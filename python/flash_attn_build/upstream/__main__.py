"""Command line: prepare upstream's sources, and keep the pin's hashes up to date."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flash_attn_build.errors import BuildError
from flash_attn_build.upstream import layout
from flash_attn_build.upstream.digest import sha256_of
from flash_attn_build.upstream.pin import PIN_FILE, load_pin, refresh_patches
from flash_attn_build.upstream.prepare import prepare
from flash_attn_build.upstream.unpack import unpack_archive


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments; None: the process's.

    Returns:
        Exit status: 0, or the status of the kind of failure.
    """
    options = _parser().parse_args(arguments)
    # As an exception, so that temporary files go when a build is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        print(json.dumps(_run(options)))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(options: argparse.Namespace) -> Any:
    if options.command == "prepare":
        return prepare(options.dest, load_pin(options.pin), patched=not options.unpatched)
    if options.command == "refresh":
        return [asdict(patch) for patch in refresh_patches(options.pin)]
    return _hashes(options.archive)


def _hashes(archive: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        names = unpack_archive(archive, tree)
        return {
            "sdist": {"sha256": sha256_of(archive), "size": archive.stat().st_size},
            "tree_sha256": layout.tree_sha256(tree, names),
        }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_build.upstream", description=__doc__
    )
    parser.add_argument("--pin", type=Path, default=PIN_FILE, help="the data file")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare", help="fetch, check, unpack and patch the sources")
    command.add_argument("--dest", type=Path, required=True, help="folder to make")
    command.add_argument("--unpatched", action="store_true", help="leave the sources as they are")
    commands.add_parser("refresh", help="write the patches' names and hashes to the data file")
    command = commands.add_parser("hash", help="print the hashes that a new pin needs")
    command.add_argument("archive", type=Path, help="source distribution")
    return parser


if __name__ == "__main__":
    sys.exit(main())
