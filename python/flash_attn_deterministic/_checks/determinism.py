"""Whether the backward of a call is deterministic, and torch.use_deterministic_algorithms."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch

from ..errors import ArgumentTypeError, NotDeterministicError
from ..mode.current import Mode, require_deterministic_kernels
from .describe import shown
from .numbers import check_flag

NEVER = "never"  # gradients are added atomically, whatever the mode
Deterministic = bool | Literal["never"] | None


def resolve_deterministic(deterministic: Any, mode: Mode) -> bool:
    """Returns whether the backward of a call is to be deterministic.

    False is flash_attn's default, which frameworks pass even where their user chose nothing. So it
    means the same as None: the mode decides.

    Args:
        deterministic: the call's argument; None or False: as in the mode; "never": it is not.
        mode: of the call.

    Raises:
        ArgumentTypeError: neither a bool, None nor "never".
        MissingInstanceError: True, and the wheel holds no deterministic kernels.
    """
    if deterministic is None:
        return mode.enabled
    if isinstance(deterministic, str):
        if deterministic == NEVER:
            return False
        raise ArgumentTypeError(
            f"deterministic: expected a bool, None or {NEVER!r}, got {shown(deterministic)}"
        )
    if check_flag("deterministic", deterministic):
        require_deterministic_kernels("deterministic", "pass deterministic=False")
        return True
    return mode.enabled


def alert_atomics(device: torch.device) -> None:
    """Applies torch.use_deterministic_algorithms to a backward that adds atomically.

    Args:
        device: of the tensors; on the CPU nothing is added atomically.

    Raises:
        NotDeterministicError: torch may use deterministic algorithms only. With warn_only=True
            this warns instead.
    """
    if device.type != "cuda" or not torch.are_deterministic_algorithms_enabled():
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    options = "True, warn_only=True" if warn_only else "True"
    message = (
        "the backward of flash_attn_deterministic does not have a deterministic implementation "
        "with deterministic='never', or outside of the deterministic mode, but you set "
        f"'torch.use_deterministic_algorithms({options})'; pass deterministic=True to the call"
    )
    if not warn_only:
        raise NotDeterministicError(message)
    warnings.warn(message, stacklevel=2)
