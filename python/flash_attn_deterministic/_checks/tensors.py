"""Checks of q, k and v, and of other tensors by dtype, shape and device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, ArgumentTypeError, DtypeError, UnsupportedDeviceError
from .describe import type_name
from .kernels import DTYPE_NAMES

MAX_HEAD_DIM = 256
DENSE = "(batch, seqlen, nheads, head_dim)"
VARLEN = "(total tokens, nheads, head_dim)"
PAGED = "(num_blocks, page_block_size, nheads_k, head_dim)"


class Names(NamedTuple):
    """The names of q, k and v in messages; parts of one tensor share its name."""

    q: str = "q"
    k: str = "k"
    v: str = "v"


QKV = Names()


def check_rank(name: str, tensor: Any, layout: str) -> None:
    """Checks that an argument is a tensor of as many dimensions as its layout names.

    Raises:
        ArgumentTypeError: not a tensor.
        ArgumentError: nested, sparse or of another layout than torch.strided, or another number of
            dimensions.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{name}: expected a torch.Tensor, got {type_name(tensor)}")
    _check_strided(name, tensor)
    rank = layout.count(",") + 1
    if tensor.dim() != rank:
        raise ArgumentError(
            f"{name}: expected {rank} dimension{'s' * (rank > 1)} {layout}, got shape "
            f"{tuple(tensor.shape)}"
        )


def _check_strided(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else "one"
        advice = (
            "pass its values() and offsets() to flash_attn_varlen_func"
            if tensor.is_nested
            else f"convert it with {name}.to_dense()"
        )
        raise ArgumentError(
            f"{name}: expected a tensor of layout torch.strided, got {kind} of layout "
            f"{tensor.layout}; {advice}"
        )


def check_packed(name: str, tensor: Any, parts: int, layout: str) -> None:
    """Checks a tensor that holds several of q, k and v in its third dimension from the end.

    Raises:
        ArgumentTypeError: not a tensor.
        ArgumentError: a wrong shape.
    """
    check_rank(name, tensor, layout)
    if tensor.shape[-3] != parts:
        raise ArgumentError(
            f"{name}: expected shape {layout}, with {parts} in its third dimension from the end, "
            f"got {tuple(tensor.shape)}"
        )


def check_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: Names = QKV) -> None:
    """Checks types, dtypes, devices and shapes of q, k and v.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16.
        k: (batch, seqlen_k, nheads_k, head_dim), like q.
        v: like k.
        names: of the arguments.

    Raises:
        ArgumentTypeError: not a tensor.
        DtypeError: a wrong dtype.
        ArgumentError: a wrong shape, or tensors on several devices.
        UnsupportedDeviceError: neither on the CPU nor on a CUDA device.
    """
    for name, tensor in zip(names, (q, k, v), strict=True):
        check_rank(name, tensor, DENSE)
    check_alike(q, ((names.k, k), (names.v, v)), names.q)
    batch, _, _, head_dim = q.shape
    seqlen_k, nheads_k = k.shape[1:3]
    check_batch(names.q, q, batch)
    check_heads(q, k, names)
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ArgumentError(
            f"{names.k}: expected shape ({batch}, seqlen_k, nheads_k, {head_dim}), with the batch "
            f"and head_dim of {names.q}, got {tuple(k.shape)}"
        )
    check_shape(names.v, v, (batch, seqlen_k, nheads_k, head_dim), f"the shape of {names.k}")


def check_alike(
    q: torch.Tensor, others: tuple[tuple[str, torch.Tensor], ...], name_q: str = "q"
) -> None:
    """Checks dtypes and devices.

    Args:
        q: sets the dtype and the device.
        others: names and tensors.
        name_q: name of q.

    Raises:
        DtypeError: q is neither float16 nor bfloat16, or another tensor's dtype differs.
        ArgumentError: tensors on several devices.
        UnsupportedDeviceError: q is neither on the CPU nor on a CUDA device.
    """
    if q.dtype not in DTYPE_NAMES:
        raise DtypeError(
            f"{name_q}: expected dtype torch.float16 or torch.bfloat16, got {q.dtype}; convert q, "
            "k and v with .to(torch.bfloat16)"
        )
    for name, tensor in others:
        if tensor.dtype != q.dtype:
            raise DtypeError(
                f"{name}: expected {q.dtype}, the dtype of {name_q}, got {tensor.dtype}; convert "
                f"it with {name}.to({name_q}.dtype)"
            )
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise UnsupportedDeviceError(
            f"{name_q}: expected a tensor on the CPU or on a CUDA device, got one on {q.device}"
        )
    for name, tensor in others:
        check_device(name, tensor, q.device, name_q)


def check_device(name: str, tensor: torch.Tensor, device: torch.device, name_q: str = "q") -> None:
    """Checks that a tensor is on q's device.

    Raises:
        ArgumentError: it is elsewhere.
    """
    if tensor.device != device:
        raise ArgumentError(
            f"{name}: expected a tensor on {device}, the device of {name_q}, got one on "
            f"{tensor.device}; move it with {name}.to({name_q}.device)"
        )


def check_batch(name: str, tensor: torch.Tensor, batch: int) -> None:
    """Checks that there is at least one sequence.

    Raises:
        ArgumentError: there is none.
    """
    if batch < 1:
        raise ArgumentError(
            f"{name}: expected a batch of at least 1, got shape {tuple(tensor.shape)}"
        )


