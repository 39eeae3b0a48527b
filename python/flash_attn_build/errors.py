"""Errors of builds and releases: one class and one exit code for each kind of failure."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection

from .files import exit_on_sigterm


def exit_status(work: Callable[[], object], left: str = "") -> int:
    """Runs the work of a command. No temporary file is left if it fails or is terminated.

    Args:
        work: What to run.
        left: Printed after an OSError: the state of what the command writes.

    Returns:
        Exit status: 0, or that of the kind of failure; stderr has the reason.
    """
    exit_on_sigterm()
    try:
        work()
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}. {left}".rstrip(), file=sys.stderr)
        return StepError.exit_code
    except KeyboardInterrupt:
        print(f"error: interrupted. {left}".rstrip(), file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def first_of(names: Collection[str]) -> str:
    """Lists names, of many the first three: "a, b, c and 2 more"."""
    some = ", ".join(sorted(names)[:3])
    return f"{some} and {len(names) - 3} more" if len(names) > 3 else some


class BuildError(Exception):
    """A build step failed; the message says what to do next."""

    exit_code = 1


class SettingError(BuildError):
    """An option or an environment variable has an invalid value."""

    exit_code = 2


class ToolchainError(BuildError):
    """A compiler, or a part of the CUDA toolkit, is missing."""

    exit_code = 3


class StepError(BuildError):
    """A tool that the build runs ended with an error."""

    exit_code = 4


class WheelError(BuildError):
    """The wheel does not hold what it must, or holds more."""

    exit_code = 5


class RefusedError(BuildError):
    """The gate does not let a wheel be published."""

    exit_code = 7


class PinError(BuildError):
    """The pin's data file, or the patch folder beside it, is not consistent."""

    exit_code = 10


class NetworkError(BuildError):
    """A package source that could hold the archive did not answer properly."""

    exit_code = 11


class NotOnIndexError(BuildError):
    """Every package source answered, and none holds the pinned source distribution."""

    exit_code = 12


class HashMismatchError(BuildError):
    """An archive is not the pinned one."""

    exit_code = 13


class SourceError(BuildError):
    """The given archive or folder is not upstream's sources of the pinned version."""

    exit_code = 14


class PatchError(BuildError):
    """A patch does not apply, or gives other files than the pinned ones."""

    exit_code = 18


class DiskError(BuildError):
    """The disk is full, or a file or folder cannot be written."""

    exit_code = 19


class DestinationError(BuildError):
    """The destination holds files that must not be replaced."""

    exit_code = 21


class PipConfigError(BuildError):
    """pip's configuration cannot be read or used."""

    exit_code = 22


class LicenceError(BuildError):
    """A licence text that the wheel must carry was not found."""

    exit_code = 23
