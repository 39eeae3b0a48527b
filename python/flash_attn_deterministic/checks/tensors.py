"""One tensor of a call, or two beside each other: type, layout, dtype, device, shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, ArgumentTypeError, DtypeError, UnsupportedDeviceError
from .describe import type_name
from .kernels import DTYPE_NAMES

MAX_HEAD_DIM = 256
LATENT = (576, 512)  # columns of a row of a latent cache, and how many of them are the values
FP8 = torch.float8_e4m3fn
DENSE = "(batch, seqlen, nheads, head_dim)"
VARLEN = "(total tokens, nheads, head_dim)"
PAGED = "(num_blocks, page_block_size, nheads_k, head_dim)"
PACKED = {  # (parts, whether sequences are packed): the layout of qkv or kv
    (3, False): "(batch, seqlen, 3, nheads, head_dim)",
    (2, False): "(batch, seqlen_k, 2, nheads_k, head_dim)",
    (3, True): "(total tokens, 3, nheads, head_dim)",
    (2, True): "(total tokens, 2, nheads_k, head_dim)",
}
PAGE_MULTIPLE = 16


class Names(NamedTuple):
    """What the caller calls the arguments; parts of one tensor share its name."""

    q: str = "q"
    k: str = "k"
    v: str = "v"
    cu_seqlens_q: str = "cu_seqlens_q"
    cu_seqlens_k: str = "cu_seqlens_k"
    max_seqlen_q: str = "max_seqlen_q"
    max_seqlen_k: str = "max_seqlen_k"


NAMES = Names()
NAMES_KV = Names(k="kv", v="kv")
NAMES_CACHE = Names(k="k_cache", v="v_cache")
NAMES_QKV = Names("qkv", "qkv", "qkv", "cu_seqlens", "cu_seqlens", "max_seqlen", "max_seqlen")


def check_tensor(name: str, tensor: Any, expected: str = "a torch.Tensor") -> None:
    """Checks that an argument is an ordinary tensor, neither nested nor sparse."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{name}: expected {expected}, got {type_name(tensor)}")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind, advice = "one", f"convert it with {name}.to_dense()"
        if tensor.is_nested:
            kind = "a nested tensor"
            advice = "pass its values() and offsets() to flash_attn_varlen_func"
        raise ArgumentError(
            f"{name}: expected a tensor of layout torch.strided, got {kind} of layout "
            f"{tensor.layout}; {advice}"
        )


def check_dtype(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, conversion: str, expected: str = ""
) -> None:
    """Checks the dtype of a tensor that is not like q; `expected` names all that callers pass."""
    if tensor.dtype != dtype:
        raise DtypeError(
            f"{name}: expected dtype {expected or dtype}, got {tensor.dtype}; convert it with "
            f"{name}.{conversion}"
        )


def check_rank(name: str, tensor: Any, layout: str) -> None:
    """Checks that an argument is a tensor of as many dimensions as its layout names."""
    check_tensor(name, tensor)
    rank = layout.count(",") + 1
    if tensor.dim() != rank:
        raise ArgumentError(
            f"{name}: expected {rank} dimension{'s' * (rank > 1)} {layout}, got shape "
            f"{tuple(tensor.shape)}"
        )


def check_packed(name: str, tensor: Any, layout: str) -> None:
    """Checks a tensor that holds several of q, k and v in its third dimension from the end."""
    check_rank(name, tensor, layout)
    parts = 3 if ", 3," in layout else 2
    if tensor.shape[-3] != parts:
        raise ArgumentError(
            f"{name}: expected shape {layout}, with {parts} in its third dimension from the end, "
            f"got {tuple(tensor.shape)}"
        )


def check_alike(
    q: torch.Tensor, others: tuple[tuple[str, torch.Tensor], ...], name_q: str = "q"
) -> None:
    """Checks the dtype and device of q, and that the others have the same."""
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


def is_fp8(tensor: torch.Tensor) -> bool:
    """Returns whether a cache is kept in 8 bits."""
    return tensor.dtype == FP8


def cached_values(k_cache: torch.Tensor, v_cache: torch.Tensor | None) -> torch.Tensor:
    """Returns the values of a cache; a latent one, without v_cache, holds them in its keys."""
    return k_cache[..., : LATENT[1]] if v_cache is None else v_cache


def capacity(k_cache: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """Returns how many tokens a cache has room for in a sequence."""
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])


def check_cached(
    q: torch.Tensor, k: tuple[str, torch.Tensor], v: tuple[str, torch.Tensor], name_q: str
) -> None:
    """Checks dtypes and devices of a cache: both parts like q, or both in 8 bits."""
    if not is_fp8(k[1]):
        check_alike(q, (k, v), name_q)
        return
    check_alike(q, (), name_q)
    if not is_fp8(v[1]):
        raise DtypeError(f"{v[0]}: expected {FP8}, the dtype of {k[0]}, got {v[1].dtype}")
    for name, tensor in (k, v):
        check_device(name, tensor, q.device, name_q)


