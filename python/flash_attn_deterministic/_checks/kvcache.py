"""Checks of a cache of keys and values, and of keys and values to append."""

from __future__ import annotations

from typing import Any

import torch

from .._ops.arguments import Scores
from ..errors import ArgumentError
from .describe import shown
from .numbers import check_int, require
from .paged import check_block_table, check_no_leftpad, check_page_size
from .tensors import (
    DENSE,
    PAGED,
    Names,
    check_alike,
    check_batch,
    check_heads,
    check_int32,
    check_rank,
    check_shape,
)

_ROTARY_MULTIPLE = 16
_ROW_MULTIPLE, _ROW_BYTES = 8, 16
_NAMES = Names("q", "k_cache", "v_cache")


def check_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_batch_idx: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> int:
    """Checks q and the cache.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16.
        k_cache: (batch_cache, seqlen_cache, nheads_k, head_dim), or with block_table (num_blocks,
            page_block_size, nheads_k, head_dim); like q.
        v_cache: like k_cache.
        cache_batch_idx: (batch,), int32, or None.
        block_table: (batch, max_num_blocks_per_seq), int32, or None.

    Returns:
        Tokens that the cache can hold for one sequence.

    Raises:
        ArgumentTypeError: a wrong type; DtypeError: a wrong dtype.
        ArgumentError: a wrong shape, stride or device, or both cache_batch_idx and block_table.
        UnsupportedDeviceError: neither on the CPU nor on a CUDA device.
    """
    layout = DENSE if block_table is None else PAGED
    check_rank("q", q, DENSE)
    check_rank("k_cache", k_cache, layout)
    check_rank("v_cache", v_cache, layout)
    check_alike(q, (("k_cache", k_cache), ("v_cache", v_cache)))
    batch, _, _, head_dim = q.shape
    check_batch("q", q, batch)
    check_heads(q, k_cache, _NAMES)
    if k_cache.shape[3] != head_dim:
        raise ArgumentError(
            f"k_cache: expected a head_dim of {head_dim}, that of q, got {k_cache.shape[3]}"
        )
    check_shape("v_cache", v_cache, tuple(k_cache.shape), "the shape of k_cache")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        # No copy is made: the cache is written in place.
        if cache.stride(3) != 1:
            raise ArgumentError(
                f"{name}: expected a contiguous last dimension, got strides {cache.stride()}"
            )
    if block_table is not None:
        check_block_table(block_table, batch, q.device)
        check_page_size("k_cache", k_cache.shape[1])
        if cache_batch_idx is not None:
            raise ArgumentError(
                "cache_batch_idx: expected None together with block_table; pick its rows with "
                "block_table[cache_batch_idx]"
            )
        return block_table.shape[1] * k_cache.shape[1]
    if cache_batch_idx is not None:
        check_int32("cache_batch_idx", cache_batch_idx, (batch,), "(batch,)", q.device)
    elif k_cache.shape[0] < batch:
        raise ArgumentError(
            f"k_cache: expected room for the {batch} sequences of q, got shape "
            f"{tuple(k_cache.shape)}; name their places with cache_batch_idx"
        )
    return k_cache.shape[1]


def check_rows_aligned(name: str, cache: torch.Tensor) -> None:
    """Checks that rows start at multiples of 16 bytes: CUDA kernels load 16 bytes at a time.

    Skipped while torch.compile traces and for tensors without data: the op checks again.

    Args:
        name: of the argument.
        cache: as in `check_cache`, float16 or bfloat16, with a head_dim that is a multiple of 8.

    Raises:
        ArgumentError: a row does not start at a multiple of 16 bytes.
    """
    if torch.compiler.is_compiling() or type(cache) not in (torch.Tensor, torch.nn.Parameter):
        return
    rule = "expected rows that start at multiples of 16 bytes on a CUDA device"
    # The stride of a dimension of size 1 is never used.
    for size, stride in zip(cache.shape[:3], cache.stride()[:3], strict=True):
        if size != 1 and stride % _ROW_MULTIPLE:
            raise ArgumentError(
                f"{name}: {rule}, so strides that are multiples of {_ROW_MULTIPLE} elements, got "
                f"strides {cache.stride()}"
            )
    if cache.data_ptr() % _ROW_BYTES:
        raise ArgumentError(
            f"{name}: {rule}, got a first row {cache.data_ptr() % _ROW_BYTES} bytes after a "
            f"multiple (storage_offset {cache.storage_offset()})"
        )


def check_new(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    capacity: int,
) -> int:
    """Checks keys and values to append.

    Args:
        q: (batch, seqlen_q, nheads, head_dim).
        k_cache: as in `check_cache`.
        k: (batch, seqlen_new, nheads_k, head_dim), like q, or None.
        v: like k.
        cache_seqlens: of the call; required with k and v.
        capacity: tokens that the cache can hold for one sequence.

    Returns:
        seqlen_new, 0 without k.

    Raises:
        ArgumentTypeError: a wrong type; DtypeError: a wrong dtype.
        ArgumentError: a wrong shape or device, one of k, v and cache_seqlens is missing, or more
            tokens than the cache can hold.
    """
    if k is None or v is None:
        if k is not None or v is not None:
            name, other = ("v", "k") if v is None else ("k", "v")
            raise ArgumentError(f"{name}: expected a tensor together with {other}, got None")
        return 0
    for name, tensor in (("k", k), ("v", v)):
        check_rank(name, tensor, DENSE)
    check_alike(q, (("k", k), ("v", v)))
    shape = (q.shape[0], k.shape[1], k_cache.shape[2], q.shape[3])
    check_shape("k", k, shape, "(batch, seqlen_new, nheads_k, head_dim) of q and k_cache")
    check_shape("v", v, shape, "the shape of k")
    if cache_seqlens is None:
        raise ArgumentError(
            "cache_seqlens: expected the lengths at which to append k and v, got None"
        )
    if k.shape[1] > capacity:
        raise ArgumentError(
            f"k: expected at most the {capacity} tokens that the cache holds for a sequence, got "
            f"{k.shape[1]}"
        )
    return k.shape[1]


