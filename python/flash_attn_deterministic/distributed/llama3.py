"""Functions with the signatures of ring-flash-attn's llama3_flash_attn_varlen functions.

    from flash_attn_deterministic.distributed.llama3 import (
        llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func)

Packed tokens are in the contiguous order. As in ring-flash-attn, each rank passes the lengths of
its own part; in each call the ranks exchange these to find the whole sequences.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..checks.describe import shown
from ..checks.numbers import as_flag, as_int
from ..checks.tensors import VARLEN, check_cu_seqlens, check_rank
from ..checks.values import check_starts
from ..errors import ArgumentError, ArgumentTypeError
from ..types import Deterministic
from .call import check_packed, checked
from .messages.agreement import check, report
from .messages.groups import find_groups
from .packed import flash_attn_varlen_func

Prepared = tuple[torch.Tensor, torch.Tensor, int, int, slice]


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> Prepared:
    """Finds a rank's part of packed sequences.

    Args:
        cu_seqlens: (batch + 1,), int32: tokens of all ranks before each sequence, and their total.
        causal: whether the mask is causal: a rank then needs no keys after its own tokens.
        rank: in the group.
        world_size: number of ranks of the group.

    Returns:
        cu_seqlens_q and cu_seqlens_k of the sequences that have tokens on this rank, the longest
        lengths of both, and the slice of all tokens that holds its keys.

    Raises:
        ArgumentError: tokens that don't divide by the ranks, wrong cu_seqlens, or no such rank.
        ArgumentTypeError: a wrong type; DtypeError: cu_seqlens is not torch.int32.
    """
    check_cu_seqlens("cu_seqlens", cu_seqlens, None, None)
    causal = as_flag("causal", causal)
    rank, world_size = as_int("rank", rank), as_int("world_size", world_size)
    if not 0 <= rank < world_size:
        raise ArgumentError(
            f"rank: expected 0 to world_size - 1, got {rank} with world_size {world_size}"
        )
    starts = cu_seqlens.tolist()
    check_starts("cu_seqlens", starts)
    if starts[-1] % world_size:
        raise ArgumentError(
            f"cu_seqlens: expected a total that divides by {world_size} ranks, got {starts[-1]}"
        )
    queries, keys, place = _part(starts, causal, rank, world_size)

    def tensor(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=cu_seqlens.device)

    return tensor(queries), tensor(keys), _longest(queries), _longest(keys), place


def _part(
    starts: list[int], causal: bool, rank: int, world_size: int
) -> tuple[list[int], list[int], slice]:
    each = starts[-1] // world_size
    begin, end = rank * each, (rank + 1) * each
    # Without empty sequences, which have tokens on no rank.
    own = [(a, b) for a, b in itertools.pairwise(starts) if max(a, begin) < min(b, end)]
    if not own:
        return [0], [0], slice(begin, begin)
    queries = [0, *(min(b, end) - begin for _, b in own)]
    first = own[0][0]
    keys = [0, *(b - first for _, b in own)]
    if causal:
        keys[-1] = end - first
    return queries, keys, slice(first, first + keys[-1])


def _longest(starts: list[int]) -> int:
    return max((b - a for a, b in itertools.pairwise(starts)), default=0)


def llama3_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: Deterministic = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Any:
    """Computes attention over packed sequences that are distributed over several ranks.

    Args:
        q: (total_q, nheads, head_dim), the tokens of this rank.
        k: (total_k, nheads_k, head_dim), likewise.
        v: like k.
        cu_seqlens_q: of `llama3_flash_attn_prepare_cu_seqlens`; cu_seqlens_k, max_seqlen_q,
            max_seqlen_k and local_k_slice too.
        cu_seqlens_k: see cu_seqlens_q.
        max_seqlen_q: see cu_seqlens_q.
        max_seqlen_k: see cu_seqlens_q.
        heads_k_stride: KV heads to gather at a time.
        local_k_slice: see cu_seqlens_q.
        dropout_p: has to be 0.0; for the arguments after it see `flash_attn_varlen_func`.

    Returns:
        out (total_q, nheads, head_dim); with return_attn_probs out, softmax_lse and None.

    Raises:
        As `flash_attn_varlen_func`; ArgumentError also if the parts of the ranks don't fit
        together.

    Source:
        llama3_flash_attn_varlen_func of ring-flash-attention.
    """
    groups = find_groups(group, None, None)
    ranks = groups.sequence

    def prepare() -> bool:
        check_rank("q", q, VARLEN)
        for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            check_cu_seqlens(name, starts, None, q.device)
        if not isinstance(local_k_slice, slice) or not isinstance(local_k_slice.start, int):
            given = shown(local_k_slice)
            if isinstance(local_k_slice, slice):
                given = f"slice({shown(local_k_slice.start)}, {shown(local_k_slice.stop)})"
            raise ArgumentTypeError(f"local_k_slice: expected a slice of two ints, got {given}")
        return as_flag("causal", causal)

    causal = checked(groups, (q, k, v), prepare)
    if ranks.size > 1:
        check(ranks, {"the tokens of q": q.shape[0], "causal": int(causal)}, q.device)
    own = [local_k_slice.start + start for start in cu_seqlens_k.tolist()[:-1]]
    # At most one start for each token, and that of a sequence that began on an earlier rank.
    row = torch.full((q.shape[0] + 1,), -1, dtype=torch.int64, device=q.device)
    row[: len(own)] = torch.tensor(own[: len(row)], dtype=torch.int64)
    every = ranks.all_gather(row, "where sequences begin").flatten().tolist()
    starts = sorted({start for start in every if start >= 0} | {q.shape[0] * ranks.size})
    queries, keys, place = _part(starts, causal, ranks.rank, ranks.size)
    found = (cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), local_k_slice)
    if starts[0] != 0 or found != (queries, keys, place):
        error = ArgumentError(
            "cu_seqlens_q, cu_seqlens_k, local_k_slice: expected what "
            "llama3_flash_attn_prepare_cu_seqlens gives each rank for one cu_seqlens, got others"
        )
        if ranks.size > 1:
            report(ranks, error, q.device)
        raise error
    whole = torch.tensor(starts, dtype=torch.int32, device=q.device)
    result = flash_attn_varlen_func(
        q,
        k,
        v,
        whole,
        whole,
        _longest(starts),
        _longest(starts),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        0.0,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        group=group,
        heads_k_stride=heads_k_stride,
    )
    return (*result[:2], None) if return_attn_probs else result


def llama3_flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Computes `llama3_flash_attn_varlen_func` with qkv (total, 3, nheads, head_dim)."""
    check_packed("qkv", qkv, "(total tokens, 3, nheads, head_dim)", kwargs)
    q, k, v = qkv.unbind(1)
    return llama3_flash_attn_varlen_func(q, k, v, *args, **kwargs)


def llama3_flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Computes `llama3_flash_attn_varlen_func` with kv (total, 2, nheads_k, head_dim)."""
    check_packed("kv", kv, "(total tokens, 2, nheads_k, head_dim)", kwargs)
    k, v = kv.unbind(1)
    return llama3_flash_attn_varlen_func(q, k, v, *args, **kwargs)