def check_device(name: str, tensor: torch.Tensor, device: torch.device, name_q: str = "q") -> None:
    """Checks that a tensor is on q's device."""
    if tensor.device != device:
        raise ArgumentError(
            f"{name}: expected a tensor on {device}, the device of {name_q}, got one on "
            f"{tensor.device}; move it with {name}.to({name_q}.device)"
        )


def check_batch(name: str, tensor: torch.Tensor, batch: int) -> None:
    """Checks that there is at least one sequence."""
    if batch < 1:
        raise ArgumentError(
            f"{name}: expected a batch of at least 1, got shape {tuple(tensor.shape)}"
        )


def check_head_dim(name: str, tensor: torch.Tensor, of_cache: bool = False) -> None:
    """Checks that kernels take the head_dim of a tensor."""
    head_dim = tensor.shape[-1]
    if head_dim == 0 or head_dim > MAX_HEAD_DIM:
        also = f", or {LATENT[0]} with v_cache=None" if of_cache and head_dim == LATENT[0] else ""
        raise ArgumentError(
            f"{name}: expected a head_dim of 1 to {MAX_HEAD_DIM}{also}, got {head_dim}"
        )


def check_heads(q: torch.Tensor, k: torch.Tensor, names: Names, latent: bool) -> None:
    """Checks head_dim of q, and that nheads_k divides nheads."""
    nheads, nheads_k = q.shape[-2], k.shape[-2]
    if not latent:
        check_head_dim(names.q, q, names is NAMES_CACHE)
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
    # As many tokens in k as in q, and no more heads than tokens: its number of heads is wrong.
    if heads == heads_k and heads >= q.shape[-2] > k.shape[-2]:
        return ""
    if heads % heads_k == 0:
        both = names.q if names.q == names.k else f"{names.q} {tuple(q.shape)} and {names.k}"
        advice = f"{_swapped(names.q, q)} and the same of the others"
        return f"; {both} {tuple(k.shape)} look transposed, with heads before tokens: pass {advice}"
    return _looks_transposed(names.k, k) if q.shape[-2] % heads_k == 0 else ""


def _swapped(name: str, tensor: torch.Tensor) -> str:
    return f"{name}.transpose{tuple(range(tensor.dim()))[-3:-1]}"


def _looks_transposed(name: str, tensor: torch.Tensor) -> str:
    return (
        f"; {name} {tuple(tensor.shape)} looks transposed, with heads before tokens: pass "
        f"{_swapped(name, tensor)}"
    )


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], what: str) -> None:
    """Checks a shape; `what` says where the expected one comes from."""
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

    A size of -1 and a device of None stand for any; layout names the dimensions: "(batch,)".
    """
    check_tensor(name, tensor)
    check_dtype(name, tensor, torch.int32, "to(torch.int32)")
    same_rank = tensor.dim() == len(shape)
    if not same_rank or any(n not in (-1, m) for n, m in zip(shape, tensor.shape, strict=True)):
        sizes = ", ".join("any" if n == -1 else str(n) for n in shape)
        comma = "," * (len(shape) == 1)
        raise ArgumentError(
            f"{name}: expected shape {layout} = ({sizes}{comma}), got {tuple(tensor.shape)}"
        )
    if device is not None:
        check_device(name, tensor, device)


def check_cu_seqlens(
    name: str, cu_seqlens: torch.Tensor, batch: int | None, device: torch.device | None
) -> None:
    """Checks cumulative lengths, (batch + 1,); a batch of None: any of at least 1."""
    check_int32(name, cu_seqlens, (-1,) if batch is None else (batch + 1,), "(batch + 1,)", device)
    check_batch(name, cu_seqlens, cu_seqlens.shape[0] - 1)


def check_page_size(name: str, page_block_size: int) -> None:
    """Checks that a page holds a multiple of 16 tokens."""
    if page_block_size == 0 or page_block_size % PAGE_MULTIPLE:
        raise ArgumentError(
            f"{name}: expected a page_block_size that is a multiple of {PAGE_MULTIPLE}, got "
            f"{page_block_size}"
        )


def check_like(name: str, tensor: Any, like_name: str, like: torch.Tensor) -> None:
    """Checks that a tensor has the dtype, shape and device of another one."""
    check_is(name, tensor, like.dtype, like.shape, like.device, f"a tensor like {like_name}, ")


def check_is(
    name: str,
    tensor: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    what: str = "",
) -> None:
    """Checks that a tensor is as a forward returned it."""
    check_tensor(name, tensor)
    if (tensor.dtype, tensor.shape, tensor.device) != (dtype, shape, device):
        raise ArgumentError(
            f"{name}: expected {what}{dtype} {tuple(shape)} on {device}, got {tensor.dtype} "
            f"{tuple(tensor.shape)} on {tensor.device}"
        )
