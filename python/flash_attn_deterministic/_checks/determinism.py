"""What a call promises about its backward, and what torch was told to accept."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch

from ..errors import ArgumentTypeError, NotDeterministicError
from ..mode.current import Mode, require_deterministic_kernels
from .describe import shown
from .numbers import check_flag

# Means it, whatever the mode: the gradients are added atomically.
NEVER = "never"
Deterministic = bool | Literal["never"] | None


def resolve_deterministic(deterministic: Any, mode: Mode) -> bool:
    """Returns whether the backward of a call is to be deterministic.

    False is flash_attn's default, which frameworks pass on without having been asked for it: it
    asks for nothing, and the mode decides.

    Args:
        deterministic: the call's argument; None or False: as the mode says; "never": it is not.
        mode: that of the call.

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
    """Does what torch.use_deterministic_algorithms asks for before a backward that adds atomically.

    Args:
        device: where it runs; on the CPU nothing is added atomically.

    Raises:
        NotDeterministicError: torch is to use deterministic algorithms only. If it is to warn only,
            this warns.
    """
    if device.type != "cuda" or not torch.are_deterministic_algorithms_enabled():
        return
    asked = "but you set 'torch.use_deterministic_algorithms(True"
    told = (
        "the backward of flash_attn_deterministic does not have a deterministic implementation "
        "with deterministic='never', or outside of the deterministic mode, "
    )
    advice = "pass deterministic=True to the call"
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(f"{told}{asked}, warn_only=True)'; {advice}", stacklevel=2)
    else:
        raise NotDeterministicError(f"{told}{asked})'; {advice}")
