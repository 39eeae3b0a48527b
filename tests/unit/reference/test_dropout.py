"""The dropout mask, and what becomes of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest
import torch
from attention_cases import make_inputs, softmax_attention, tolerance
from bits import all_equal, bits_equal
from calls import CALLS, DIFFERENTIABLE, compiled, int32, paged_call, varlen_call
from flash_attn_deterministic import flash_attn_func, flash_attn_varlen_func
from flash_attn_deterministic.errors import FlashAttnError
from flash_attn_deterministic.interface.call import draw_rng_state
from flash_attn_deterministic.reference import attention
from flash_attn_deterministic.reference.dropout import (
    keep_mask,
    keep_probability,
    largest_kept_byte,
)

MASK_32, MASK_64 = 2**32 - 1, 2**64 - 1
STATES = {
    "zeros": (0, 0),
    "usual": (2**61 + 987654321, 2**40 + 12345),
    # Lanes, heads and sequences carry beyond 64 bits, and both numbers are negative as int64.
    "wraps": (MASK_64, MASK_64 - 7),
}


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _scalar_byte(seed: int, offset: int, b: int, h: int, i: int, j: int) -> int:
    """The random byte of one element, written down from the definition alone."""
    r, c = i % 16, j % 32
    lane = (r % 8) * 4 + (c % 8) // 2
    n = (c // 16) * 8 + ((c % 16) // 8) * 4 + (r // 8) * 2 + (c % 2)
    counter = (offset + (b << 21) + (h << 5) + lane) & MASK_64
    x, y, z, w = counter & MASK_32, counter >> 32, i // 16, j // 32
    key_x, key_y = seed & MASK_32, seed >> 32
    for number in range(7):
        p0, p1 = 0xD2511F53 * x, 0xCD9E8D57 * z
        x, y, z, w = (p1 >> 32) ^ y ^ key_x, p1 & MASK_32, (p0 >> 32) ^ w ^ key_y, p0 & MASK_32
        if number < 6:
            key_x, key_y = (key_x + 0x9E3779B9) & MASK_32, (key_y + 0xBB67AE85) & MASK_32
    return b"".join(word.to_bytes(4, "little") for word in (x, y, z, w))[n]


def _mask(
    seed: int = 5,
    offset: int = 6,
    dropout_p: float = 0.5,
    sequences: tuple[int, ...] = (0,),
    heads: tuple[int, ...] = (0,),
    rows: tuple[int, int] = (0, 16),
    keys: tuple[int, int] = (0, 32),
) -> torch.Tensor:
    state = torch.tensor([_signed(seed), _signed(offset)])
    return keep_mask(state, dropout_p, torch.tensor(sequences), torch.tensor(heads), rows, keys)


# --- The mask -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_mask_is_its_definition(state: str) -> None:
    seed, offset = STATES[state]
    sequences, heads, rows, keys = (0, 3), (0, 1, 40), (13, 35), (30, 67)
    mask = _mask(seed, offset, 0.3, sequences, heads, rows, keys)
    limit = math.floor(0.7 * 255)
    elements = itertools.product(
        enumerate(sequences), enumerate(heads), enumerate(range(*rows)), enumerate(range(*keys))
    )
    for (x, b), (y, h), (z, i), (w, j) in elements:
        assert bool(mask[x, y, z, w]) == (_scalar_byte(seed, offset, b, h, i, j) <= limit)


@pytest.mark.parametrize(
    ("rows", "keys"),
    [((0, 0), (0, 5)), ((3, 3), (0, 5)), ((0, 5), (0, 0))],
    ids=["rows", "rows-inside", "keys"],
)
def test_empty_mask(rows: tuple[int, int], keys: tuple[int, int]) -> None:
    shape = (1, 1, rows[1] - rows[0], keys[1] - keys[0])
    assert _mask(rows=rows, keys=keys).shape == shape


@pytest.mark.parametrize(
    ("dropout_p", "limit"), [(0.0, 255), (0.2, 204), (0.4, 153), (0.5, 127), (0.99999, 0)]
)
def test_largest_kept_byte(dropout_p: float, limit: int) -> None:
    assert largest_kept_byte(dropout_p) == limit
    assert keep_probability(dropout_p) == torch.tensor(1 - dropout_p).item()


def test_mask_of_a_seed_is_that_of_the_first_sequence() -> None:
    seeds = (0, MASK_64, 2**61 + 7)
    state = torch.tensor([_signed(seed) for seed in seeds])[:, None]
    spans = (3, 20), (30, 70)
    for order in ((0, 1, 2), (2, 0), (1,)):
        mask = keep_mask(state, 0.3, torch.tensor(order), torch.tensor((0, 5)), *spans)
        expected = [_mask(seeds[b], 0, 0.3, (0,), (0, 5), *spans) for b in order]
        assert torch.equal(mask, torch.cat(expected))


# --- Calls --------------------------------------------------------------------------------------


def _seeded(call: Any, **options: Any) -> Any:
    torch.manual_seed(options.pop("seed", 0))
    return call(**options)


@pytest.mark.parametrize("head_dim", [32, 20], ids=["aligned", "padded"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_seed_of_torch_decides(name: str, head_dim: int) -> None:
    call = CALLS[name](head_dim)
    out = _seeded(call, dropout_p=0.3)
    assert bits_equal(out, _seeded(call, dropout_p=0.3))
    assert not bits_equal(out, _seeded(call, seed=1, dropout_p=0.3))
    assert not bits_equal(out, call(dropout_p=0.3))
    assert not bits_equal(out, call())


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_no_dropout_draws_nothing(name: str) -> None:
    before = torch.get_rng_state()
    CALLS[name](32)()
    assert torch.equal(before, torch.get_rng_state())


def test_state_is_two_numbers_of_62_bits() -> None:
    drawn = torch.stack([draw_rng_state(torch.device("cpu")) for _ in range(20)])
    assert (drawn.shape, drawn.dtype) == ((20, 2), torch.int64)
    assert ((drawn >= 0) & (drawn < 2**62)).all()
    assert len(set(drawn.flatten().tolist())) == 40
    assert drawn.max() > 2**58


def _seeds_of(call: Any) -> torch.Tensor:
    starts = call.arguments.get("cu_seqlens", call.arguments.get("cu_seqlens_q"))
    first = next(iter(call.arguments.values()))
    return torch.arange(len(first) if starts is None else len(starts) - 1) - 1


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_seeds_decide_alone(name: str) -> None:
    call = CALLS[name](20)
    seeds, before = _seeds_of(call), torch.get_rng_state()
    out = call(dropout_p=0.3, dropout_seeds=seeds)
    assert torch.equal(before, torch.get_rng_state())
    assert bits_equal(out, _seeded(call, dropout_p=0.3, dropout_seeds=seeds))
    strided = seeds.repeat_interleave(2)[::2]
    assert bits_equal(out, call(dropout_p=0.3, dropout_seeds=strided))
    assert not bits_equal(out, call(dropout_p=0.3, dropout_seeds=seeds + 1))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_seeds_without_dropout_have_no_effect(name: str) -> None:
    call = CALLS[name](32)
    assert bits_equal(call(dropout_seeds=_seeds_of(call)), call())


def test_seeds_without_dropout_are_not_kept_for_the_backward() -> None:
    q, k, v = (x.requires_grad_() for x in make_inputs(2, 9, 17, 2, 2, 32))
    seeds = torch.tensor([1, 2])
    out = flash_attn_func(q, k, v, dropout_seeds=seeds)
    seeds.add_(1)
    torch.autograd.grad(out.sum(), q)


def test_a_seed_is_the_state_of_a_sequence_alone() -> None:
    q, k, v = make_inputs(1, 40, 70, 4, 2, 32)
    out, _, probs = flash_attn_func(
        q, k, v, 0.3, dropout_seeds=torch.tensor([-9]), return_attn_probs=True
    )
    options: dict[str, Any] = {"dropout_p": 0.3, "rng_state": torch.tensor([-9, 0])}
    assert bits_equal(out, attention(q, k, v, **options)[0])
    mask = keep_mask(options["rng_state"], 0.3, torch.arange(1), torch.arange(4), (0, 40), (0, 70))
    assert torch.equal(mask, ~probs.signbit())


def test_seeds_under_compile_and_vmap() -> None:
    q, k, v = make_inputs(3, 9, 17, 2, 2, 32)
    seeds = torch.tensor([4, -5, 2**62])

    def run(q: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k[: len(q)], v[: len(q)], 0.3, dropout_seeds=seeds)

    def results(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaf = q.clone().requires_grad_()
        out = function(leaf, seeds)
        return [out.detach(), *torch.autograd.grad(out, leaf, torch.ones_like(out))]

    expected = results(run)
    assert all_equal(results(compiled(run)), expected)

    def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: Any) -> torch.Tensor:
        return flash_attn_func(q[None], k[None], v[None], 0.3, dropout_seeds=seed[None])[0]

    assert bits_equal(torch.func.vmap(alone)(q, k, v, seeds), expected[0])
    first = torch.func.vmap(alone, in_dims=(0, 0, 0, None))(q, k, v, seeds[1])
    assert bits_equal(first, run(q, seeds[1].expand(3)))


def test_seeds_may_not_change_before_the_backward() -> None:
    q, k, v = (t.requires_grad_() for t in make_inputs())
    seeds = torch.arange(q.shape[0])
    out = flash_attn_func(q, k, v, 0.3, dropout_seeds=seeds)
    seeds += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), q)


WRONG_SEEDS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "list": (lambda t: t.tolist(), "expected a torch.Tensor or None, got list"),
    "dtype": (lambda t: t.int(), "expected dtype torch.int64, got torch.int32"),
    "column": (lambda t: t[:, None], r"expected shape \(batch,\), got \(2, 1\)"),
    "number": (lambda t: t[0], r"expected shape \(batch,\), got \(\)"),
    "fewer": (lambda t: t[:1], r"expected shape \(batch,\) = \(2,\), got \(1,\)"),
    "device": (
        lambda t: t.to("meta"),
        "expected a tensor on cpu, the device of q, got one on meta",
    ),
}


@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["plain", "dropout"])
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("mistake", WRONG_SEEDS)
def test_wrong_seeds_are_named(mistake: str, layout: str, dropout_p: float) -> None:
    change, words = WRONG_SEEDS[mistake]
    seeds = change(torch.arange(2))
    inputs: tuple[Any, ...] = make_inputs(2, 9, 9, 2, 2, 32)
    function: Callable[..., Any] = flash_attn_func
    if layout == "packed":
        starts = int32(0, 9, 18)
        inputs = *(t.flatten(0, 1) for t in inputs), starts, starts, 9, 9
        function = flash_attn_varlen_func
    before = torch.get_rng_state()
    with pytest.raises(FlashAttnError, match=f"^dropout_seeds: {words}"):
        function(*inputs, dropout_p, dropout_seeds=seeds)
    assert torch.equal(before, torch.get_rng_state())


# --- S_dmask ------------------------------------------------------------------------------------

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 4)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 70), (70, 40)], ids=str)
def test_out_follows_from_s_dmask(feature: str, seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = make_inputs(2, seqlen_q, seqlen_k, 4, 2, 32, torch.float16)
    options = FEATURES[feature]
    out, _, s_dmask = flash_attn_func(q, k, v, 0.25, return_attn_probs=True, **options)
    assert s_dmask.shape == (2, 4, seqlen_q, seqlen_k)
    assert s_dmask.dtype == q.dtype
    renamed = {n.replace("window_size", "window"): x for n, x in options.items()}
    identity = torch.eye(seqlen_k)[None, :, None].expand(2, -1, 2, -1)
    probs, _ = softmax_attention(q, k, identity, **renamed)
    torch.testing.assert_close(s_dmask.abs().double(), probs.transpose(1, 2), rtol=2e-3, atol=2e-3)
    kept = torch.where(s_dmask.signbit(), 0.0, probs.transpose(1, 2)) / 0.75
    expected = torch.einsum("bhij,bjhd->bihd", kept, v.double().repeat_interleave(2, dim=2))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance(q.dtype, v) / 0.75)
    assert 0.2 < s_dmask.signbit().double().mean() < 0.3


def _sequences(call: Any) -> Iterator[tuple[int, slice, slice]]:
    starts = (call.arguments[f"cu_seqlens_{x}"].tolist() for x in "qk")
    rows, keys = (itertools.starmap(slice, itertools.pairwise(x)) for x in starts)
    yield from zip(itertools.count(), rows, keys)


def test_s_dmask_of_packed_sequences() -> None:
    call = varlen_call()
    _, _, s_dmask = _seeded(call, return_attn_probs=True, dropout_p=0.3)
    assert s_dmask.shape == (3, 4, 5, 9)
    torch.manual_seed(0)
    rng_state = torch.randint(0, 2**62, (2,))
    mask = keep_mask(rng_state, 0.3, torch.arange(3), torch.arange(4), (0, 5), (0, 9))
    assert torch.equal(mask, ~s_dmask.signbit())
    for b, rows, keys in _sequences(call):
        n, m = rows.stop - rows.start, keys.stop - keys.start
        q, k = (call.arguments[x][y][None] for x, y in (("q", rows), ("k", keys)))
        identity = torch.eye(m)[None, :, None].expand(1, -1, 2, -1)
        probs, _ = softmax_attention(q, k, identity, causal=True)
        torch.testing.assert_close(
            s_dmask[b, :, :n, :m].abs().double(), probs[0].transpose(0, 1), rtol=1e-2, atol=1e-2
        )
        assert s_dmask[b, :, n:].abs().sum() == 0
        assert s_dmask[b, :, :, m:].abs().sum() == 0


def test_s_dmask_where_keys_are_cut_or_in_pages() -> None:
    call = varlen_call()
    used, left = int32(4, 2, 9), int32(1, 0, 3)
    cut = _seeded(call, seqused_k=used, leftpad_k=left, return_attn_probs=True, dropout_p=0.3)
    tokens = torch.cat([torch.arange(1, 4), torch.arange(5, 7), torch.arange(10, 16)])
    arguments = {**call.arguments, "k": call.arguments["k"][tokens]}
    arguments.update(v=call.arguments["v"][tokens], cu_seqlens_k=int32(0, 3, 5, 11))
    torch.manual_seed(0)
    plain = flash_attn_varlen_func(**arguments, return_attn_probs=True, dropout_p=0.3)
    assert all_equal(cut, plain)

    call = paged_call()
    table = call.arguments["block_table"][:, 0].tolist()
    lengths = call.arguments["cu_seqlens_k"].diff().tolist()
    flat = {
        name: torch.cat(
            [call.arguments[name][page, :n] for page, n in zip(table, lengths, strict=True)]
        )
        for name in "kv"
    }
    pages = _seeded(call, return_attn_probs=True, dropout_p=0.3)
    plain = _seeded(call, **flat, block_table=None, return_attn_probs=True, dropout_p=0.3)
    assert all_equal(pages, plain)


# --- Settings of torch --------------------------------------------------------------------------

AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default-device": lambda: cast(AbstractContextManager[Any], torch.device("meta")),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", CALLS)
def test_call_does_not_depend_on_torch_settings(name: str, around: str) -> None:
    options = {"dropout_p": 0.3} if name in DIFFERENTIABLE else {}
    call, inside = CALLS[name](32), CALLS[name](32)
    expected = _seeded(call, **options, **call.lse())
    with AROUND[around]():
        found = _seeded(inside, **options, **call.lse())
    assert all_equal(found, expected)


@pytest.mark.parametrize("around", AROUND)
def test_backward_does_not_depend_on_torch_settings(around: str) -> None:
    q, k, v = make_inputs(1, 9, 17, 2, 2, 32)
    leaf = q.clone().requires_grad_()
    expected = _seeded(flash_attn_func, q=leaf, k=k, v=v, dropout_p=0.3, causal=True)
    (gradient,) = torch.autograd.grad(expected, leaf, torch.ones_like(expected))
    with AROUND[around]():
        out = _seeded(flash_attn_func, q=leaf, k=k, v=v, dropout_p=0.3, causal=True)
        (found,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    assert bits_equal(found, gradient)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_results_of_tensors_without_data(name: str) -> None:
    call = CALLS[name](20)
    expected = call(dropout_p=0.3, return_attn_probs=True)
    meta = {n: x.to("meta") if torch.is_tensor(x) else x for n, x in call.arguments.items()}
    found = call.function(**meta, dropout_p=0.3, return_attn_probs=True)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype, a.device.type) == (b.shape, b.dtype, "meta")


@pytest.mark.parametrize("empty", ["q", "k"])
def test_probs_of_packed_sequences_without_tokens(empty: str) -> None:
    none, some = torch.zeros(3, dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32)
    q = torch.ones(0 if empty == "q" else 5, 4, 32, dtype=torch.bfloat16)
    k = torch.ones(0 if empty == "k" else 5, 2, 32, dtype=torch.bfloat16)
    starts = {"q": (none, some), "k": (some, none)}[empty]
    out, _, probs = flash_attn_varlen_func(q, k, k, *starts, 3, 3, 0.5, return_attn_probs=True)
    assert out.shape == q.shape
    assert probs.shape == (2, 4, 3, 3)
    assert probs.abs().max() == 0
