"""exp2, log and tanh made of IEEE operations only.

torch's own exp2 gives an element other bits in a vector register than in the scalar loop that
finishes a range, so its result depends on shape, stride, thread count and CPU. Additions,
multiplications, divisions and bit shifts are exact or correctly rounded in each of those cases.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class _Format(NamedTuple):
    integer: torch.dtype
    bias: int
    mantissa_bits: int
    exp2_degree: int
    expm1_degree: int


_FORMATS = {
    torch.float32: _Format(torch.int32, 127, 23, 7, 9),
    torch.float64: _Format(torch.int64, 1023, 52, 13, 15),
}
_EXP2_TAYLOR = [math.log(2.0) ** n / math.factorial(n) for n in range(14)]
_LOG_TERMS = 12
_TANH_ONE = 22.0
_LOG2_HIGH = 355.0 / 512.0
_LOG2_LOW = math.log(2.0) - _LOG2_HIGH


def exp2(x: torch.Tensor) -> torch.Tensor:
    """Returns 2**x to about one unit in the last place; x is float32 or float64.

    NaN gives NaN; results below the normal range by more than half a binade are 0, above
    2**(largest exponent + 1/2) infinity.
    """
    fmt = _FORMATS[x.dtype]
    # The exponent field 0 makes the factor 0, the full one makes it infinite.
    fraction = x.clamp(-fmt.bias, fmt.bias + 1)
    # Rounds to an integer: at this size, neighbouring numbers are 1 apart. torch.round does the
    # same, but on the thread pool even for small tensors.
    shift = 1.5 * 2.0**fmt.mantissa_bits
    whole = fraction.add(shift).sub_(shift)
    fraction.sub_(whole)
    result = fraction * _EXP2_TAYLOR[fmt.exp2_degree]
    for coefficient in _EXP2_TAYLOR[fmt.exp2_degree - 1 : 0 : -1]:
        result.add_(coefficient).mul_(fraction)
    result.add_(_EXP2_TAYLOR[0])
    exponent = whole.to(fmt.integer).add_(fmt.bias).bitwise_left_shift_(fmt.mantissa_bits)
    return result.mul_(exponent.view(x.dtype))


def log(x: torch.Tensor) -> torch.Tensor:
    """Returns the natural logarithm of x > 0, worked out in float64; infinity and NaN stay."""
    mantissa, exponent = torch.frexp(x.double())
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    exponent = torch.where(low, exponent - 1, exponent)
    # log(mantissa) = 2 atanh(ratio), and |ratio| < 0.172.
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = torch.zeros_like(square)
    for n in reversed(range(_LOG_TERMS)):
        series = series * square + 1.0 / (2 * n + 1)
    result = exponent.double() * math.log(2.0) + ratio * 2.0 * series
    return torch.where(torch.isfinite(x), result.to(x.dtype), x)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Returns the hyperbolic tangent to about two units in the last place; NaN gives NaN."""
    fmt = _FORMATS[x.dtype]
    # Above this tanh rounds to 1; the exponential is still far from overflow.
    twice = x.abs().clamp_(max=_TANH_ONE).mul_(2.0)
    shift = 1.5 * 2.0**fmt.mantissa_bits
    whole = (twice * math.log2(math.e)).add_(shift).sub_(shift)
    # The high part of log(2) has few bits, so that its multiples are exact.
    remainder = twice.sub_(whole * _LOG2_HIGH).sub_(whole * _LOG2_LOW)
    series = torch.full_like(remainder, 1.0 / math.factorial(fmt.expm1_degree))
    for n in range(fmt.expm1_degree - 1, 0, -1):
        series.mul_(remainder).add_(1.0 / math.factorial(n))
    series.mul_(remainder)  # exp(remainder) - 1, without cancellation
    exponent = whole.to(fmt.integer).add_(fmt.bias).bitwise_left_shift_(fmt.mantissa_bits)
    power = exponent.view(x.dtype)
    expm1 = series.mul_(power).add_(power - 1.0)
    return torch.copysign(expm1 / (expm1 + 2.0), x)
