"""Dropout on the GPU: the mask that the kernels draw is the one that Python knows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from flash_attn_deterministic import explain, flash_attn_func, flash_attn_varlen_func
from flash_attn_deterministic.reference.dropout import keep_mask, keep_probability

from tests.gpu.attention import DTYPES, assert_same, each_config, same_bits
from tests.gpu.gradients import (
    DROPOUT_FEATURES,
    GradientCall,
    draw_call,
    int32,
    kept,
    rng_state,
    visible_keys,
)

pytestmark = pytest.mark.gpu

CONFIGS = (
    (32, "bf16"),
    (40, "fp16"),
    (64, "bf16"),
    (64, "fp16"),
    (96, "bf16"),
    (128, "fp16"),
    (128, "bf16"),
    (192, "bf16"),
    (256, "bf16"),
)
CONFIG = each_config(CONFIGS)
FEATURE = pytest.mark.parametrize("feature", DROPOUT_FEATURES)


def one_hot_blocks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors like (batch, length, nheads, head_dim), whose rows are unit vectors or 0.

    Number c of them tells rows c * head_dim and on from each other: what is summed with it says,
    in place d of the head dim, what row c * head_dim + d had as its factor.
    """
    length, head_dim = tensor.shape[1], tensor.shape[3]
    blocks = []
    for begin in range(0, length, head_dim):
        block = torch.zeros_like(tensor)
        place = torch.arange(min(head_dim, length - begin), device=tensor.device)
        block[:, begin + place, :, place] = 1
        blocks.append(block)
    return blocks


def uniform(call: GradientCall) -> GradientCall:
    """The same call with all scores 0: each visible key has the same weight, kept or not."""
    return replace(call, q=torch.zeros_like(call.q), k=torch.zeros_like(call.k), slopes=None)


def mask_of_forward(call: GradientCall) -> torch.Tensor:
    """Where out has a weight: (batch, nheads, seqlen_q, seqlen_k), bool."""
    parts = []
    group = call.q.shape[2] // call.k.shape[2]
    assert group == 1
    for v in one_hot_blocks(call.v):
        _, out = replace(call, v=v).forward()
        parts.append(out.detach().transpose(1, 2) != 0)
    return torch.cat(parts, -1)[..., : call.k.shape[1]]


def mask_of_backward(call: GradientCall) -> torch.Tensor:
    """Where dv has a weight: (batch, nheads, seqlen_q, seqlen_k), bool."""
    parts = []
    for dout in one_hot_blocks(call.dout):
        _, _, dv = replace(call, dout=dout)()
        parts.append(dv.transpose(1, 2) != 0)
    return torch.cat(parts, -1)[..., : call.q.shape[1]].transpose(2, 3)


def expected_mask(call: GradientCall) -> torch.Tensor:
    """What Python says: keys that a row sees and keeps."""
    visible = visible_keys(
        call.q.shape[1],
        call.k.shape[1],
        call.options.get("causal", False),
        call.options.get("window_size", (-1, -1)),
    )
    return kept(call) & visible


@FEATURE
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(130, 261), (200, 77), (1, 300)], ids=["keys", "rows", "one-row"]
)
@CONFIG
def test_mask(head_dim: int, dtype: str, seqlen_q: int, seqlen_k: int, feature: str) -> None:
    call = uniform(
        draw_call(
            head_dim, dtype, feature, batch=3, seqlen_q=seqlen_q, seqlen_k=seqlen_k, nheads_k=4
        )
    )
    expected = expected_mask(call)
    assert torch.equal(mask_of_forward(call), expected)
    assert torch.equal(mask_of_backward(call), expected)


@pytest.mark.parametrize("split_size", [64, 128, 0])
@pytest.mark.parametrize(("batch", "path"), [(1, "parts"), (80, "one-cta")])
def test_mask_on_each_path(batch: int, path: str, split_size: int) -> None:
    call = uniform(
        draw_call(64, "bf16", "dropout", batch=batch, seqlen_q=130, seqlen_k=400, nheads_k=4)
    ).with_options(split_size=split_size)
    if split_size:
        plan = explain(flash_attn_func, call.q, call.k, call.v, **call.options)
        assert plan.path == path
    assert torch.equal(mask_of_forward(call), expected_mask(call))


