"""Number formats, and rounding to them in float32 and float64.

A format is its significand's bits, the exponent of its smallest normal number and its largest
finite number. Values stay in a container, float32 or float64, that holds every value of the format.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from ...errors import ArgumentError

_BITS = {torch.float32: 24, torch.float64: 53}
_EMIN = {torch.float32: -126, torch.float64: -1022}


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format; what rounds beyond `largest` becomes `overflow`."""

    name: str  # as `parse_format` reads it
    precision: int  # bits of the significand, the implicit one included (float32: 24)
    emin: int | None = None  # exponent of the smallest normal number; None: that of the container
    largest: float | None = None  # the largest finite number; None: that of the container
    overflow: float = math.inf  # NaN for a format without infinities

    @property
    def container(self) -> torch.dtype:
        """The dtype that computes: float32 where it holds the format."""
        return torch.float32 if self.precision <= 24 else torch.float64

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """Rounds values, float32 or float64, any shape, to nearest even; the dtype stays.

        Raises:
            ArgumentError: values has a dtype that does not hold this format.
        """
        if _BITS.get(values.dtype, 0) < self.precision:
            raise ArgumentError(
                f"values: expected {self.container} or wider for {self.name}, got {values.dtype}"
            )
        dtype = DTYPES.get(self.name)
        if dtype is values.dtype:
            return values
        # torch casts float64 to 16 bits by way of float32, which rounds twice.
        if dtype is not None and (values.dtype == torch.float32 or dtype == torch.float32):
            return values.to(dtype).to(values.dtype)
        gaps = self.ulp(values)  # powers of two: only `round` rounds
        rounded = ((values.double() / gaps).round() * gaps).copysign(values)
        if self.largest is not None:
            beyond = torch.full_like(rounded, self.overflow).copysign(values)
            rounded = torch.where(rounded.abs() > self.largest, beyond, rounded)
        special = values * math.nan if math.isnan(self.overflow) else values
        return torch.where(values.isfinite(), rounded.to(values.dtype), special)

    def ulp(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the gap between this format's numbers at |values|, in float64."""
        # frexp's significand lies in [1/2, 1), so its exponent is one more.
        exponent = torch.frexp(values.double()).exponent.long() - 1
        lowest = _EMIN[self.container] if self.emin is None else self.emin
        exponent = torch.where(values == 0, lowest, exponent.clamp(min=lowest))
        # The bits of a power of two; torch.ldexp goes through float32.
        power = (exponent - self.precision + 1).clamp(min=-1022)
        return ((power + 1023) << 52).view(torch.float64)


DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FORMATS = {
    "fp64": NumberFormat("fp64", 53),
    "fp32": NumberFormat("fp32", 24, -126, float(torch.finfo(torch.float32).max)),
    "tf32": NumberFormat("tf32", 11, -126),
    "bf16": NumberFormat("bf16", 8, -126, float(torch.finfo(torch.bfloat16).max)),
    "fp16": NumberFormat("fp16", 11, -14, 65504.0),
    "fp8_e4m3": NumberFormat("fp8_e4m3", 4, -6, 448.0, math.nan),
    "fp8_e5m2": NumberFormat("fp8_e5m2", 3, -14, 57344.0),
}
FORMAT_NAMES = tuple(_FORMATS)


def parse_format(name: str) -> NumberFormat:
    """Returns the format of a name: those of FORMAT_NAMES, or pN.

    fp8_e4m3 is OCP's finite-only variant. pN has a significand of N bits, 2 to 53, and the
    exponents of float32 (N up to 24) or float64.

    Raises:
        ArgumentError: there is no such format.
    """
    found = _FORMATS.get(name)
    match = re.fullmatch(r"p([1-9]\d?)", name)
    if match and 2 <= int(match[1]) <= 53:
        found = NumberFormat(name, int(match[1]))
    if found is None:
        raise ArgumentError(
            f"format: expected one of {', '.join(FORMAT_NAMES)} or p2 to p53, got {name!r}"
        )
    return found
