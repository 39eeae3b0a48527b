"""Checks of how keys are stored: capacity, pages, packed sequences."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from . import layouts
from .call import Attention, part
from .check import Case, cases_of, expect_same, make
from .sizes import Size


def capacity(case: Case, attention: Attention, size: Size) -> None:
    longest = min(size.seqlen, 1100)
    call = make(case, attention, size, seqlen_k=longest)
    batch = call.q.shape[0]
    for length in [n for n in size.lengths if n < longest][-6:]:
        short = call.keys(length)
        expected = short()
        for room in (length + 1, longest + 337, 2 * longest):
            k, v = (layouts.buffer(list(t), room)[:, :length] for t in (short.k, short.v))
            views = replace(short, k=k, v=v)
            what = f"{length} keys in a buffer of {room}"
            expect_same(views, f"{what}, as views, against no more room", views(), expected)
            parts = layouts.cached(call, [length] * batch, room=room)
            for index, (one, own) in enumerate(parts):
                words = f"{what}, by cache_seqlens, against no more room"
                expect_same(one, words, own, part(expected, b=[index]))


def paged_cases(size: Size) -> Iterable[Case]:
    return cases_of(size, size.features, page_size=size.page_sizes, seqlen_q=size.seqlen_q)


def paged(case: Case, attention: Attention, size: Size) -> None:
    longest = min(size.seqlen, 1100)
    call = make(case, attention, size, batch=3, seqlen_k=longest)
    lengths, rows = [64, longest // 2 - 37, longest], [call.q.shape[1]] * 3
    page_size, seed = case["page_size"], case.seed
    cached = layouts.cached(call, lengths, room=longest, page_size=page_size, seed=seed)
    packed, _ = layouts.packed(call, rows, lengths, page_size=page_size, seed=seed)
    page = f"pages of {page_size} in random order"
    for form, parts in (("KV cache", cached), ("packed queries", packed)):
        for index, (one, own) in enumerate(parts):
            what = f"sequence {index} of {lengths[index]} keys in {page}, {form}"
            expect_same(one, f"{what}, against contiguous", own, one())


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
    # Spare rows come from the first sequence.
    rows = max(*lengths_q, spare)
    call = make(case, attention, size, batch=9, seqlen_q=rows, seqlen_k=longest)
    for form, room in (("packed", 0), ("padded with seqused_k", longest + 100)):
        parts, rest = layouts.packed(call, lengths_q, lengths_k, spare=spare, room=room)
        for index, (one, own) in enumerate(parts):
            if lengths_q[index]:
                what = f"sequence {index} of {lengths_q[index]} queries and {lengths_k[index]} keys"
                expect_same(one, f"{what}, {form}, against dense", own, one())
        nothing = {
            "out": torch.zeros_like(rest["out"]),
            "softmax_lse": torch.full_like(rest["softmax_lse"], math.inf),
        }
        what = f"rows of no sequence, {form}, against rows without keys"
        expect_same(call, what, rest, nothing)
