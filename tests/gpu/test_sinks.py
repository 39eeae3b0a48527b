"""Sinks and the gradient of softmax_lse: the same bits from every kernel.

`verify`'s accuracy, of drawn calls too, compares them with float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flash_attn_deterministic import deterministic_mode
from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.gpu.attention import (
    DTYPES,
    SCHEDULES,
    assert_same,
    flash_attn_func,
    flash_attn_varlen_func,
    make_qkv,
    pairwise,
    skip_unless_built,
)

pytestmark = pytest.mark.gpu

NAMES = ("out", "softmax_lse", "dq", "dk", "dv", "dsink")
CONFIGS = pairwise(
    head_dim=(32, 64, 72, 96, 128, 192, 256),
    dtype=("bf16", "fp16"),
    options={
        "full": {},
        "causal": {"causal": True},
        "window": {"window_size": (127, 0), "split_size": 128},
        "softcap": {"softcap": 5.0, "causal": True},
        "one-split": {"causal": True, "split_size": 0},
    },
    lengths=((1, 700), (16, 513), (300, 300), (200, 65)),
)
Tensors = tuple[torch.Tensor, ...]


def draw(head_dim: int, dtype: str, seqlen_q: int, seqlen_k: int) -> tuple[list[torch.Tensor], Any]:
    """q, k, v and sinks, of which one is far above all scores; dout and dlse."""
    skip_unless_built(head_dim, dtype)
    skip_unless_built(head_dim, dtype, "bwd")
    qkv = make_qkv((2, seqlen_q, 8, head_dim), seqlen_k, 2, dtype=DTYPES[dtype])
    generator = torch.Generator("cuda").manual_seed(1)
    sinks = 3 * torch.randn(8, generator=generator, device="cuda")
    sinks[3] = 200.0
    dlse = torch.randn((2, 8, seqlen_q), generator=generator, device="cuda")
    return [*qkv, sinks], (
        make_qkv((2, seqlen_q, 8, head_dim), dtype=DTYPES[dtype], seed=9)[0],
        dlse,
    )


def run(inputs: list[torch.Tensor], gradients: Any, **options: Any) -> Tensors:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse, _ = flash_attn_func(
        *leaves[:3], learnable_sink=leaves[3], return_attn_probs=True, **options
    )
    return out, lse, *torch.autograd.grad((out, lse), leaves, gradients)


@CONFIGS
def test_every_schedule_has_the_same_bits(
    head_dim: int, dtype: str, options: dict[str, Any], lengths: tuple[int, int]
) -> None:
    inputs, gradients = draw(head_dim, dtype, *lengths)
    for residual in (False, True):
        with deterministic_mode(keep_residual=residual):
            expected = run(inputs, gradients, **options)
            for schedule in SCHEDULES:
                with device_override(schedule):
                    assert_same(run(inputs, gradients, **options), expected, NAMES)


@CONFIGS
def test_without_sinks_and_with_sinks_of_minus_infinity(
    head_dim: int, dtype: str, options: dict[str, Any], lengths: tuple[int, int]
) -> None:
    (*qkv, sinks), _ = draw(head_dim, dtype, *lengths)
    without = flash_attn_func(*qkv, return_attn_probs=True, **options)
    for schedule in SCHEDULES:
        with device_override(schedule):
            none = torch.full_like(sinks, -math.inf)
            found = flash_attn_func(*qkv, learnable_sink=none, return_attn_probs=True, **options)
        assert_same(found[:2], without[:2], NAMES[:2])


def test_rows_without_keys_end_with_their_sink() -> None:
    inputs, gradients = draw(64, "bf16", 200, 65)
    for schedule in SCHEDULES:
        with device_override(schedule):
            out, lse, *found = run(inputs, gradients, causal=True)
        assert not out[:, :135].count_nonzero()
        sinks = inputs[3][:, None].expand(2, 8, 135)
        torch.testing.assert_close(lse[:, :, :135], sinks, rtol=1e-6, atol=0)
        assert all(bool(x.isfinite().all()) for x in found)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_dsink_adds_up_sequences_in_order(packed: bool) -> None:
    lengths = [700, 1, 129, 300, 0, 1024] * 8  # more sequences than a thread block has warps
    starts = [0, *itertools.accumulate(lengths)]
    inputs, _ = draw(64, "bf16", 1, 1)
    q, k, v, dout = (
        x[0]
        for x in (*make_qkv((1, starts[-1], 8, 64)), make_qkv((1, starts[-1], 8, 64), seed=3)[0])
    )

    def dsink(rows: list[tuple[int, int]]) -> torch.Tensor:
        leaf = inputs[3].clone().requires_grad_()
        parts = [torch.cat([t[a:b] for a, b in rows]) for t in (q, k, v, dout)]
        if packed:
            own = [0, *itertools.accumulate(b - a for a, b in rows)]
            cu = torch.tensor(own, dtype=torch.int32, device="cuda")
            out = flash_attn_varlen_func(
                *parts[:3], cu, cu, 1024, 1024, causal=True, learnable_sink=leaf
            )
        else:
            out = flash_attn_func(*(t[None] for t in parts[:3]), causal=True, learnable_sink=leaf)
            parts[3] = parts[3][None]
        return torch.autograd.grad(out, leaf, parts[3])[0]

    spans = list(itertools.pairwise(starts))
    alone = [
        dsink([span]) if span[0] < span[1] else torch.zeros(8, device="cuda") for span in spans
    ]
    total = torch.zeros(8, device="cuda")
    for one in alone:
        total = total + one
    if packed:
        assert_same((dsink(spans),), (total,), ("dsink",))
    for span, one in zip(spans[:2], alone, strict=False):
        assert_same((dsink([span]),), (one,), ("dsink",))


@pytest.mark.parametrize("form", ["dense", "packed"])
def test_no_gradient_of_softmax_lse_is_one_of_zeros(form: str) -> None:
    inputs, (dout, dlse) = draw(128, "bf16", 300, 300)
    call: Callable[..., Any] = flash_attn_func
    arguments: tuple[Any, ...] = ()
    if form == "packed":
        call = flash_attn_varlen_func
        starts = torch.tensor([0, 300, 600], dtype=torch.int32, device="cuda")
        arguments = starts, starts, 300, 300
        inputs = [x.flatten(0, 1) for x in inputs[:3]]
        dout, dlse = dout.flatten(0, 1), dlse.transpose(0, 1).flatten(1)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse, _ = call(*leaves, *arguments, causal=True, return_attn_probs=True)
    zeros = torch.autograd.grad(
        (out, lse), leaves, (dout, torch.zeros_like(dlse)), retain_graph=True
    )
    assert_same(zeros, torch.autograd.grad(out, leaves, dout, retain_graph=True), NAMES[2:5])
    assert not torch.autograd.grad(lse, leaves, dlse)[2].count_nonzero()
