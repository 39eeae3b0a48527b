"""Whole calls, drawn at random and compared with softmax attention in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_cases import make_inputs, softmax_attention, tolerance
from bits import all_equal, bits_equal
from calls import int32
from flash_attn_deterministic.reference import attention, ieee, kvcache_attention, varlen_attention
from flash_attn_deterministic.verify.contract.call import garbage
from flash_attn_deterministic.verify.exact import rotated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BLOCK_N = 16
DTYPES = [torch.float16, torch.bfloat16, torch.float64]

drawn = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def cumulative(lengths: Sequence[int]) -> torch.Tensor:
    return int32(*itertools.accumulate(lengths, initial=0))


def padded(tokens: torch.Tensor, capacity: int, leftpad: int = 0) -> torch.Tensor:
    """Puts (batch, seqlen, ...) into a longer buffer, with garbage before and after."""
    buffer = garbage((tokens.shape[0], capacity, *tokens.shape[2:]), tokens)
    buffer[:, leftpad : leftpad + tokens.shape[1]] = tokens
    return buffer


def paged(
    keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], page: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Puts sequences (seqlen, nheads_k, head_dim) into shuffled pages, garbage everywhere else.

    Returns:
        k and v (num_pages, page, nheads_k, head_dim), and the block table, whose entries beyond a
        sequence's pages name a page of garbage.
    """
    counts = [-(-len(tokens) // page) for tokens in keys]
    spare = sum(counts)
    order = torch.randperm(spare, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(keys), max(counts) + 2), spare, dtype=torch.int32)
    pages_k = garbage((spare + 1, page, *keys[0].shape[1:]), keys[0])
    pages_v = pages_k.clone()
    for sequence, count in enumerate(counts):
        for i in range(count):
            number = order.pop()
            table[sequence, i] = number
            for pages, tokens in ((pages_k, keys[sequence]), (pages_v, values[sequence])):
                part = tokens[i * page : (i + 1) * page]
                pages[number, : len(part)] = part
    return pages_k, pages_v, table


def assert_close(
    result: tuple[torch.Tensor, torch.Tensor],
    exact: tuple[torch.Tensor, torch.Tensor],
    v: torch.Tensor,
    slack: float = 1.0,
) -> None:
    dtype = result[0].dtype
    double = dtype == torch.float64
    atol = 1e-11 if double else slack * tolerance(dtype, v)
    torch.testing.assert_close(result[0].double(), exact[0], rtol=0, atol=atol)
    lse_atol = 1e-11 if double else 5e-5 if slack == 1.0 else 0.05
    torch.testing.assert_close(result[1].double(), exact[1], rtol=1e-5, atol=lse_atol)


@st.composite
def heads(draw: st.DrawFn) -> dict[str, Any]:
    nheads_k = draw(st.integers(1, 2))
    return {
        "nheads": nheads_k * draw(st.integers(1, 3)),
        "nheads_k": nheads_k,
        "head_dim": draw(st.sampled_from([8, 16, 40])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 99)),
    }


