"""Checks of packed sequences of several lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._ops.arguments import Lengths
from ..errors import ArgumentError, UnsupportedError
from .numbers import check_length
from .paged import check_block_table, check_no_leftpad, check_page_size
from .tensors import (
    PAGED,
    VARLEN,
    check_alike,
    check_batch,
    check_heads,
    check_int32,
    check_rank,
    check_shape,
)
from .tensors import Names as TensorNames


class Names(NamedTuple):
    """The names of the arguments in messages; packed ones share a name."""

    q: str = "q"
    k: str = "k"
    v: str = "v"
    cu_seqlens_q: str = "cu_seqlens_q"
    cu_seqlens_k: str = "cu_seqlens_k"
    max_seqlen_q: str = "max_seqlen_q"
    max_seqlen_k: str = "max_seqlen_k"


NAMES = Names()
NAMES_QKV = Names("qkv", "qkv", "qkv", "cu_seqlens", "cu_seqlens", "max_seqlen", "max_seqlen")


def check_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths,
    names: Names = NAMES,
) -> Lengths:
    """Checks q, k and v, and where sequences begin and end.

    Args:
        q: (total_q, nheads, head_dim), float16 or bfloat16.
        k: (total_k, nheads_k, head_dim), like q; paged: (num_blocks, page_block_size, nheads_k,
            head_dim).
        v: like k.
        lengths: the arguments.
        names: of the arguments.

    Returns:
        The lengths, with Python ints.

    Raises:
        ArgumentTypeError: a wrong type.
        DtypeError: a wrong dtype.
        ArgumentError: a wrong shape, tensors on several devices, or leftpad_k together with
            block_table.
        UnsupportedDeviceError: neither on the CPU nor on a CUDA device.
    """
    paged = lengths.block_table is not None
    layout = PAGED if paged else VARLEN
    for name, tensor, expected in (
        (names.q, q, VARLEN),
        (names.k, k, layout),
        (names.v, v, layout),
    ):
        check_rank(name, tensor, expected)
    check_alike(q, ((names.k, k), (names.v, v)), names.q)
    check_heads(q, k, TensorNames(names.q, names.k, names.v))
    head_dim = k.shape[-1]
    if head_dim != q.shape[2]:
        raise ArgumentError(
            f"{names.k}: expected a head_dim of {q.shape[2]}, that of {names.q}, got {head_dim}"
        )
    if paged:
        check_page_size(names.k, k.shape[1])
    check_shape(names.v, v, tuple(k.shape), f"the shape of {names.k}")
    return _check_lengths(lengths, q.device, names)


def check_cu_seqlens(
    name: str, cu_seqlens: torch.Tensor, batch: int | None, device: torch.device | None
) -> None:
    """Checks cumulative lengths: int32, (batch + 1,).

    Args:
        name: of the argument.
        cu_seqlens: the argument.
        batch: number of sequences; None: any, at least 1.
        device: of q; None: any.

    Raises:
        ArgumentTypeError: not a tensor; DtypeError: not torch.int32.
        ArgumentError: another shape or device.
    """
    sizes = (-1,) if batch is None else (batch + 1,)
    check_int32(name, cu_seqlens, sizes, "(batch + 1,)", device)
    check_batch(name, cu_seqlens, cu_seqlens.shape[0] - 1)


def _check_lengths(lengths: Lengths, device: torch.device, names: Names) -> Lengths:
    cu_seqlens_q, cu_seqlens_k, _, _, seqused_k, leftpad_k, block_table = lengths
    check_cu_seqlens(names.cu_seqlens_q, cu_seqlens_q, None, device)
    batch = cu_seqlens_q.shape[0] - 1
    check_cu_seqlens(names.cu_seqlens_k, cu_seqlens_k, batch, device)
    if seqused_k is not None:
        check_int32("seqused_k", seqused_k, (batch,), "(batch,)", device)
    if block_table is not None:
        check_block_table(block_table, batch, device)
        check_no_leftpad("leftpad_k", leftpad_k)
    if leftpad_k is not None:
        check_int32("leftpad_k", leftpad_k, (batch,), "(batch,)", device)
    return with_ints(lengths, names)


def with_ints(lengths: Lengths, names: Names = NAMES) -> Lengths:
    """Returns lengths with Python ints; checks nothing else.

    Raises:
        ArgumentTypeError: max_seqlen_q or max_seqlen_k is no int.
        ArgumentError: one of them is out of range.
    """
    max_seqlen_q = check_length(names.max_seqlen_q, lengths.max_seqlen_q)
    max_seqlen_k = check_length(names.max_seqlen_k, lengths.max_seqlen_k)
    if max_seqlen_q is lengths.max_seqlen_q and max_seqlen_k is lengths.max_seqlen_k:
        return lengths
    return lengths._replace(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)


def check_no_gradient(inputs: tuple[torch.Tensor, ...], lengths: Lengths) -> None:
    """Refuses to compile a call without a backward whose inputs require a gradient.

    torch.compile traces the backward together with the call. Otherwise the backward raises, and the
    forward alone works.

    Raises:
        UnsupportedError: an input requires a gradient, and these lengths have no backward.
    """
    if not torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    name = without_backward(lengths.seqused_k, lengths.leftpad_k, lengths.block_table)
    if name and any(tensor.requires_grad for tensor in inputs):
        raise UnsupportedError(
            f"{name}: there is no backward with it, and q, k or v requires a gradient; call it "
            f"under torch.no_grad(), or pass packed sequences without {name}"
        )


def without_backward(
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> str:
    """Returns the name of a given argument that has no backward; "" if there is none."""
    given = {"seqused_k": seqused_k, "leftpad_k": leftpad_k, "block_table": block_table}
    for name, tensor in given.items():
        if tensor is not None:
            return name
    return ""
