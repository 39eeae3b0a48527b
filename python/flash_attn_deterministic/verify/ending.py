"""How a command ends: with an exit status, and one line for what went wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from .installed import NotInstalledError
from .outcome import Exit
from .report import ReportError


def ended(command: Callable[[], int], statuses: Mapping[type[Exception], Exit]) -> int:
    """Runs a command, and prints what it raised if it is known how that ends a command.

    Args:
        command: returns its exit status.
        statuses: that of each exception which the command has a status of its own for.

    Returns:
        The exit status.
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
