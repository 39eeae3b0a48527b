"""Exceptions of this package. Each is also the built-in type that a caller would expect.

FlashAttnError
    ArgumentError (ValueError, RuntimeError)
    ArgumentTypeError (TypeError, RuntimeError)
        DtypeError
    UnsupportedError (NotImplementedError)
    UnsupportedDeviceError, MissingInstanceError, NotDeterministicError, ModeError, RankError,
    BuildInfoError (RuntimeError)
"""

from __future__ import annotations


class FlashAttnError(Exception):
    """Base of every exception that this package raises on purpose."""


# Argument errors are RuntimeErrors too, as flash_attn's own checks raise.


class ArgumentError(FlashAttnError, ValueError, RuntimeError):
    """An argument has a wrong value, shape or device."""


class ArgumentTypeError(FlashAttnError, TypeError, RuntimeError):
    """An argument has a wrong type."""


class DtypeError(ArgumentTypeError):
    """A tensor has a wrong dtype."""


class UnsupportedError(FlashAttnError, NotImplementedError):
    """A feature of flash_attn's interface that this version does not have."""


class UnsupportedDeviceError(FlashAttnError, RuntimeError):
    """This wheel can't run on the device of the tensors."""


class NotDeterministicError(FlashAttnError, RuntimeError):
    """torch.use_deterministic_algorithms forbids what the call would run."""


class ModeError(FlashAttnError, RuntimeError):
    """A block of `deterministic_mode` is left that was not entered."""


class MissingInstanceError(FlashAttnError, RuntimeError):
    """This wheel was built without the kernel that the call needs."""


class RankError(FlashAttnError, RuntimeError):
    """Another rank of the group ended, did not answer in time, or made another call."""


class BuildInfoError(FlashAttnError, RuntimeError):
    """The record of what the wheel holds is missing or unreadable."""
