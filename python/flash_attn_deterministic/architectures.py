"""Whether a GPU runs the machine code or PTX of a wheel."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"(\d+)(\d)([a-z]?)(?:-(real|virtual))?")


@dataclass(frozen=True)
class Architecture:
    """One entry of CMAKE_CUDA_ARCHITECTURES.

    Args:
        capability: the compute capability that it is built for, (major, minor).
        name: without a prefix, such as "90a".
        exact: whether it runs on exactly that capability, as the letter of "90a" says.
        real: whether it is machine code.
        virtual: whether it is PTX.
    """

    capability: tuple[int, int]
    name: str
    exact: bool
    real: bool
    virtual: bool

    def real_runs_on(self, capability: tuple[int, int]) -> bool:
        """Returns whether its machine code, if any, runs on a GPU."""
        same_major = capability[0] == self.capability[0]
        return self.real and same_major and self._reaches(capability)

    def virtual_runs_on(self, capability: tuple[int, int]) -> bool:
        """Returns whether a driver can compile its PTX, if any, for a GPU."""
        return self.virtual and self._reaches(capability)

    def _reaches(self, capability: tuple[int, int]) -> bool:
        return capability == self.capability if self.exact else capability >= self.capability


def parse(architecture: str) -> Architecture:
    """Parses an entry such as "80-real" or "90-virtual"; a ValueError for another form."""
    match = _NAME.fullmatch(architecture)
    if match is None:
        raise ValueError(f"architecture: expected a form like '90-real', got {architecture!r}")
    return Architecture(
        capability=(int(match[1]), int(match[2])),
        name=f"{match[1]}{match[2]}{match[3]}",
        exact=bool(match[3]),
        real=match[4] != "virtual",
        virtual=match[4] != "real",
    )


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Returns whether one entry of CMAKE_CUDA_ARCHITECTURES runs on a GPU.

    Machine code (real) runs on its own major compute capability from its minor one up. PTX
    (virtual) is compiled by the driver for any capability from its own up. No suffix means both.
    With a letter ("90a"), either runs on exactly that capability.
    """
    parsed = parse(architecture)
    return parsed.real_runs_on(capability) or parsed.virtual_runs_on(capability)
