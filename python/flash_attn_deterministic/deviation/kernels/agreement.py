"""How often the reference gives the very bits of this package's kernels."""

from __future__ import annotations

from typing import Any

import torch

from ... import reference
from ...info.build_info import build_info
from ...reference import Formats
from ..attentions.registry import our_attention
from ..numbers.formats import NumberFormat, parse_format
from .plan import DTYPES, KernelPlan

CONTROL = "control"


def agreement(plan: KernelPlan) -> list[dict[str, Any]]:
    """Compares `ours` on the device with `flash_attn_deterministic.reference` on the CPU.

    Sums in another order move a P to its neighbour now and then: the share of equal elements is not
    quite 1. What a wrong model would give, the control shows: P in float32, all else the same.
    """
    points = []
    seqlen = 128 if plan.small else 1024
    for name, dtype in DTYPES.items():
        for head_dim in plan.head_dims:
            if "ours" not in plan.attentions(dtype, head_dim):
                continue
            for inputs in ("uniform", "normal"):
                q, k, v = (t[:1] for t in plan.tensors(inputs, seqlen, head_dim, name))
                tree = 64 if plan.small else 256
                for preset, split_size in (("kernel", 0), ("tree", tree), (CONTROL, 0)):
                    real = our_attention(q, k, v, split_size).cpu()
                    q_rows, k_rows, v_rows = (t.cpu().transpose(1, 2) for t in (q, k, v))
                    found, _ = reference.attention(
                        q_rows,
                        k_rows,
                        v_rows,
                        split_size=split_size,
                        block_n=build_info().tile(head_dim).block_n,
                        formats=Formats(probs=torch.float32 if preset == CONTROL else None),
                    )
                    share = row_agreement(found.transpose(1, 2), real, parse_format(name))
                    points.append(
                        {"preset": preset, "format": name, "inputs": inputs, "seqlen": seqlen,
                         "head_dim": head_dim, "split_size": split_size, **share}
                    )  # fmt: skip
    return points


def row_agreement(
    simulated: torch.Tensor, real: torch.Tensor, number_format: NumberFormat
) -> dict[str, float]:
    """Returns the share of equal elements, and the largest distance in gaps at the row's maximum.

    Args:
        simulated: (..., seqlen, head_dim).
        real: like simulated.
        number_format: of both.
    """
    left, right = simulated.double(), real.double()
    gaps = number_format.ulp(torch.maximum(left.abs(), right.abs()).amax(-1, keepdim=True))
    return {
        "equal": float((left == right).double().mean()),
        "largest_ulp": float(((left - right).abs() / gaps).max()),
    }
