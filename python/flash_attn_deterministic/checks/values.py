"""The values in tensors of lengths and indices, of CPU tensors.

A wrong value would select other tokens, or none. On a GPU the caller has to ensure that they are
right: reading them makes the host wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ArgumentError
from .numbers import require
from .tensors import Names, capacity


def check_values(given: dict[str, Any], names: Names) -> None:
    """Checks the values in an op's arguments, which are right otherwise."""
    if "k_cache" in given:
        _check_cache(given)
    elif given.get("cu_seqlens_q") is not None:
        _check_packed(given, names)


def _check_packed(given: dict[str, Any], names: Names) -> None:
    """Checks where packed sequences begin and end, and that none is longer than announced."""
    keys = given["qkv"] if "qkv" in given else given.get("k")
    rows: Any = given.get("dout", keys if given.get("q") is None else given["q"])
    q_starts = given["cu_seqlens_q"].tolist()
    check_starts(names.cu_seqlens_q, q_starts, rows.shape[0])
    if keys is None:
        return  # the gradient of sinks depends on rows alone
    k_starts = given["cu_seqlens_k"].tolist()
    seqused, leftpad, table = map(given.get, ("seqused_k", "leftpad_k", "block_table"))
    seqlens_q, rooms = _differences(q_starts), _differences(k_starts)
    batch = len(seqlens_q)
    skipped = [0] * batch if leftpad is None else leftpad.tolist()
    ends = rooms if seqused is None else seqused.tolist()
    if table is None:
        check_starts(names.cu_seqlens_k, k_starts, keys.shape[0])
        _check_each("seqused_k", ends, rooms, "the keys that cu_seqlens_k has room for")
        _check_each("leftpad_k", skipped, ends, "the length")
    else:
        if seqused is None:
            check_starts(names.cu_seqlens_k, k_starts)
        else:
            most = [capacity(keys, table)] * batch
            _check_each("seqused_k", ends, most, "the tokens of its pages")
        _check_pages(table, keys.shape[1], keys.shape[0], ends)
    if "dout" in given:
        return  # as in the forward
    _check_longest(names.max_seqlen_q, given["max_seqlen_q"], seqlens_q)
    seqlens_k = [end - begin for begin, end in zip(skipped, ends, strict=True)]
    _check_longest(names.max_seqlen_k, given["max_seqlen_k"], seqlens_k)


def _check_cache(given: dict[str, Any]) -> None:
    """Checks lengths, rows and pages of a cache, and that the rotary tables are long enough."""
    q, k_cache, k = given["q"], given["k_cache"], given["k"]
    seqlens, leftpad = given["cache_seqlens"], given["cache_leftpad"]
    index, table, cos = given["cache_batch_idx"], given["block_table"], given["rotary_cos"]
    batch, most = q.shape[0], capacity(k_cache, table)
    new = 0 if k is None else k.shape[1]
    used = [most] * batch if seqlens is None else seqlens.tolist()
    ends = [end + new for end in used]
    room = f"the {most} tokens of the cache less {new} new ones"
    _check_each("cache_seqlens", used, [most - new] * batch, room)
    if leftpad is not None:
        _check_each("cache_leftpad", leftpad.tolist(), ends, "the length")
    if table is not None:
        _check_pages(table, k_cache.shape[1], k_cache.shape[0], ends)
    elif index is not None:
        last = [k_cache.shape[0] - 1] * batch
        _check_each("cache_batch_idx", index.tolist(), last, "the places in the cache")
    if cos is not None:
        for sequence, position in enumerate(used):
            check_rotated_queries(position, given, f" in sequence {sequence}")


def check_rotated_queries(begin: int, given: dict[str, Any], where: str = "") -> None:
    """Checks that the rotary tables reach to the last query of a sequence.

    Query i is at begin + i with causal or a window, otherwise all are at begin. With more queries
    than new keys that may be beyond the capacity of the cache.
    """
    q, cos = given["q"], given["rotary_cos"]
    advance = given["window_left"] >= 0 or given["window_right"] >= 0
    end = begin + (q.shape[1] if advance else min(q.shape[1], 1))
    require(
        end <= cos.shape[0],
        lambda: (
            f"rotary_cos: expected a seqlen_ro of at least {end}, because the last query "
            f"has position {end - 1}{where}, got {cos.shape[0]}"
        ),
    )


def _differences(starts: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(starts)]


def check_starts(name: str, starts: Sequence[int], total: int | None = None) -> None:
    """Checks cumulative lengths: from 0 on, not decreasing, and ending within `total` tokens."""
    if starts[0] != 0:
        raise ArgumentError(f"{name}: expected 0 as its first element, got {starts[0]}")
    for sequence, (begin, end) in enumerate(itertools.pairwise(starts)):
        if end < begin:
            raise ArgumentError(
                f"{name}: expected elements that do not decrease, got {end} after {begin} (sequence"
                f" {sequence})"
            )
    if total is not None and starts[-1] > total:
        raise ArgumentError(
            f"{name}: expected a last element of at most {total}, the number of tokens, got "
            f"{starts[-1]}"
        )


def _check_each(name: str, values: Sequence[int], limits: Sequence[int], what: str) -> None:
    """Checks one number per sequence against the largest valid one; `what` says what that is."""
    for sequence, (value, limit) in enumerate(zip(values, limits, strict=True)):
        if not 0 <= value <= limit:
            raise ArgumentError(
                f"{name}: expected 0 to {limit}, {what}, for sequence {sequence}, got {value}"
            )


def _check_longest(name: str, longest: int, lengths: Sequence[int]) -> None:
    if longest < max(lengths, default=0):
        raise ArgumentError(
            f"{name}: expected at least {max(lengths)}, the length of the longest sequence, got "
            f"{longest}"
        )


def _check_pages(
    block_table: torch.Tensor, page_size: int, num_pages: int, ends: Sequence[int]
) -> None:
    """Checks the part of a block table that sequences of these lengths use."""
    for sequence, (row, end) in enumerate(zip(block_table.tolist(), ends, strict=True)):
        used = -(-end // page_size)
        if used > len(row):
            raise ArgumentError(
                f"block_table: expected at least {used} pages of {page_size} tokens for the {end} "
                f"of sequence {sequence}, got {len(row)}"
            )
        for page in row[:used]:
            if not 0 <= page < num_pages:
                raise ArgumentError(
                    f"block_table: expected pages 0 to {num_pages - 1}, got {page} for sequence "
                    f"{sequence}"
                )
