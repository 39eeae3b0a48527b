"""What can go wrong with upstream's sources; exit codes 10 to 29."""

from __future__ import annotations

from flash_attn_build.errors import BuildError


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
    """The given archive or folder cannot be read as upstream's sources."""

    exit_code = 14


class WrongVersionError(BuildError):
    """The given folder holds another release of upstream than the pinned one."""

    exit_code = 15


class ChangedFilesError(BuildError):
    """The sources claim the pinned version, but their files differ from it."""

    exit_code = 16


class UnsafeArchiveError(BuildError):
    """An archive holds a member that must not be unpacked."""

    exit_code = 17


class PatchError(BuildError):
    """A patch is malformed or does not apply exactly."""

    exit_code = 18


class DiskFullError(BuildError):
    """The disk, or the user's quota on it, is full."""

    exit_code = 19


class NotWritableError(BuildError):
    """A file or folder could not be written."""

    exit_code = 20


class DestinationError(BuildError):
    """The destination holds files that must not be replaced."""

    exit_code = 21


class PipConfigError(BuildError):
    """pip's configuration cannot be read or used."""

    exit_code = 22


class LicenceError(BuildError):
    """A licence text that the wheel must carry was not found."""

    exit_code = 23


class DependencyError(BuildError):
    """A package that fetching needs is not installed."""

    exit_code = 24