def check_cache_seqlens(
    cache_seqlens: Any, batch: int, seqlen_new: int, capacity: int, device: torch.device
) -> int | torch.Tensor | None:
    """Checks lengths of cached sequences, and returns them; those in a tensor are not read.

    Raises:
        ArgumentTypeError: neither an int nor a tensor; DtypeError: not torch.int32.
        ArgumentError: a wrong shape or device, or an int that the cache has no room for.
    """
    if cache_seqlens is None:
        return None
    if isinstance(cache_seqlens, torch.Tensor):
        check_int32("cache_seqlens", cache_seqlens, (batch,), "(batch,)", device)
        return cache_seqlens
    length = check_int("cache_seqlens", cache_seqlens, "an int, a torch.Tensor or None")

    def message() -> str:
        return (
            f"cache_seqlens: expected 0 to {capacity - seqlen_new}, the {capacity} tokens of the "
            f"cache less {seqlen_new} new ones, got {shown(length)}"
        )

    require(length >= 0, message)
    require(length <= capacity - seqlen_new, message)
    return length


def check_leftpad(
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    batch: int,
    device: torch.device,
) -> None:
    """Checks where cached sequences begin: int32, (batch,).

    Raises:
        ArgumentTypeError: not a tensor; DtypeError: not torch.int32.
        ArgumentError: a wrong shape or device, or together with block_table.
    """
    if block_table is not None:
        check_no_leftpad("cache_leftpad", cache_leftpad)
    if cache_leftpad is not None:
        check_int32("cache_leftpad", cache_leftpad, (batch,), "(batch,)", device)


def check_rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    capacity: int,
    scores: Scores,
) -> None:
    """Checks the tables of a rotary embedding.

    Args:
        q: (batch, seqlen_q, nheads, head_dim).
        k: keys to append; required for a rotation.
        rotary_cos: (seqlen_ro, rotary_dim / 2), like q, or None.
        rotary_sin: like rotary_cos.
        cache_seqlens: of the call, checked.
        capacity: tokens that the cache can hold for one sequence, at most seqlen_ro.
        scores: of the call.

    Raises:
        ArgumentTypeError: a wrong type; DtypeError: a wrong dtype.
        ArgumentError: a wrong shape or device, or one of k, rotary_cos and rotary_sin is missing;
            or cache_seqlens is an int, and a query lies beyond the tables.
    """
    if rotary_cos is None or rotary_sin is None:
        if rotary_cos is not None or rotary_sin is not None:
            pair = ("rotary_sin", "rotary_cos")
            name, other = pair if rotary_sin is None else pair[::-1]
            raise ArgumentError(f"{name}: expected a tensor together with {other}, got None")
        return
    if k is None:
        raise ArgumentError(
            "rotary_cos: expected None without k and v; rotation is for tokens that are appended"
        )
    for name, tensor in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        check_rank(name, tensor, "(seqlen_ro, rotary_dim / 2)")
    check_alike(q, (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)))
    seqlen_ro, half = rotary_cos.shape
    rotary_dim = 2 * half
    if rotary_dim == 0 or rotary_dim % _ROTARY_MULTIPLE or rotary_dim > q.shape[3]:
        raise ArgumentError(
            f"rotary_cos: expected a rotary_dim that is a multiple of {_ROTARY_MULTIPLE} and at "
            f"most the head_dim {q.shape[3]}, got {rotary_dim} (shape {tuple(rotary_cos.shape)})"
        )
    if seqlen_ro < capacity:
        raise ArgumentError(
            f"rotary_cos: expected a seqlen_ro of at least the {capacity} tokens that the cache "
            f"holds for a sequence, got shape {tuple(rotary_cos.shape)}"
        )
    check_shape("rotary_sin", rotary_sin, (seqlen_ro, half), "the shape of rotary_cos")
    if isinstance(cache_seqlens, int):
        check_rotated_queries(cache_seqlens + rotated_positions(q, scores), seqlen_ro)


def rotated_positions(q: torch.Tensor, scores: Scores) -> int:
    """Returns how many rotary positions the queries of a sequence have.

    Query i is at cache_seqlens + i with causal or a window, otherwise all are at cache_seqlens.
    """
    advance = scores.window_left >= 0 or scores.window_right >= 0
    return q.shape[1] if advance else min(q.shape[1], 1)


def check_rotated_queries(end: int, seqlen_ro: int, where: str = "") -> None:
    """Checks that the rotary tables reach to position `end`, where the queries of a sequence end.

    With more queries than new keys that may be beyond the capacity of the cache.

    Raises:
        ArgumentError: they are not.
    """
    require(
        end <= seqlen_ro,
        lambda: (
            f"rotary_cos: expected a seqlen_ro of at least {end}, because the last query "
            f"has position {end - 1}{where}, got {seqlen_ro}"
        ),
    )
