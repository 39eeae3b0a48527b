"""How far outputs and gradients of real kernels are from float64, and repeats from the first."""

from __future__ import annotations

from typing import Any

import torch

from ..attentions.registry import gradients_of
from ..emulate.simulate import golden_attention
from ..numbers.formats import parse_format
from ..numbers.metrics import deviation
from .plan import KernelPlan, drawn_dout


def forward_deviation(plan: KernelPlan) -> list[dict[str, Any]]:
    """Deviation of each attention's output, over formats, inputs and lengths."""
    points = []
    for where, call in plan.points(plan.seqlens):
        golden = golden_attention(call)
        for backend, attention in plan.attentions(call.q.dtype, where["head_dim"]).items():
            out = attention(call.q, call.k, call.v)
            found = deviation(out, golden, parse_format(where["format"]))
            points.append({**where, "backend": backend, "result": found})
    return points


def backward_deviation(plan: KernelPlan) -> list[dict[str, Any]]:
    """Deviation of dq, dk and dv; with uniform inputs D decides them (`emulate.gradients`)."""
    points = []
    for where, call in plan.points(plan.seqlens[-4:-1]):
        dout = drawn_dout(call.q)
        golden = gradients_of("exact", call.to(torch.float64), dout.double())
        for backend, attention in plan.attentions(call.q.dtype, where["head_dim"], True).items():
            found = gradients_of(attention, call, dout)
            for name, actual, true in zip(("dq", "dk", "dv"), found, golden, strict=True):
                result = deviation(actual, true, parse_format(where["format"]))
                points.append({**where, "backend": backend, "gradient": name, "result": result})
    return points


def run_to_run(plan: KernelPlan) -> list[dict[str, Any]]:
    """Repeats each attention's forward and backward on one set of tensors: the noise floor."""
    points = []
    repeats = 3 if plan.small else 10
    attentions = plan.attentions(torch.bfloat16, 64)
    with_backward = plan.attentions(torch.bfloat16, 64, backward=True)
    for seqlen in plan.seqlens[-3:-1]:
        call = plan.call("normal", seqlen, 64, "bf16")
        dout = drawn_dout(call.q)
        for backend, attention in attentions.items():
            outputs = {"out": [attention(call.q, call.k, call.v) for _ in range(repeats)]}
            if backend in with_backward:
                calls = [gradients_of(attention, call, dout) for _ in range(repeats)]
                outputs |= zip(("dq", "dk", "dv"), map(list, zip(*calls, strict=True)), strict=True)
            for output, values in outputs.items():
                first = values[0].double()
                floor = max(float((value.double() - first).abs().max()) for value in values)
                bits = [value.view(torch.int16) for value in values]
                points.append(
                    {"backend": backend, "output": output, "seqlen": seqlen,
                     "repeats": repeats, "max_difference": floor,
                     "same_bits": all(torch.equal(each, bits[0]) for each in bits),
                     "relative": floor / float(first.abs().max())}
                )  # fmt: skip
    return points
