"""Which GPUs run the machine code and PTX that a wheel holds."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAME = re.compile(r"(\d+)(\d)([a-z]?)(?:-(real|virtual))?")


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Tells whether one entry of CMAKE_CUDA_ARCHITECTURES runs on a GPU.

    Machine code (real) runs on its own major compute capability from its minor one up. PTX
    (virtual) is compiled by the driver for any capability from its own up. No suffix means both.
    A letter ("90a") ties either to exactly that capability.

    Args:
        architecture: such as "80-real" or "90-virtual".
        capability: compute capability of the GPU, (major, minor).

    Returns:
        True when the GPU can run it.

    Raises:
        ValueError: no such form of architecture.
    """
    match = _NAME.fullmatch(architecture)
    if match is None:
        raise ValueError(f"architecture: expected a form like '90-real', got {architecture!r}")
    built_for = int(match[1]), int(match[2])
    if match[3]:
        return capability == built_for
    real = match[4] != "virtual" and capability[0] == built_for[0] and capability >= built_for
    virtual = match[4] != "real" and capability >= built_for
    return real or virtual


def any_runs_on(architectures: Iterable[str], capability: tuple[int, int]) -> bool:
    """Tells whether one of several architectures runs on a GPU; see `runs_on`."""
    return any(runs_on(architecture, capability) for architecture in architectures)
