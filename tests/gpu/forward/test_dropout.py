"""Dropout on the GPU: the mask that the kernels draw is the one that Python knows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from flash_attn_deterministic import flash_attn_func, flash_attn_varlen_func
from flash_attn_deterministic.interface.call import draw_rng_state
from flash_attn_deterministic.reference.dropout import keep_mask
from flash_attn_deterministic.verify.bounds import kept_of_seeds
from flash_attn_deterministic.verify.contract import layouts
from flash_attn_deterministic.verify.contract.backward import without_probs
from flash_attn_deterministic.verify.contract.call import Attention, Call, part
from flash_attn_deterministic.verify.contract.device_override import device_override
from flash_attn_deterministic.verify.exact import Definition

from tests.gpu.attention import each_config, named, pairwise, same_bits
from tests.gpu.gradients import (
    DROPOUT_FEATURES,
    GRADIENTS,
    SEED,
    assert_same_results,
    draw_call,
    int32,
    repeating,
    results,
)

pytestmark = pytest.mark.gpu

CONFIGS = (
    *((32, "bf16"), (40, "fp16"), (64, "bf16"), (64, "fp16"), (96, "bf16"), (128, "fp16")),
    *((128, "bf16"), (192, "bf16"), (256, "bf16")),
)
PATHS = ("path=one_cta", "path=parts")


def rng_state(seed: int) -> torch.Tensor:
    """The seed and offset that a call with dropout draws first after torch.manual_seed(seed)."""
    torch.manual_seed(seed)
    return draw_rng_state(torch.device("cuda"))


def kept(call: Call) -> torch.Tensor:
    """The dropout mask of a call: (batch, nheads, seqlen_q, seqlen_k), bool."""
    batch, seqlen_q, nheads, _ = call.q.shape
    return keep_mask(
        rng_state(SEED),
        call.options["dropout_p"],
        torch.arange(batch, device="cuda"),
        torch.arange(nheads, device="cuda"),
        (0, seqlen_q),
        (0, call.k.shape[1]),
    )


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


def uniform(call: Call) -> Call:
    """The same call with all scores 0: each visible key has the same weight, kept or not."""
    return replace(call, q=torch.zeros_like(call.q), k=torch.zeros_like(call.k), slopes=None)


def mask_of_forward(
    call: Call, run: Callable[[Call], torch.Tensor] = lambda call: call()["out"]
) -> torch.Tensor:
    """Where out has a weight: (batch, nheads, seqlen_q, seqlen_k), bool."""
    assert call.q.shape[2] == call.k.shape[2]
    parts = [run(replace(call, v=v)).transpose(1, 2) != 0 for v in one_hot_blocks(call.v)]
    return torch.cat(parts, -1)[..., : call.k.shape[1]]


def mask_of_backward(call: Call) -> torch.Tensor:
    """Where dv has a weight: (batch, nheads, seqlen_q, seqlen_k), bool."""
    parts = [
        replace(call, dout=dout).gradients()["dv"].transpose(1, 2) != 0
        for dout in one_hot_blocks(call.dout)
    ]
    return torch.cat(parts, -1)[..., : call.q.shape[1]].transpose(2, 3)


EACH_MASK = pairwise(
    config=named(CONFIGS),
    feature=DROPOUT_FEATURES,
    lengths={"keys": (130, 400), "rows": (200, 77), "one-row": (1, 300)},
    split_size=(64, 128, 0),
    path=PATHS,
)


def draw_uniform(
    config: tuple[int, str], feature: str, lengths: tuple[int, int], split_size: int
) -> Call:
    seqlen_q, seqlen_k = lengths
    call = draw_call(*config, feature, batch=3, seqlen_q=seqlen_q, seqlen_k=seqlen_k, nheads_k=4)
    return uniform(call).with_options(split_size=split_size)


def assert_mask(call: Call, keeps: torch.Tensor, path: str) -> None:
    """Asserts that forward and backward keep these weights, where the mask of keys shows them."""
    masks = {n: call.options[n] for n in ("causal", "window_size") if n in call.options}
    exact = Definition(**masks)
    visible = mask_of_forward(call, lambda one: exact.forward(one.q, one.k, one.v).out)
    with device_override(path):
        assert torch.equal(mask_of_forward(call), keeps & visible)
        assert torch.equal(mask_of_backward(call), keeps & visible)


@EACH_MASK
def test_mask(
    config: tuple[int, str], feature: str, lengths: tuple[int, int], split_size: int, path: str
) -> None:
    call = draw_uniform(config, feature, lengths, split_size)
    assert_mask(call, kept(call), path)


@pairwise(config=named(CONFIGS), feature=DROPOUT_FEATURES)
def test_bits_follow_the_seed_and_the_indices(config: tuple[int, str], feature: str) -> None:
    """The mask follows indices of sequences and heads, so only the last ones can go."""
    call = draw_call(*config, feature, batch=4, nheads=12, nheads_k=4).with_options(split_size=128)
    together = results(call)
    for path in PATHS:
        with device_override(path):
            assert_same_results(results(call), together)
    other = results(replace(call, attention=repeating(6)))
    assert not any(same_bits(other[name], together[name]) for name in ("out", *GRADIENTS))
    # softmax_lse is that of all weights.
    assert same_bits(call.with_options(dropout_p=0.0)()["softmax_lse"], together["softmax_lse"])
    for end in (1, 3):
        first = call.sequences(slice(0, end))
        assert_same_results(results(first), part(together, b=slice(0, end)))
        expected = part(together, h=slice(0, 3 * end), g=slice(0, end))
        assert_same_results(results(call.kv_heads(0, end)), expected)
    packed = layouts.packed(call, [333] * 4, [333] * 4, spare=5, gradients=True)
    for index, (_, own) in enumerate(packed.parts):
        assert_same_results(own, part({name: together[name] for name in own}, b=[index]))


@each_config(CONFIGS)
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
        torch.manual_seed(SEED)
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
            rng_state(SEED),
            0.3,
            torch.tensor([index], device="cuda"),
            torch.arange(4, device="cuda"),
            (0, rows),
            (0, keys),
        )
        own = slice(starts_q[index], starts_q[index + 1])
        assert torch.equal(found[:, own, starts_k[index] : starts_k[index + 1]], expected[0]), index


@pairwise(config=named(CONFIGS), feature=DROPOUT_FEATURES)
def test_s_dmask(config: tuple[int, str], feature: str) -> None:
    """Its signs are the mask; `verify` compares out with the float64 of these signs."""
    call = draw_call(*config, feature, seqlen_q=100, seqlen_k=140)
    assert torch.equal(call()["probs"].signbit(), ~kept(call))


def seeded(call: Call) -> Call:
    """The same call with a seed for each sequence."""
    seeds = torch.arange(len(call.q), device="cuda") * 2**33 - 5
    return call.with_options(dropout_seeds=seeds)


@EACH_MASK
def test_mask_of_seeds(
    config: tuple[int, str], feature: str, lengths: tuple[int, int], split_size: int, path: str
) -> None:
    call = seeded(draw_uniform(config, feature, lengths, split_size))
    assert_mask(call, kept_of_seeds(call), path)


@pairwise(config=named(CONFIGS), feature=DROPOUT_FEATURES)
def test_bits_follow_the_seeds_alone(config: tuple[int, str], feature: str) -> None:
    """Not the place in the batch, its size, the packing, or torch's generator."""
    call = seeded(draw_call(*config, feature, batch=4, nheads=12, nheads_k=4))
    call = call.with_options(split_size=128)
    before = torch.cuda.get_rng_state()
    together = results(replace(call, attention=Attention.installed()))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    for path in PATHS:
        with device_override(path):
            assert_same_results(results(call), together)
    other = results(call.with_options(dropout_seeds=call.options["dropout_seeds"] + 1))
    assert not any(same_bits(other[name], together[name]) for name in ("out", *GRADIENTS))
    for index in ([0], [3], [2, 0, 1]):
        fewer = without_probs(results(call.sequences(index)))
        assert_same_results(fewer, part(without_probs(together), b=index))
    for gradients in (False, True):
        packed = layouts.packed(call, [333, 40, 1, 200], [333, 70, 333, 9], gradients=gradients)
        for one, own in packed.parts:
            alone, packed_alike = results(one), without_probs(own)
            assert_same_results(packed_alike, {name: alone[name] for name in packed_alike})


def test_replay_of_a_cuda_graph_reads_the_seeds_of_then() -> None:
    call = seeded(draw_call(64, "bf16", "dropout", batch=2, seqlen_q=64, seqlen_k=64))
    seeds, p = call.options["dropout_seeds"], call.options["dropout_p"]

    def run() -> torch.Tensor:
        out = flash_attn_func(call.q, call.k, call.v, p, dropout_seeds=seeds)
        return out  # type: ignore[no-any-return, unused-ignore]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(2):
        seeds += 1
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(out, run())


def test_the_generator_goes_on_with_dropout_alone() -> None:
    call = draw_call(64, "bf16", "dropout")
    torch.manual_seed(3)
    first, second = (flash_attn_func(call.q, call.k, call.v, 0.2) for _ in range(2))
    assert not same_bits(first, second)
    torch.manual_seed(3)
    for expected in (first, second):
        assert same_bits(flash_attn_func(call.q, call.k, call.v, 0.2), expected)
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
    # torch 2.11 writes the generator's old seed at the capture, on a stream of its own: if late, it
    # comes after the new one of the first replay.
    torch.cuda.synchronize()

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
