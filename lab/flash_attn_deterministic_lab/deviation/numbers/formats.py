"""Number formats, and rounding to them by bit operations on float32 and float64.

A format is its significand's bits, the exponent of its smallest normal number and its largest
finite number. Values stay in a container, float32 or float64, that holds every value of the format.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import torch

from ...errors import ArgumentError

_BITS = {torch.float32: 24, torch.float64: 53}
_EMIN = {torch.float32: -126, torch.float64: -1022}
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format; what rounds beyond `largest` becomes `overflow`."""

    name: str  # as `parse_format` reads it
    precision: int  # bits of the significand, the implicit one included (float32: 24)
    emin: int | None = None  # exponent of the smallest normal number; None: that of the container
    largest: float | None = None  # the largest finite number; None: that of the container
    overflow: float = math.inf  # NaN for a format without infinities
    # Up with the probability of the distance from below in gaps; else to nearest, ties to even.
    stochastic: bool = False

    @property
    def container(self) -> torch.dtype:
        """The dtype that computes: float32 where it holds the format."""
        return torch.float32 if self.precision <= 24 else torch.float64

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a normal number."""
        return 2.0 ** (1 - self.precision if self.stochastic else -self.precision)

    def smallest_exponent(self) -> int:
        return _EMIN[self.container] if self.emin is None else self.emin

    def round(self, values: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Rounds values, float32 or float64, any shape, to this format; the dtype stays.

        NaN and infinities stay. A stochastic format takes its random bits from the generator.

        Raises:
            ArgumentError: values has a dtype that does not hold this format.
        """
        if _BITS.get(values.dtype, 0) < self.precision:
            raise ArgumentError(
                f"values: expected {self.container} or wider for {self.name}, got {values.dtype}"
            )
        dtype = None if self.stochastic else DTYPES.get(self.name)
        if dtype is values.dtype:
            return values
        # torch casts float64 to 16 bits by way of float32, which rounds twice.
        if dtype is not None and (values.dtype == torch.float32 or dtype == torch.float32):
            return values.to(dtype).to(values.dtype)
        if not self.stochastic and self.precision == _BITS[values.dtype] and self.emin is None:
            return values
        rounded = self._bits_rounded(values, generator)
        if self.emin is not None and self.emin > _EMIN[values.dtype]:
            small = values.abs() < 2.0**self.emin
            rounded = torch.where(small, self._fixed_rounded(values, generator), rounded)
        if self.largest is not None:
            beyond = torch.full_like(values, self.overflow).copysign(values)
            rounded = torch.where(rounded.abs() > self.largest, beyond, rounded)
        special = values * math.nan if math.isnan(self.overflow) else values
        return torch.where(values.isfinite(), rounded, special)

    def _bits_rounded(
        self, values: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        """Rounds the significand; numbers below emin are not yet what they should be."""
        dropped = _BITS[values.dtype] - self.precision
        if dropped == 0:
            return values
        bits = values.contiguous().view(_INTEGER[values.dtype])
        if self.stochastic:
            noise = torch.randint(
                0, 1 << dropped, values.shape, generator=generator,
                dtype=bits.dtype, device=values.device,
            )  # fmt: skip
            bits = noise.add_(bits)
        else:
            # Half a gap, less one where the kept part is even: ties go to even.
            odd = (bits >> dropped).bitwise_and_(1)
            bits = odd.add_(bits).add_((1 << (dropped - 1)) - 1)
        # Sign and magnitude: a carry out of the significand moves the exponent up, as it should.
        return bits.bitwise_and_(-1 << dropped).view(values.dtype)

    def _fixed_rounded(
        self, values: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        """Rounds to multiples of the smallest subnormal number."""
        quantum = 2.0 ** (self.smallest_exponent() - self.precision + 1)
        steps = values / quantum
        if not self.stochastic:
            return (steps.round() * quantum).copysign(values)
        noise = torch.rand(
            values.shape, generator=generator, dtype=values.dtype, device=values.device
        )
        # The magnitude goes up, so that a sign makes no difference.
        return ((steps.abs() + noise).floor() * quantum).copysign(values)

    def ulp(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the gap between this format's numbers at |values|, in float64."""
        _, exponent = torch.frexp(values.double().abs())
        lowest = self.smallest_exponent()
        # frexp's significand lies in [1/2, 1), so its exponent is one more.
        exponent = torch.where(values == 0, lowest, (exponent - 1).clamp(min=lowest))
        exponent = exponent - self.precision + 1
        # The bits of 2**exponent; torch.ldexp goes through float32.
        return ((exponent.long().clamp(min=-1022) + 1023) << 52).view(torch.float64)


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
    exponents of float32 (N up to 24) or float64. A trailing ":sr" rounds stochastically.

    Raises:
        ArgumentError: there is no such format.
    """
    base, _, rounding = name.partition(":")
    found = _FORMATS.get(base)
    match = re.fullmatch(r"p([1-9]\d?)", base)
    if match and 2 <= int(match[1]) <= 53:
        found = NumberFormat(base, int(match[1]))
    if found is None or rounding not in ("", "sr") or name.endswith(":"):
        raise ArgumentError(
            f"format: expected one of {', '.join(FORMAT_NAMES)} or p2 to p53, with :sr for "
            f"stochastic rounding, got {name!r}"
        )
    return replace(found, name=name, stochastic=True) if rounding else found
