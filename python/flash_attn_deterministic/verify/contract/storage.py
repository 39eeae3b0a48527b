"""Checks of how keys are stored: capacity, pages, packed sequences."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from .attention import Attention
from .call import Call, garbage, int32, pick
from .check import Case, expect_same, make
from .enumerate_cases import cases_of
from .sizes import Size

# --- capacity -----------------------------------------------------------------------------------


def capacity(case: Case, attention: Attention, size: Size) -> None:
    longest = min(size.seqlen, 1100)
    call = make(case, attention, size, seqlen_k=longest)
    batch, device = call.q.shape[0], call.q.device
    for length in [n for n in size.lengths if n < longest][-6:]:
        short = call.keys(length)
        expected = short()
        for room in (length + 1, longest + 337, 2 * longest):
            k_cache, v_cache = (garbage((batch, room, *t.shape[2:]), t) for t in (call.k, call.v))
            k_cache[:, :length], v_cache[:, :length] = short.k, short.v
            views = replace(short, k=k_cache[:, :length], v=v_cache[:, :length])
            what = f"{length} keys in a buffer of {room}"
            expect_same(views, f"{what}, as views, against no more room", views(), expected)
            used = int32([length] * batch, device)
            cached = short.cached(k_cache, v_cache, cache_seqlens=used)
            expect_same(short, f"{what}, by cache_seqlens, against no more room", cached, expected)


# --- paged --------------------------------------------------------------------------------------


def paged_cases(size: Size) -> Iterable[Case]:
    return cases_of(size, size.features, page_size=size.page_sizes, seqlen_q=size.seqlen_q)


def paged(case: Case, attention: Attention, size: Size) -> None:
    longest = min(size.seqlen, 1100)
    call = make(case, attention, size, batch=3, seqlen_k=longest)
    lengths = [64, longest // 2 - 37, longest]
    k_pages, v_pages, table = _pages(call, lengths, case["page_size"], case.seed)
    used, seqlen_q = int32(lengths, call.q.device), call.q.shape[1]
    cached = call.cached(k_pages, v_pages, cache_seqlens=used, block_table=table)
    qkv = (call.q.flatten(0, 1), k_pages, v_pages)
    packed = call.packed(qkv, [seqlen_q] * 3, lengths, block_table=table)
    packed = {
        "out": packed["out"].view(call.q.shape),
        "softmax_lse": packed["softmax_lse"].view(-1, 3, seqlen_q).transpose(0, 1),
    }
    page = f"pages of {case['page_size']} in random order"
    for index, length in enumerate(lengths):
        one = call.sequences([index]).keys(length)
        alone = one()
        what = f"sequence {index} of {length} keys in {page}"
        expect_same(one, f"{what}, KV cache, against contiguous", pick(cached, index), alone)
        expect_same(one, f"{what}, packed queries, against contiguous", pick(packed, index), alone)


def _pages(
    call: Call, lengths: list[int], page_size: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    per_sequence = -(-call.k.shape[1] // page_size) + 1
    count = len(lengths) * per_sequence + 2
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    table = order[: len(lengths) * per_sequence].view(len(lengths), -1)
    shape = (count, page_size, *call.k.shape[2:])
    k_pages, v_pages = garbage(shape, call.k), garbage(shape, call.v)
    for index, length in enumerate(lengths):
        for number, begin in enumerate(range(0, length, page_size)):
            end, page = min(begin + page_size, length), int(table[index, number])
            k_pages[page, : end - begin] = call.k[index, begin:end]
            v_pages[page, : end - begin] = call.v[index, begin:end]
    return k_pages, v_pages, table.to(call.q.device, torch.int32)


# --- varlen -------------------------------------------------------------------------------------


def varlen_cases(size: Size) -> Iterable[Case]:
    return cases_of(size, size.features, ragged=(0, 1), spare_rows=(0, 3))


def varlen(case: Case, attention: Attention, size: Size) -> None:
    """Packed, and padded with seqused_k, against each sequence alone; empty ones among them.

    Where there are spare rows, which belong to no sequence, sequences of one query each become of
    one at most: as many rows as sequences, but not row by row.
    """
    longest = min(size.seqlen, 1100)
    lengths_k = [0, 65, min(512, longest - 9), 0, longest, 64, min(513, longest - 8), 1, 127]
    spare = case["spare_rows"]
    if case["ragged"]:
        lengths_q = [3, 65, 0, 0, min(200, longest), 129, 1, 64, 5]
    else:
        lengths_q = [1, 0, 1, 1, 0, 1, 1, 0, 1] if spare else [1] * 9
    call = make(case, attention, size, batch=9, seqlen_q=max(lengths_q), seqlen_k=longest)
    device, room = call.q.device, longest + 100
    q = torch.cat([one[:n] for one, n in zip(call.q, lengths_q, strict=True)])
    q = torch.cat([q, q[:spare]])
    k, v = (
        torch.cat([one[:n] for one, n in zip(t, lengths_k, strict=True)]) for t in (call.k, call.v)
    )
    packed = call.packed((q, k, v), lengths_q, lengths_k)
    k_wide, v_wide = garbage((9, room, *k.shape[1:]), k), garbage((9, room, *v.shape[1:]), v)
    for index, length in enumerate(lengths_k):
        k_wide[index, :length] = call.k[index, :length]
        v_wide[index, :length] = call.v[index, :length]
    wide = (q, k_wide.flatten(0, 1), v_wide.flatten(0, 1))
    padded = call.packed(wide, lengths_q, [room] * 9, seqused_k=int32(lengths_k, device))
    out, softmax_lse = packed["out"], packed["softmax_lse"]
    expect_same(call, "padded with seqused_k against packed", padded, packed)
    begin = 0
    for index, (length_q, length_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        if length_q:
            one = call.sequences([index]).queries(0, length_q).keys(length_k)
            own = {
                "out": out[begin : begin + length_q].unsqueeze(0),
                "softmax_lse": softmax_lse[:, begin : begin + length_q].unsqueeze(0),
            }
            what = (
                f"sequence {index} of {length_q} queries and {length_k} keys, packed, against dense"
            )
            expect_same(one, what, own, one())
        begin += length_q
    own = {"out": out[begin:], "softmax_lse": softmax_lse[:, begin:]}
    nothing = {
        "out": torch.zeros_like(own["out"]),
        "softmax_lse": torch.full_like(own["softmax_lse"], math.inf),
    }
    expect_same(call, "rows of no sequence against rows without keys", own, nothing)
