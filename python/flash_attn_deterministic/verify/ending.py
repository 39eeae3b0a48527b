"""How a command ends: its exit status, one line about an error, and signals."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from .installed import NotInstalledError
from .outcome import Exit
from .shared.files import ReportError


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Makes SIGTERM raise KeyboardInterrupt within the block, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ended(command: Callable[[], int], statuses: Mapping[type[Exception], Exit]) -> int:
    """Runs a command, and returns its exit status.

    Args:
        command: returns its exit status.
        statuses: of exceptions that end it with one line on stderr, besides those of every command.
    """
    known: dict[type[Exception], Exit] = {
        NotInstalledError: Exit.ENVIRONMENT,
        ReportError: Exit.REPORT,
        **statuses,
    }
    try:
        return command()
    except KeyboardInterrupt:  # before the run has begun, or again while it ends
        print("interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except tuple(known) as error:
        print(f"error: {error}", file=sys.stderr)
        return next(status for kind, status in known.items() if isinstance(error, kind))