@CONFIG
def test_mask_of_packed_sequences(head_dim: int, dtype: str) -> None:
    """A sequence of a packed batch has the mask of its index, from its own first token on."""
    lengths_q, lengths_k = [65, 0, 1, 130, 40], [70, 33, 129, 64, 0]
    starts_q, starts_k = ([0, *itertools.accumulate(x)] for x in (lengths_q, lengths_k))
    call = draw_call(
        head_dim, dtype, batch=1, seqlen_q=starts_q[-1], seqlen_k=starts_k[-1], nheads_k=4
    )
    call = uniform(call)
    masks = []
    for v in one_hot_blocks(call.v):
        torch.manual_seed(call.seed)
        out = flash_attn_varlen_func(
            call.q[0],
            call.k[0],
            v[0],
            int32(starts_q),
            int32(starts_k),
            max(lengths_q),
            max(lengths_k),
            0.3,
        )
        masks.append(out.transpose(0, 1) != 0)
    found = torch.cat(masks, -1)  # (nheads, total_q, total_k)
    for index, (rows, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        expected = keep_mask(
            rng_state(call.seed),
            0.3,
            torch.tensor([index], device="cuda"),
            torch.arange(4, device="cuda"),
            (0, rows),
            (0, keys),
        )
        own = slice(starts_q[index], starts_q[index + 1])
        assert torch.equal(found[:, own, starts_k[index] : starts_k[index + 1]], expected[0]), index


@FEATURE
@CONFIG
def test_forward_bits(head_dim: int, dtype: str, feature: str) -> None:
    call = draw_call(head_dim, dtype, feature, batch=4, nheads=8, nheads_k=4)

    def run(one: GradientCall) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(one.seed)
        out, softmax_lse, _ = flash_attn_func(
            one.q, one.k, one.v, alibi_slopes=one.slopes, return_attn_probs=True, **one.options
        )
        return out, softmax_lse

    out, softmax_lse = run(call)
    assert_same(run(call), (out, softmax_lse))
    assert not same_bits(run(replace(call, seed=6))[0], out)
    # The mask follows indices of sequences and heads, so only the last ones can go.
    first = slice(0, 3)
    assert_same(run(call.sequences(first)), (out[first], softmax_lse[first]))
    assert_same(run(call.kv_heads(0, 2)), (out[:, :, :4], softmax_lse[:, :4]))
    # softmax_lse is that of all weights.
    assert same_bits(run(call.with_options(dropout_p=0.0))[1], softmax_lse)


@pytest.mark.parametrize("feature", ["dropout", "dropout-window"])
@CONFIG
def test_one_cta_or_many(head_dim: int, dtype: str, feature: str) -> None:
    call = draw_call(head_dim, dtype, feature, batch=70, seqlen_q=130, seqlen_k=700)
    call = call.with_options(split_size=128)
    paths = []
    outs = []
    for one in (call, call.sequences(slice(0, 1))):
        plan = explain(flash_attn_func, one.q, one.k, one.v, alibi_slopes=one.slopes, **one.options)
        paths.append(plan.path)
        outs.append(one.forward()[1].detach())
    assert paths == ["one-cta", "parts"]
    assert same_bits(outs[0][:1], outs[1])


@FEATURE
@CONFIG
def test_s_dmask(head_dim: int, dtype: str, feature: str) -> None:
    call = draw_call(head_dim, dtype, feature, seqlen_q=100, seqlen_k=140)
    torch.manual_seed(call.seed)
    out, _, s_dmask = flash_attn_func(
        call.q,
        call.k,
        call.v,
        alibi_slopes=call.slopes,
        return_attn_probs=True,
        **call.options,
    )
    assert s_dmask.shape == (2, 4, 100, 140)
    assert torch.equal(s_dmask.signbit(), ~kept(call))
    assert torch.equal(s_dmask > 0, expected_mask(call) & (s_dmask != 0))
    probs = s_dmask.double().clamp(min=0) / keep_probability(call.options["dropout_p"])
    v = call.v.double().repeat_interleave(2, dim=2)
    made = torch.einsum("bhij,bjhd->bihd", probs, v)
    eps = torch.finfo(DTYPES[dtype]).eps
    torch.testing.assert_close(out.double(), made, rtol=0, atol=6 * eps)


def test_the_generator_goes_on() -> None:
    call = draw_call(64, "bf16", "dropout")
    torch.manual_seed(3)
    first, second = (flash_attn_func(call.q, call.k, call.v, 0.2) for _ in range(2))
    assert not same_bits(first, second)
    torch.manual_seed(3)
    for expected in (first, second):
        assert same_bits(flash_attn_func(call.q, call.k, call.v, 0.2), expected)


def test_no_dropout_draws_nothing() -> None:
    call = draw_call(64, "bf16")
    before = torch.cuda.get_rng_state()
    flash_attn_func(call.q, call.k, call.v, 0.0)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_replay_of_a_cuda_graph_draws_new_numbers() -> None:
    """Forward and backward of one replay share a mask; the next replay has another."""
    call = uniform(draw_call(64, "bf16", seqlen_q=64, seqlen_k=64, nheads_k=4))
    identity = one_hot_blocks(call.v)[0]
    q, k, v = (t.detach().requires_grad_() for t in (call.q, call.k, identity))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out = flash_attn_func(q, k, v, 0.3)
        (dv,) = torch.autograd.grad(out, v, identity)
        return out.detach(), dv

    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()

    def replay() -> torch.Tensor:
        graph.replay()
        torch.cuda.synchronize()
        forward = out.transpose(1, 2) != 0
        backward = dv.transpose(1, 2).transpose(2, 3) != 0
        assert torch.equal(forward, backward)
        assert 0.6 < float(forward.double().mean()) < 0.8
        return forward

    torch.manual_seed(11)
    first, second = replay(), replay()
    assert not torch.equal(first, second)
    torch.manual_seed(11)
    assert torch.equal(replay(), first)
    assert torch.equal(replay(), second)
