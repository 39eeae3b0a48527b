"""What commands share: options, how they end, and variables of the environment."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .files import ReportError

# Exit statuses of all commands; 130: 128 + SIGINT, as shells have it.
UNWRITTEN, INTERRUPTED = 7, 130


def add_options(parser: argparse.ArgumentParser, out: str, files: str, wheel: str) -> None:
    """Adds --device, --wheel (in words) and --out (the default folder, and the files in it)."""
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="where to run (default: cuda)"
    )
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=wheel)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(out),
        metavar="DIR",
        help=f"folder of {files} (default: {out})",
    )


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Makes SIGTERM raise KeyboardInterrupt within the block, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ended(command: Callable[[], int], statuses: Mapping[type[Exception], int]) -> int:
    """Runs a command, and returns its exit status.

    `statuses` are of exceptions that end it with one line on stderr, besides a report that cannot
    be written; the first that fits counts.
    """
    known: dict[type[Exception], int] = {ReportError: UNWRITTEN, **statuses}
    try:
        return command()
    except KeyboardInterrupt:  # before the run has begun, or again while it ends
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except tuple(known) as error:
        print(f"error: {error}", file=sys.stderr)
        return int(next(status for kind, status in known.items() if isinstance(error, kind)))


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Within the block, a variable of the environment has this value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
