"""Functions with the signatures of ring-flash-attn's llama3 and zigzag_ring functions.

    from flash_attn_deterministic.distributed.ring_flash_attn import (
        llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func)

llama3: packed tokens in the contiguous order, where each rank passes the lengths of its own part.
zigzag_ring: the zigzag order, where each rank passes its part of each length.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from ..checks.describe import shown
from ..checks.numbers import as_flag, as_int
from ..checks.tensors import PACKED, VARLEN, check_cu_seqlens, check_rank
from ..checks.values import check_starts
from ..errors import ArgumentError, ArgumentTypeError
from ..interface.call import WithProbs
from ..types import Deterministic
from .api import flash_attn_func, flash_attn_varlen_func
from .calls import of_kv, of_qkv, reported
from .layout import CONTIGUOUS, ZIGZAG
from .ops import kept
from .ranks import Ranks, find_group

# For arguments in tuples, which type checkers don't count.
_dense: Any = flash_attn_func
_packed: Any = flash_attn_varlen_func
Prepared = tuple[torch.Tensor, torch.Tensor, int, int, slice]
Window = tuple[int, int]


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
    own_q, own_k = (
        torch.tensor(one, dtype=torch.int32, device=cu_seqlens.device) for one in (queries, keys)
    )
    kept(own_k, (CONTIGUOUS, world_size), lambda: cu_seqlens)
    return own_q, own_k, _longest(queries), _longest(keys), place


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


@reported
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
    window_size: Window = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: Deterministic = False,
    return_attn_probs: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """Computes attention over packed sequences that are distributed over several ranks.

    The ranks exchange their lengths in the first call with a cu_seqlens_k that is not the tensor of
    `llama3_flash_attn_prepare_cu_seqlens`, but a copy.

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
    check_rank("q", q, VARLEN)
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_cu_seqlens(name, starts, None, q.device)
    ends: tuple[Any, ...] = ()
    if isinstance(local_k_slice, slice):
        ends = local_k_slice.start, local_k_slice.stop
        ends += () if local_k_slice.step is None else (local_k_slice.step,)
    if len(ends) != 2 or not all(isinstance(end, int) for end in ends):
        given = f"slice({', '.join(map(shown, ends))})" if ends else shown(local_k_slice)
        raise ArgumentTypeError(f"local_k_slice: expected a slice of two ints, got {given}")
    causal = as_flag("causal", causal)
    ranks = Ranks.of(find_group(group, None))
    find: Any = kept
    if torch.compiler.is_compiling():
        # A graph can't hold the exchange: outside of it, what is known is not exchanged again.
        find = torch.compiler.disable(kept)  # type: ignore[no-untyped-call, unused-ignore]
    whole = find(
        cu_seqlens_k,
        (CONTIGUOUS, ranks.size),
        lambda: _joined(q, cu_seqlens_q, cu_seqlens_k, local_k_slice, causal, ranks),
    )
    result = _packed(
        *(q, k, v, whole, whole, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale),
        *(causal, window_size, 0.0, alibi_slopes, deterministic, return_attn_probs),
        group=group,
        heads_k_stride=heads_k_stride,
    )
    return result if isinstance(result, torch.Tensor) else (*result[:2], None)


def _joined(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    place: slice,
    causal: bool,
    ranks: Ranks,
) -> torch.Tensor:
    """Returns cu_seqlens of all ranks, from those of each."""
    own = cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), place.start, place.stop
    every = ranks.agreement.exchange("the ranks' lengths", (q.shape[0], causal, *own))
    tokens = every[0][0]
    starts = {first + start for *_, keys, first, _ in every for start in keys[:-1]}
    found = sorted(starts | {tokens * ranks.size})
    # What all ranks know, all ranks find wrong.
    for rank, told in enumerate(every):
        queries, keys, part = _part(found, causal, rank, ranks.size)
        if found[0] != 0 or told != [tokens, causal, queries, keys, part.start, part.stop]:
            raise ArgumentError(
                "cu_seqlens_q, cu_seqlens_k, local_k_slice: expected what "
                "llama3_flash_attn_prepare_cu_seqlens gives each rank for one cu_seqlens, got "
                f"others on rank {rank}"
            )
    return torch.tensor(found, dtype=torch.int32, device=q.device)


llama3_flash_attn_varlen_qkvpacked_func = of_qkv(llama3_flash_attn_varlen_func, PACKED[3, True])
llama3_flash_attn_varlen_kvpacked_func = of_kv(llama3_flash_attn_varlen_func, PACKED[2, True])


def zigzag_ring_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: Deterministic = False,
    return_attn_probs: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor | WithProbs:
    """Computes `flash_attn_func` in the zigzag order, with the arguments of ring-flash-attn."""
    out: torch.Tensor | WithProbs = _dense(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size, 0.0, alibi_slopes),
        *(deterministic, return_attn_probs),
        group=group,
        order=ZIGZAG,
    )
    return out


zigzag_ring_flash_attn_qkvpacked_func = of_qkv(zigzag_ring_flash_attn_func, PACKED[3, False])
zigzag_ring_flash_attn_kvpacked_func = of_kv(zigzag_ring_flash_attn_func, PACKED[2, False])


@reported
def zigzag_ring_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: Deterministic = False,
    return_attn_probs: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor | WithProbs:
    """Computes `flash_attn_varlen_func` in the zigzag order.

    Args:
        q: (total, nheads, head_dim), the tokens of this rank; k and v likewise.
        k: see q.
        v: see q.
        cu_seqlens: (batch + 1,), int32: of the parts of this rank, the lengths over the ranks.
        max_seqlen: no effect; for the arguments after it see `flash_attn_varlen_func`.

    Source:
        zigzag_ring_flash_attn_varlen_func of ring-flash-attention.
    """
    check_cu_seqlens("cu_seqlens", cu_seqlens, None, None)
    size = Ranks.of(find_group(group, None)).size
    whole = kept(cu_seqlens, (ZIGZAG, size), lambda: cu_seqlens * size)
    out: torch.Tensor | WithProbs = _packed(
        *(q, k, v, whole, whole, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal),
        *(window_size, 0.0, alibi_slopes, deterministic, return_attn_probs),
        group=group,
        order=ZIGZAG,
    )
    return out


zigzag_ring_flash_attn_varlen_qkvpacked_func = of_qkv(
    zigzag_ring_flash_attn_varlen_func, PACKED[3, True]
)
zigzag_ring_flash_attn_varlen_kvpacked_func = of_kv(
    zigzag_ring_flash_attn_varlen_func, PACKED[2, True]
)
