"""How often the reference gives the very bits of this package's kernels."""

from __future__ import annotations

from typing import Any

import torch

from ... import deterministic_mode, flash_attn_func, reference
from ...info.build_info import build_info
from ...reference import Formats
from ..numbers.formats import NumberFormat, parse_format
from .plan import KernelPlan

CONTROL = "control"


def agreement(plan: KernelPlan) -> list[dict[str, Any]]:
    """Compares `ours` on the device with `flash_attn_deterministic.reference` on the CPU.

    Sums in another order move a P to its neighbour now and then: the share of equal elements is not
    quite 1. What a wrong model would give, the control shows: P in float32, all else the same.
    """
    points = []
    for where, call in plan.points((128,) if plan.small else (1024,)):
        q, k, v = (tensor[:1].transpose(1, 2) for tensor in (call.q, call.k, call.v))
        if "ours" not in plan.attentions(q.dtype, q.shape[-1]):
            continue
        tree = 64 if plan.small else 256
        for preset, split_size in (("kernel", 0), ("tree", tree), (CONTROL, 0)):
            with deterministic_mode(split_size=split_size):
                real = flash_attn_func(q, k, v)
            found, _ = reference.attention(
                q.cpu(), k.cpu(), v.cpu(), split_size=split_size,
                block_n=build_info().tile(q.shape[-1]).block_n,
                formats=Formats(probs=torch.float32 if preset == CONTROL else None),
            )  # fmt: skip
            share = row_agreement(found, real.cpu(), parse_format(where["format"]))
            points.append({**where, "preset": preset, "split_size": split_size, **share})
    return points


def row_agreement(
    simulated: torch.Tensor, real: torch.Tensor, number_format: NumberFormat
) -> dict[str, float]:
    """Returns the share of equal elements, and the largest distance in gaps at the row's maximum.

    Args:
        simulated: (..., head_dim).
        real: like simulated.
        number_format: of both.
    """
    left, right = simulated.double(), real.double()
    gaps = number_format.ulp(torch.maximum(left.abs(), right.abs()).amax(-1, keepdim=True))
    return {
        "equal": float((left == right).double().mean()),
        "largest_ulp": float(((left - right).abs() / gaps).max()),
    }
