"""What can go wrong in a build: one class, and one exit code, per kind of failure."""

from __future__ import annotations


class BuildError(Exception):
    """A build step failed; the message says what to do next."""

    exit_code = 1


class SettingError(BuildError):
    """An option or an environment variable has a value that makes no sense."""

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


class UploadError(BuildError):
    """A package server, or the tool that talks to it, ended with an error."""

    exit_code = 8