@st.composite
def masks(draw: st.DrawFn, batch: int, nheads: int) -> dict[str, Any]:
    """Arguments that all functions share, and `softmax_attention` too."""
    edge = st.one_of(st.just(-1), st.integers(0, 70))
    slopes = draw(st.sampled_from([None, (nheads,), (batch, nheads)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return {
        "causal": draw(st.booleans()),
        "window": (draw(edge), draw(edge)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.5, 20.0])),
        "alibi_slopes": None if slopes is None else torch.rand(slopes, generator=generator),
        "softmax_scale": draw(st.sampled_from([None, 0.07, 1.0])),
    }


splits = st.sampled_from([0, 16, 32, 64])


def for_sequence(mask: dict[str, Any], sequence: int) -> dict[str, Any]:
    slopes = mask["alibi_slopes"]
    alone = slopes[sequence] if slopes is not None and slopes.dim() == 2 else slopes
    return {**mask, "alibi_slopes": alone}


@drawn
@given(st.data())
def test_dense_calls(data: st.DataObject) -> None:
    shape = data.draw(heads())
    batch, seqlen_q, seqlen_k = (data.draw(st.integers(low, high)) for low, high in
                                 ((1, 3), (0, 40), (0, 100)))  # fmt: skip
    q, k, v = make_inputs(batch, seqlen_q, seqlen_k, **shape)
    mask = data.draw(masks(batch, shape["nheads"]))
    result = attention(q, k, v, **mask, split_size=data.draw(splits), block_n=BLOCK_N)
    assert_close(result, softmax_attention(q, k, v, **mask), v)


@drawn
@given(st.data())
def test_varlen_calls(data: st.DataObject) -> None:
    shape = data.draw(heads())
    sizes = data.draw(
        st.lists(st.tuples(st.integers(0, 25), st.integers(0, 70)), min_size=1, max_size=4)
    )
    batch = len(sizes)
    mask = data.draw(masks(batch, shape["nheads"]))
    sequences = [
        make_inputs(1, *size, **{**shape, "seed": shape["seed"] + i})
        for i, size in enumerate(sizes)
    ]
    keys, values = ([inputs[i][0] for inputs in sequences] for i in (1, 2))
    arguments: dict[str, Any] = {"cu_seqlens_k": cumulative([len(x) for x in keys])}
    layout = data.draw(st.sampled_from(["packed", "padded", "paged"]))
    if layout == "paged":
        k, v, arguments["block_table"] = paged(keys, values, 16)
    else:
        before, after = (
            [data.draw(st.integers(0, 20)) if layout == "padded" else 0 for _ in sizes]
            for _ in range(2)
        )
        room = [b + len(x) + a for b, x, a in zip(before, keys, after, strict=True)]
        k, v = (
            torch.cat(
                [
                    padded(x[None], size, b)[0]
                    for x, size, b in zip(tokens, room, before, strict=True)
                ]
            )
            for tokens in (keys, values)
        )
        if layout == "padded":
            arguments = {
                "cu_seqlens_k": cumulative(room),
                "seqused_k": int32(*(b + len(x) for b, x in zip(before, keys, strict=True))),
                "leftpad_k": int32(*before),
            }
    tree: dict[str, Any] = {"split_size": data.draw(splits), "block_n": BLOCK_N}
    out, softmax_lse = varlen_attention(
        torch.cat([inputs[0][0] for inputs in sequences]),
        k,
        v,
        cumulative([q for q, _ in sizes]),
        **arguments,
        **mask,
        **tree,
    )
    begin = 0
    for i, (inputs, (seqlen_q, _)) in enumerate(zip(sequences, sizes, strict=True)):
        rows = slice(begin, begin + seqlen_q)
        alone = for_sequence(mask, i)
        result = (out[None, rows], softmax_lse[None, :, rows])
        assert_close(result, softmax_attention(*inputs, **alone), inputs[2])
        assert all_equal(result, attention(*inputs, **{**alone, **tree}))
        begin += seqlen_q


@drawn
@given(st.data())
def test_kvcache_calls(data: st.DataObject) -> None:
    shape = data.draw(heads())
    batch, seqlen_q = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))
    new = data.draw(st.sampled_from([None, 1, seqlen_q]))
    used = data.draw(st.lists(st.integers(0, 60), min_size=batch, max_size=batch))
    same_length = data.draw(st.booleans())
    used = [used[0]] * batch if same_length else used
    layout = data.draw(st.sampled_from(["plain", "rows", "leftpad", "paged"]))
    rotary = new is not None and data.draw(st.booleans())
    interleaved = data.draw(st.booleans())
    mask = data.draw(masks(batch, shape["nheads"]))
    leftpad = [data.draw(st.integers(0, n)) if layout == "leftpad" else 0 for n in used]
    capacity = 112

    q, k_all, v_all = make_inputs(batch, seqlen_q, 60 + (new or 0), **shape)
    old = [(k_all[b, :n], v_all[b, :n]) for b, n in enumerate(used)]
    k_new, v_new = (None, None) if new is None else (k_all[:, -new:], v_all[:, -new:])
    arguments: dict[str, Any] = {"cache_seqlens": used[0] if same_length else int32(*used)}
    if layout == "paged":
        # Seven pages of 16 each: what is not used yet is garbage, but its own.
        buffers = [
            torch.cat([padded(x[None], capacity)[0] for x in tokens])
            for tokens in zip(*old, strict=True)
        ]
        order = torch.randperm(7 * batch, generator=torch.Generator().manual_seed(1))
        k_cache, v_cache = (x.view(-1, 16, *x.shape[1:])[order] for x in buffers)
        arguments["block_table"] = order.argsort().view(batch, 7).to(torch.int32)
    else:
        rows = [b + 1 if layout == "rows" else b for b in range(batch)][::-1]
        if layout in ("plain", "leftpad"):
            rows = rows[::-1]
        k_cache, v_cache = (garbage((batch + 1, capacity, *k_all.shape[2:]), q) for _ in range(2))
        for b, (k_old, v_old) in enumerate(old):
            k_cache[rows[b], leftpad[b] : used[b]] = k_old[leftpad[b] :]
            v_cache[rows[b], leftpad[b] : used[b]] = v_old[leftpad[b] :]
        if layout == "rows":
            arguments["cache_batch_idx"] = int32(*rows)
        if layout == "leftpad":
            arguments["cache_leftpad"] = int32(*leftpad)
    angles = torch.arange(float(capacity)).double()[:, None] * torch.tensor([1.0, 0.3, 0.01, 0.1])
    if rotary:
        arguments["rotary_cos"] = angles.cos().to(q.dtype)
        arguments["rotary_sin"] = angles.sin().to(q.dtype)
        arguments["rotary_interleaved"] = interleaved
    tree: dict[str, Any] = {"split_size": data.draw(splits), "block_n": BLOCK_N}
    out, softmax_lse = kvcache_attention(
        q, k_cache, v_cache, k_new, v_new, **arguments, **mask, **tree
    )

    def turned(x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        places = torch.tensor(list(positions), dtype=torch.long)
        return rotated(x, angles.cos(), angles.sin(), places, interleaved)

    turning = mask["causal"] or max(mask["window"]) >= 0
    for b in range(batch):
        q_row, k_row, v_row = q[b], old[b][0][leftpad[b] :], old[b][1][leftpad[b] :]
        k_added = None if k_new is None else k_new[b]
        if rotary and k_added is not None:
            positions = [used[b] + (i if turning else 0) for i in range(seqlen_q)]
            q_row = turned(q_row, positions)
            k_added = turned(k_added, range(used[b], used[b] + len(k_added)))
        if k_added is not None and v_new is not None:
            k_row, v_row = torch.cat([k_row, k_added]), torch.cat([v_row, v_new[b]])
        one = (q_row[None], k_row[None], v_row[None])
        alone = for_sequence(mask, b)
        result = (out[b : b + 1], softmax_lse[b : b + 1])
        # cos and sin are of 16 bits, then.
        slack = 60.0 if rotary and q.dtype != torch.float64 else 1.0
        assert_close(result, softmax_attention(*one, **alone), v_all, slack)
        if not rotary:
            assert all_equal(result, attention(*one, **{**alone, **tree}))


# --- Rotary -------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_rotation_rounds_each_product_to_float32(interleaved: bool, dtype: torch.dtype) -> None:
    _, k, v = make_inputs(1, 0, 3, 2, 2, 40, dtype)
    angles = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    k_cache, v_cache = garbage((1, 9, 2, 40), k), garbage((1, 9, 2, 40), k)
    kvcache_attention(
        k, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=5,
        rotary_interleaved=interleaved, block_n=BLOCK_N,
    )  # fmt: skip
    for j in range(3):
        for pair in range(16):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 16)
            x, y = k[0, j, :, a].float(), k[0, j, :, b].float()
            c, s = cos[5 + j, pair].float(), sin[5 + j, pair].float()
            assert bits_equal(k_cache[0, 5 + j, :, a], (x * c - y * s).to(dtype))
            assert bits_equal(k_cache[0, 5 + j, :, b], (x * s + y * c).to(dtype))
    assert bits_equal(k_cache[0, 5:8, :, 32:], k[0, :, :, 32:])
    assert bits_equal(v_cache[0, 5:8], v[0])


