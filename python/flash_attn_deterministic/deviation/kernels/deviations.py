"""How far outputs and gradients of real kernels are from float64."""

from __future__ import annotations

from typing import Any

import torch

from ..attentions.registry import find_attention
from ..emulate.simulate import golden_attention
from ..numbers.formats import parse_format
from ..numbers.metrics import deviation
from .plan import DTYPES, QKV, KernelPlan, drawn_dout, gradients


def forward_deviation(plan: KernelPlan) -> list[dict[str, Any]]:
    """Deviation of each attention's output, over formats, inputs and lengths."""
    points = []
    for name, dtype in DTYPES.items():
        for head_dim in plan.head_dims:
            attentions = plan.attentions(dtype, head_dim)
            for inputs in plan.inputs_of(name, head_dim):
                for seqlen in plan.seqlens:
                    q, k, v = plan.tensors(inputs, seqlen, head_dim, name)
                    golden = golden_attention(q, k, v, head_dim**-0.5)
                    for backend, attention in attentions.items():
                        found = deviation(attention(q, k, v), golden, parse_format(name))
                        points.append(
                            {"backend": backend, "format": name, "inputs": inputs,
                             "seqlen": seqlen, "head_dim": head_dim, "result": found}
                        )  # fmt: skip
    return points


def backward_deviation(plan: KernelPlan) -> list[dict[str, Any]]:
    """Deviation of dq, dk and dv; with uniform inputs D decides them (`emulate.gradients`)."""
    points = []
    for name, dtype in DTYPES.items():
        for head_dim in plan.head_dims:
            attentions = plan.attentions(dtype, head_dim, backward=True)
            for inputs in plan.inputs_of(name, head_dim):
                for seqlen in plan.seqlens[-4:-1]:
                    q, k, v = plan.tensors(inputs, seqlen, head_dim, name)
                    dout = drawn_dout(q)
                    golden = _golden(q, k, v, dout)
                    for backend, attention in attentions.items():
                        found = gradients(attention, q, k, v, dout)
                        for gradient, actual, exact in zip(
                            ("dq", "dk", "dv"), found, golden, strict=True
                        ):
                            result = deviation(actual, exact, parse_format(name))
                            points.append(
                                {"backend": backend, "gradient": gradient, "format": name,
                                 "inputs": inputs, "seqlen": seqlen, "head_dim": head_dim,
                                 "result": result}
                            )  # fmt: skip
    return points


def _golden(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> QKV:
    """float64 gradients, one sequence at a time."""
    exact = find_attention("exact")
    parts = []
    for index in range(len(q)):
        one = slice(index, index + 1)
        wide = [tensor[one].double() for tensor in (q, k, v, dout)]
        parts.append(gradients(exact, wide[0], wide[1], wide[2], wide[3]))
    dq, dk, dv = (torch.cat(part) for part in zip(*parts, strict=True))
    return dq, dk, dv
