"""Exceptions of this package."""

from __future__ import annotations


class LabError(Exception):
    """Base of every exception that this package raises on purpose."""


class ArgumentError(LabError, ValueError):
    """An argument has a wrong value."""


class UnavailableError(LabError, RuntimeError):
    """A device or an attention is not there, or can't run a call; the message says why."""