def rotated_query(**arguments: Any) -> torch.Tensor:
    """out of a query that sees one old and three new keys; each position has its own angle."""
    q, k, v = make_inputs(1, 3, 3, 1, 1, 16, torch.float64)
    angles = torch.arange(4.0, dtype=torch.float64)[:, None].expand(4, 8)
    cache = torch.ones(1, 4, 1, 16, dtype=torch.float64)
    out, _ = kvcache_attention(
        q, cache, cache.clone(), k, v, rotary_cos=angles.cos(), rotary_sin=angles.sin(),
        cache_seqlens=1, block_n=BLOCK_N, **arguments,
    )  # fmt: skip
    return out


def test_queries_turn_with_a_window_however_wide() -> None:
    """Upstream takes a window wider than the cache for none, and the angles with it."""
    wide = rotated_query(window=(1000, 1000))
    assert bits_equal(wide, rotated_query(window=(4, 4)))
    assert not bits_equal(wide, rotated_query(window=(-1, -1)))
    for one_sided, other in (((0, -1), (0, 7)), ((-1, 0), (7, 0))):
        assert bits_equal(rotated_query(window=one_sided), rotated_query(window=other))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_rotary_positions_count_the_leftpad(causal: bool) -> None:
    q, k, v = make_inputs(1, 3, 9, 1, 1, 16, torch.float64)
    new_k, new_v = k[:, 6:], v[:, 6:]
    angles = torch.arange(9.0, dtype=torch.float64)[:, None] * torch.linspace(0.1, 1.0, 8)
    k_cache, v_cache = padded(k[:, 2:6], 9, leftpad=2), padded(v[:, 2:6], 9, leftpad=2)
    result = kvcache_attention(
        q, k_cache, v_cache, new_k, new_v, rotary_cos=angles.cos(), rotary_sin=angles.sin(),
        cache_seqlens=6, cache_leftpad=int32(2), causal=causal, rotary_interleaved=False,
        block_n=BLOCK_N,
    )  # fmt: skip
    cos, sin, last = angles.cos(), angles.sin(), torch.arange(6, 9)
    turned_k = rotated(new_k[0], cos, sin, last, False)
    turned_q = rotated(q[0], cos, sin, last if causal else last[[0, 0, 0]], False)
    torch.testing.assert_close(k_cache[0, 6:], turned_k, rtol=0, atol=1e-13)
    keys = torch.cat([k[0, 2:6], turned_k])[None]
    assert_close(result, softmax_attention(turned_q[None], keys, v[:, 2:], causal=causal), v)


