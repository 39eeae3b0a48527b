"""Checks of the values in tensors of lengths and indices, for CPU tensors.

A wrong value would select other tokens, or none. On a GPU the caller has to ensure that they are
right: reading them makes the host wait. The CPU ops run these checks, since a compiled graph gets
new values in each run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from .._ops.arguments import Lengths, Scores
from ..errors import ArgumentError
from .kvcache import check_rotated_queries, rotated_positions
from .varlen import NAMES, Names


def check_values(name: str, arguments: dict[str, Any], names: Names = NAMES) -> None:
    """Checks the values in an op's tensors of lengths and indices.

    Args:
        name: of the op.
        arguments: of the op, by name; shapes and dtypes have been checked.
        names: of the caller's arguments.

    Raises:
        ArgumentError: a value is out of range.
    """
    if name == "varlen_fwd":
        lengths = Lengths(*(arguments[field] for field in Lengths._fields))
        check_varlen_values(arguments["q"], arguments["k"], lengths, names)
    elif name == "kvcache_fwd":
        check_cache_values(arguments)
    elif name in ("varlen_bwd", "varlen_bwd_accumulate"):
        for tensor in ("q", "k"):
            starts = f"cu_seqlens_{tensor}"
            check_starts(starts, arguments[starts].tolist(), arguments[tensor].shape[0])


def check_varlen_values(
    q: torch.Tensor, k: torch.Tensor, lengths: Lengths, names: Names = NAMES
) -> None:
    """Checks where packed sequences begin and end.

    Args:
        q: (total_q, nheads, head_dim).
        k: (total_k, nheads_k, head_dim); with a block table (num_blocks, page_block_size, nheads_k,
            head_dim).
        lengths: of the call; shapes and dtypes have been checked.
        names: of the caller's arguments.

    Raises:
        ArgumentError: a start, length or page is out of range, or a sequence is longer than
            max_seqlen_q or max_seqlen_k.
    """
    table = lengths.block_table
    q_starts, k_starts = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist()
    seqlens_q, rooms = _differences(q_starts), _differences(k_starts)
    batch = len(seqlens_q)
    skipped = [0] * batch if lengths.leftpad_k is None else lengths.leftpad_k.tolist()
    ends = rooms if lengths.seqused_k is None else lengths.seqused_k.tolist()
    check_starts(names.cu_seqlens_q, q_starts, q.shape[0])
    if table is None:
        check_starts(names.cu_seqlens_k, k_starts, k.shape[0])
        check_each("seqused_k", ends, rooms, "the keys that cu_seqlens_k has room for")
        check_each("leftpad_k", skipped, ends, "the length")
    else:
        if lengths.seqused_k is None:
            check_starts(names.cu_seqlens_k, k_starts)
        else:
            capacity = table.shape[1] * k.shape[1]
            check_each("seqused_k", ends, [capacity] * batch, "the tokens of its pages")
        check_pages(table, k.shape[1], k.shape[0], ends)
    check_longest(names.max_seqlen_q, lengths.max_seqlen_q, seqlens_q)
    seqlens_k = [end - begin for begin, end in zip(skipped, ends, strict=True)]
    check_longest(names.max_seqlen_k, lengths.max_seqlen_k, seqlens_k)


def check_cache_values(arguments: dict[str, Any]) -> None:
    """Checks lengths, rows and pages of a cache.

    Args:
        arguments: of the op kvcache_fwd, by name.

    Raises:
        ArgumentError: a length, row or page is out of range, the new tokens do not fit into the
            cache, or a query lies beyond the rotary tables.
    """
    q, k_cache, k = (arguments[name] for name in ("q", "k_cache", "k"))
    cache_seqlens, cache_leftpad = arguments["cache_seqlens"], arguments["cache_leftpad"]
    cache_batch_idx, block_table = arguments["cache_batch_idx"], arguments["block_table"]
    rotary_cos = arguments["rotary_cos"]
    batch, capacity = q.shape[0], k_cache.shape[1]
    if block_table is not None:
        capacity *= block_table.shape[1]
    new = 0 if k is None else k.shape[1]
    used = [capacity] * batch if cache_seqlens is None else cache_seqlens.tolist()
    ends = [end + new for end in used]
    room = f"the {capacity} tokens of the cache less {new} new ones"
    check_each("cache_seqlens", used, [capacity - new] * batch, room)
    if cache_leftpad is not None:
        check_each("cache_leftpad", cache_leftpad.tolist(), ends, "the length")
    if block_table is not None:
        check_pages(block_table, k_cache.shape[1], k_cache.shape[0], ends)
    elif cache_batch_idx is not None:
        last = [k_cache.shape[0] - 1] * batch
        check_each("cache_batch_idx", cache_batch_idx.tolist(), last, "the places in the cache")
    if rotary_cos is not None:
        scores = Scores(*(arguments[field] for field in Scores._fields))
        positions = rotated_positions(q, scores)
        for sequence, position in enumerate(used):
            where = f" in sequence {sequence}"
            check_rotated_queries(position + positions, rotary_cos.shape[0], where)


def _differences(starts: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(starts)]


def check_starts(name: str, starts: Sequence[int], total: int | None = None) -> None:
    """Checks cumulative lengths: they start with 0, do not decrease, and end within the tokens.

    Args:
        name: of the argument.
        starts: (batch + 1,).
        total: number of tokens; None: any.

    Raises:
        ArgumentError: they don't.
    """
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


def check_each(name: str, values: Sequence[int], limits: Sequence[int], what: str) -> None:
    """Checks one number per sequence.

    Args:
        name: of the argument.
        values: (batch,).
        limits: (batch,), the largest valid values.
        what: meaning of the limit, for the message.

    Raises:
        ArgumentError: a value is negative or above its limit.
    """
    for sequence, (value, limit) in enumerate(zip(values, limits, strict=True)):
        if not 0 <= value <= limit:
            raise ArgumentError(
                f"{name}: expected 0 to {limit}, {what}, for sequence {sequence}, got {value}"
            )


def check_longest(name: str, longest: int, lengths: Sequence[int]) -> None:
    """Checks that no sequence is longer than `longest`.

    Raises:
        ArgumentError: one is.
    """
    if longest < max(lengths, default=0):
        raise ArgumentError(
            f"{name}: expected at least {max(lengths)}, the length of the longest sequence, got "
            f"{longest}"
        )


def check_pages(
    block_table: torch.Tensor, page_size: int, num_pages: int, ends: Sequence[int]
) -> None:
    """Checks the used part of a block table.

    Args:
        block_table: (batch, pages of a sequence).
        page_size: tokens per page.
        num_pages: number of pages.
        ends: (batch,), tokens of each sequence.

    Raises:
        ArgumentError: too short for a sequence, or a page out of range.
    """
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