def check_heads(q: torch.Tensor, k: torch.Tensor, names: Names = QKV) -> None:
    """Checks head_dim and the numbers of heads, the last two dimensions of q and k.

    Raises:
        ArgumentError: head_dim is not 1 to 256, or nheads_k does not divide nheads.
    """
    nheads, head_dim = q.shape[-2:]
    nheads_k = k.shape[-2]
    if head_dim == 0 or head_dim > MAX_HEAD_DIM:
        raise ArgumentError(
            f"{names.q}: expected a head_dim of 1 to {MAX_HEAD_DIM}, got {head_dim}"
        )
    if nheads == 0:
        raise ArgumentError(f"{names.q}: expected at least 1 head, got shape {tuple(q.shape)}")
    if nheads_k == 0 or nheads % nheads_k != 0:
        raise ArgumentError(
            f"{names.k}: expected a number of heads that divides the {nheads} heads of {names.q}, "
            f"got {nheads_k}{_transposed(q, k, names)}"
        )


def _transposed(q: torch.Tensor, k: torch.Tensor, names: Names) -> str:
    """Returns advice for q and k with heads before tokens, as in torch's attention; else ""."""
    heads, heads_k = q.shape[-3], k.shape[-3]
    if q.dim() != k.dim() or heads_k == 0:
        return ""
    if heads % heads_k == 0:
        both = names.q if names.q == names.k else f"{names.q} {tuple(q.shape)} and {names.k}"
        advice = f"{_swapped(names.q, q)} and the same of the others"
        return f"; {both} {tuple(k.shape)} look transposed, with heads before tokens: pass {advice}"
    if q.shape[-2] % heads_k == 0:
        return _looks_transposed(names.k, k)
    return ""


def _swapped(name: str, tensor: torch.Tensor) -> str:
    return f"{name}.transpose{tuple(range(tensor.dim()))[-3:-1]}"


def _looks_transposed(name: str, tensor: torch.Tensor) -> str:
    return (
        f"; {name} {tuple(tensor.shape)} looks transposed, with heads before tokens: pass "
        f"{_swapped(name, tensor)}"
    )


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], what: str) -> None:
    """Checks one shape.

    Args:
        name: of the argument.
        tensor: the argument.
        shape: expected.
        what: origin of that shape, for the message.

    Raises:
        ArgumentError: the tensor has another shape.
    """
    if tensor.shape != shape:
        swapped = tensor.dim() > 2 and tensor.transpose(-3, -2).shape == shape
        advice = _looks_transposed(name, tensor) if swapped else ""
        raise ArgumentError(
            f"{name}: expected shape {shape}, {what}, got {tuple(tensor.shape)}{advice}"
        )


def check_int32(
    name: str, tensor: Any, shape: tuple[int, ...], layout: str, device: torch.device | None
) -> None:
    """Checks a tensor of lengths or indices.

    Args:
        name: of the argument.
        tensor: the argument.
        shape: expected; -1: any size.
        layout: names of its dimensions, such as "(batch,)".
        device: of q; None: any.

    Raises:
        ArgumentTypeError: not a tensor; DtypeError: not torch.int32.
        ArgumentError: another shape or device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{name}: expected a torch.Tensor, got {type_name(tensor)}")
    _check_strided(name, tensor)
    if tensor.dtype != torch.int32:
        raise DtypeError(
            f"{name}: expected dtype torch.int32, got {tensor.dtype}; convert it with "
            f"{name}.to(torch.int32)"
        )
    same_rank = tensor.dim() == len(shape)
    if not same_rank or any(n not in (-1, m) for n, m in zip(shape, tensor.shape, strict=True)):
        sizes = ", ".join("any" if n == -1 else str(n) for n in shape)
        comma = "," * (len(shape) == 1)
        raise ArgumentError(
            f"{name}: expected shape {layout} = ({sizes}{comma}), got {tuple(tensor.shape)}"
        )
    if device is not None:
        check_device(name, tensor, device)


def check_alibi(alibi_slopes: Any, batch: int, nheads: int, device: torch.device) -> None:
    """Checks ALiBi slopes: float32, (nheads,) or (batch, nheads).

    Raises:
        ArgumentTypeError: not a tensor; DtypeError: not torch.float32.
        ArgumentError: another shape or device.
    """
    if alibi_slopes is None:
        return
    if not isinstance(alibi_slopes, torch.Tensor):
        raise ArgumentTypeError(
            f"alibi_slopes: expected a torch.Tensor or None, got {type_name(alibi_slopes)}"
        )
    _check_strided("alibi_slopes", alibi_slopes)
    if alibi_slopes.dtype != torch.float32:
        raise DtypeError(
            f"alibi_slopes: expected dtype torch.float32, got {alibi_slopes.dtype}; convert it "
            "with alibi_slopes.float()"
        )
    # Not `not in`: torch.compile finds no equal shapes there if nheads is symbolic.
    if alibi_slopes.shape != (nheads,) and alibi_slopes.shape != (batch, nheads):
        raise ArgumentError(
            f"alibi_slopes: expected shape (nheads,) = ({nheads},) or (batch, nheads) = "
            f"({batch}, {nheads}), got {tuple(alibi_slopes.shape)}"
        )
    check_device("alibi_slopes", alibi_slopes, device)
