"""How far repeats of one call are from the first: the noise floor."""

from __future__ import annotations

from typing import Any

import torch

from .plan import KernelPlan, drawn_dout, gradients


def run_to_run(plan: KernelPlan) -> list[dict[str, Any]]:
    """Repeats each attention's forward and backward on one set of tensors."""
    points = []
    repeats = 3 if plan.small else 10
    attentions = plan.attentions(torch.bfloat16, 64)
    with_backward = plan.attentions(torch.bfloat16, 64, backward=True)
    for seqlen in plan.seqlens[-3:-1]:
        q, k, v = plan.tensors("normal", seqlen, 64, "bf16")
        dout = drawn_dout(q)
        for backend, attention in attentions.items():
            outputs: dict[str, tuple[torch.Tensor, ...]] = {}
            if backend in with_backward:
                calls = [gradients(attention, q, k, v, dout) for _ in range(repeats)]
                outputs = dict(zip(("dq", "dk", "dv"), zip(*calls, strict=True), strict=True))
            outputs["out"] = tuple(attention(q, k, v) for _ in range(repeats))
            for output, values in outputs.items():
                wide = [value.double() for value in values]
                floor = max(float((value - wide[0]).abs().max()) for value in wide)
                same = all(
                    torch.equal(value.view(torch.int16), values[0].view(torch.int16))
                    for value in values
                )
                points.append(
                    {"backend": backend, "output": output, "seqlen": seqlen,
                     "repeats": repeats, "max_difference": floor, "same_bits": same,
                     "relative": floor / float(wide[0].abs().max())}
                )  # fmt: skip
    return points
