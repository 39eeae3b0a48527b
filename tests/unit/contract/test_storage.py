"""What the reference's bits don't depend on, besides the rows of `verify`'s contract."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from bits import bits_equal
from contract_cases import (
    CAUSAL,
    FEATURES,
    LENGTHS,
    decode,
    garbage,
    int32,
    make_call,
    one_by_one,
    packed,
    packed_call,
    paged,
    ragged_calls,
    same,
    sequences_of,
)
from flash_attn_deterministic.reference import (
    kvcache_attention,
)

INF = math.inf

features = pytest.mark.parametrize("feature", FEATURES)
causal_features = pytest.mark.parametrize("feature", CAUSAL)
lengths = pytest.mark.parametrize("length", LENGTHS, ids=lambda length: f"L{length}")

pages = pytest.mark.parametrize("page", [16, 48], ids=lambda page: f"page{page}")


# --- capacity -----------------------------------------------------------------------------------


@features
def test_rows_of_a_cache(feature: str) -> None:
    """cache_batch_idx, sequences of different lengths, one int for all of them."""
    call = make_call(feature, 5, 3, 70)
    index = [3, 0, 4]
    for used in ([70, 64, 1], [0, 65, 16], [33, 33, 33]):
        result = decode(
            call,
            q=call.q[index],
            cache_seqlens=used[0] if len(set(used)) == 1 else int32(used),
            cache_batch_idx=int32(index),
            alibi_slopes=None if call.slopes is None else call.slopes[index],
        )
        for i, (row, length) in enumerate(zip(index, used, strict=True)):
            alone = call.sequences([row])
            alone = replace(alone, k=alone.k[:, :length], v=alone.v[:, :length])
            assert same(sequences_of(result, [i]), alone())


def test_nothing_but_the_new_tokens_is_written() -> None:
    call = make_call("causal", 2, 4, 4)
    k_cache, v_cache = garbage((3, 40, 2, 16), call.q.dtype), garbage((3, 40, 2, 16), call.q.dtype)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    for b, (row, used) in enumerate([(2, 5), (0, 36)]):
        k_cache[row, :used] = v_cache[row, :used] = 1.0
        expected_k[row, :used] = expected_v[row, :used] = 1.0
        expected_k[row, used : used + 4] = call.k[b]
        expected_v[row, used : used + 4] = call.v[b]
    kvcache_attention(
        call.q,
        k_cache,
        v_cache,
        call.k,
        call.v,
        cache_seqlens=int32([5, 36]),
        cache_batch_idx=int32([2, 0]),
        **call.keyword_arguments(),
    )
    assert bits_equal(k_cache, expected_k)
    assert bits_equal(v_cache, expected_v)


# --- paged --------------------------------------------------------------------------------------


@causal_features
@pages
def test_appending_to_pages(feature: str, page: int) -> None:
    call = make_call(feature, 2, 5, 70)
    used = [65, 63]
    whole = [call.sequences([b]).rows(0, 5) for b in range(2)]
    k_pages, v_pages, table = paged(
        [call.k[b, :n] for b, n in enumerate(used)],
        [call.v[b, :n] for b, n in enumerate(used)],
        page,
    )
    # One more page, for tokens that may not fit into the last one.
    extra = torch.arange(2) + len(k_pages)
    for b, n in enumerate(used):
        table[b, -(-n // page)] = extra[b]
    k_pages, v_pages = (
        torch.cat([x, garbage((2, *x.shape[1:]), x.dtype)]) for x in (k_pages, v_pages)
    )
    new_k, new_v = call.k[:, 65:70], call.v[:, 65:70]
    result = decode(
        call,
        k_cache=k_pages,
        v_cache=v_pages,
        k=new_k,
        v=new_v,
        block_table=table,
        cache_seqlens=int32(used),
    )
    for b, n in enumerate(used):
        keys, values = (
            torch.cat([old[b : b + 1, :n], new[b : b + 1]], dim=1)
            for old, new in ((call.k, new_k), (call.v, new_v))
        )
        alone = replace(whole[b], k=keys, v=values)
        assert same(sequences_of(result, [b]), alone())


# --- varlen -------------------------------------------------------------------------------------


@features
def test_ragged_sequences_with_empty_ones(feature: str) -> None:
    calls = ragged_calls(feature)
    results = one_by_one(calls)
    assert same(packed(results), packed_call(calls))
    for order in ([8, 7, 6, 5, 4, 3, 2, 1, 0], [5, 5, 1], [3], [0, 4]):
        assert same(packed([results[i] for i in order]), packed_call([calls[i] for i in order]))


def test_rows_of_no_sequence_are_defined() -> None:
    call = make_call("causal", 1, 9, 9)
    result = packed_call([call], q=torch.cat([call.q[0], call.q[0, :2]]))
    assert bits_equal(result[0][9:], torch.zeros_like(result[0][9:]))
    assert (result[1][:, 9:] == INF).all()
    assert same(packed([call()]), (result[0][:9], result[1][:, :9]))


def test_max_seqlens_do_not_matter() -> None:
    calls = ragged_calls("window")
    expected = packed_call(calls)
    assert same(expected, packed_call(calls, max_seqlen_q=64, max_seqlen_k=129))
    assert same(expected, packed_call(calls, max_seqlen_q=4096, max_seqlen_k=4096))
