"""How far results may be from the definition in float64, from the roundings that kernels make.

Weights and results are rounded to the dtype, once each: that is at most eps times the sum of
weights times |values|. The hardware's tanh is off by up to 2^-10, and a score by softcap times
that. A ratio is an error over its bound: 1 is the limit, and a NaN an infinite error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..reference.dropout import keep_mask
from .exact import Definition, Exact, Triple

if TYPE_CHECKING:
    from .contract.call import Call, Tensors

# Largest error of a plain call on a GPU, over that of torch's flash attention.
OVER_TORCHS = 2.0
# Error of dq with a residual of out, over that without, where values are alike.
OVER_NO_RESIDUAL = 0.6
LSE = 5e-4  # of sums in fp32, and of scores
_SMALLEST = 1e-5  # an error of this size says nothing
TANH = 2.0**-10
_PLAIN = 2.0  # times the largest error of plain torch in the same dtype
_NORM = 3.0  # roundings of a gradient: weights, their gradients, the result
_NOTHING = 2.0**-6  # of a unit in the last place
SIGMAS = 6.0  # that the share of dropped weights, or a sum of roundings, may be off


@dataclass(frozen=True)
class Error:
    """How far a tensor is from the exact one."""

    largest: float  # of all elements
    rmse: float  # root mean square
    ratio: float  # over the bound; the worst element's


def forward(found: Tensors, exact: Exact, dtype: torch.dtype, softcap: float) -> dict[str, Error]:
    """Compares out and softmax_lse; those of a row without keys must be exactly 0 and +inf."""
    out, lse = found["out"], found["softmax_lse"]
    bound = (torch.finfo(dtype).eps + softcap * 2 * TANH) * exact.size + _SMALLEST
    empty = exact.softmax_lse == math.inf
    # A difference of infinities would be no number.
    same = empty & (lse == math.inf)
    lse_gap = lse.double().masked_fill(same, 0.0) - exact.softmax_lse.masked_fill(same, 0.0)
    return {
        "out": error(out.double() - exact.out, bound),
        "softmax_lse": error(lse_gap, torch.full_like(lse_gap, LSE + softcap * TANH)),
    }


def gradients(
    found: Triple, exact: Triple, plain: Triple, dtype: torch.dtype, softcap: float
) -> dict[str, Error]:
    """Compares dq, dk and dv: the largest error, and the norm of all.

    `exact` is in float64; `plain` what torch makes of the same formulas in the dtype of the call.
    """
    eps = torch.finfo(dtype).eps
    floor = (eps * _NOTHING + softcap * TANH) * _largest(*exact)
    errors = {}
    for name, one, wanted, other in zip(("dq", "dk", "dv"), found, exact, plain, strict=True):
        gap, others = one.double() - wanted, other.double() - wanted
        if not gap.numel():
            errors[name] = Error(0.0, 0.0, 0.0)
            continue
        largest = _PLAIN * _largest(others) + floor
        worst = error(gap, torch.full_like(gap, largest))
        norm = (_NORM * eps + softcap * 2 * TANH) * float(wanted.norm())
        norm += eps * _NOTHING * math.sqrt(gap.numel())
        ratio = _finite(gap.norm()) / norm
        errors[name] = Error(worst.largest, worst.rmse, max(worst.ratio, ratio))
    return errors


def error(gap: torch.Tensor, bound: torch.Tensor) -> Error:
    """Returns how large differences are, and how large beside a bound of each."""
    if gap.numel() == 0:
        return Error(0.0, 0.0, 0.0)
    gap = gap.double().abs().nan_to_num(math.inf, posinf=math.inf)
    rmse, worst = gap.square().mean().sqrt(), torch.where(gap == 0, 0.0, gap / bound).max()
    return Error(float(gap.max()), _finite(rmse), _finite(worst))


def compare(one: Call, own: Tensors) -> tuple[dict[str, Error], Tensors]:
    """Compares the results of a dense call; returns errors, and what is exact."""
    options, dtype = dict(one.keywords), one.q.dtype
    if "probs" in own:
        shape = (one.q.shape[0], one.q.shape[2], one.q.shape[1], one.k.shape[1])
        kept = ~own["probs"].signbit()
        options["keep"] = kept if kept.shape == shape else kept.new_ones(shape)
    if one.options.get("dropout_seeds") is not None:
        options["keep"] = kept_of_seeds(one)
    truth = Definition(**options)
    if "dq" in own:
        plain = replace(truth, dtype=dtype)
        three = [d.gradients(one.q, one.k, one.v, one.dout, one.dlse) for d in (truth, plain)]
        own_three = own["dq"], own["dk"], own["dv"]
        found = gradients(own_three, three[0], three[1], dtype, truth.softcap)
        return found, dict(zip(("dq", "dk", "dv"), three[0], strict=True))
    exact = truth.forward(one.q, one.k, one.v)
    found = forward(own, exact, dtype, truth.softcap)
    if "k_cache" in own:
        found |= _appended(one, own)
    if truth.dropout_p:
        found["probs"] = _dropped(own["probs"], truth.dropout_p)
    return found, {"out": exact.out}


def kept_of_seeds(one: Call) -> torch.Tensor:
    """Returns what the seeds of a call keep, (batch, nheads, seqlen_q, seqlen_k)."""
    seeds, (batch, seqlen_q, nheads, _) = one.options["dropout_seeds"], one.q.shape
    sequences, heads = (torch.arange(count, device=seeds.device) for count in (batch, nheads))
    spans = (0, seqlen_q), (0, one.k.shape[1])
    return keep_mask(seeds[:, None], one.options["dropout_p"], sequences, heads, *spans)


def _appended(one: Call, own: Tensors) -> dict[str, Error]:
    """Compares a cache that was written to: values as they were, keys off by one rounding."""
    eps = torch.finfo(one.k.dtype).eps
    found = {}
    for name, wanted, unit in (("k", one.k.double(), eps), ("v", one.v.double(), 0.0)):
        gap = own[f"{name}_cache"].double() - wanted
        found[f"{name}_new"] = error(gap, unit * wanted.abs() + 1e-5)
    return found


def _dropped(probs: torch.Tensor, dropout_p: float) -> Error:
    """Compares the share of dropped weights with what it should be."""
    visible = probs != 0
    count = max(1, int(visible.sum()))
    # A random byte decides.
    wanted = 1.0 - (math.floor(255 * (1.0 - dropout_p)) + 1) / 256
    share = float((probs.signbit() & visible).sum()) / count
    off = abs(share - wanted)
    return Error(off, off, off / (SIGMAS * math.sqrt(wanted * (1 - wanted) / count)))


def _largest(*tensors: torch.Tensor) -> float:
    return max(float(t.abs().max()) if t.numel() else 0.0 for t in tensors)


def _finite(number: torch.Tensor) -> float:
    """Returns a number, infinity for a NaN: that of a bound, for instance."""
    return math.inf if math.isnan(float(number)) else float(number)