# --- Order of operations ------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.0, 3.0], ids=["uncapped", "capped"])
def test_softcap_and_alibi_come_before_the_mask_in_this_order(softcap: float) -> None:
    """A row with one key: softmax_lse is its score."""
    q, k, v = make_inputs(1, 1, 9, 1, 1, 16)
    slope, scale = torch.tensor([0.37]), torch.tensor(0.25)
    key = 4
    _, softmax_lse = attention(
        q, k[:, : key + 1], v[:, : key + 1], softmax_scale=0.25, window=(0, 0), softcap=softcap,
        alibi_slopes=slope, block_n=BLOCK_N,
    )  # fmt: skip
    score = torch.tensor(0.0)
    for d in range(16):
        score = score + q[0, 0, 0, d].float() * k[0, key, 0, d].float()
    factor = scale
    if softcap:
        factor = torch.tensor(softcap)
        score = ieee.tanh((score * (scale / factor)).reshape(1))[0]
    score = score - slope[0] / factor * 0.0
    assert bits_equal(softmax_lse[0, 0, 0], score * factor)

    scores: Any = {"softmax_scale": 0.25, "softcap": softcap, "alibi_slopes": slope}
    _, two = attention(q, k[:, :2], v[:, :2], **scores, block_n=BLOCK_N)
    exact = softmax_attention(q, k[:, :2], v[:, :2], **scores)
    torch.testing.assert_close(two.double(), exact[1], rtol=1e-6, atol=1e-6)
