"""FlashAttention-2 and -4, and FlashInfer, of packages that this machine has."""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import torch
from torch import Tensor

from ..errors import UnavailableError
from . import baseline
from .attention import Function, Packed
from .interface import arguments, call, imported

BASELINE = "FA2_BASELINE"  # path of the library that `nox -s baseline` builds
_WORKSPACE_BYTES = 2**31  # what SGLang gives it for splits of one size
_PAGE = 16


def flash_attn_2(deterministic: bool = False) -> Function:
    """FlashAttention-2, or its kernels alone where BASELINE names them."""
    library = os.environ.get(BASELINE)
    if library:
        return baseline.load(library, deterministic)
    module = imported("flash_attn")
    if not hasattr(module, "flash_attn_func"):
        # FlashAttention-4 installs a package flash_attn without files of its own, in which only
        # flash_attn.cute lies.
        where = ", ".join(getattr(module, "__path__", ()))
        raise UnavailableError(
            f"flash_attn is a namespace package of another project here ({where}): it hides "
            "FlashAttention-2, or that is not installed; take its folder off the path"
        )
    return _called(module, deterministic)


def flash_attn_4(deterministic: bool = False) -> Function:
    """FlashAttention-4, which compiles a kernel at its first call."""
    return _called(imported("flash_attn.cute"), deterministic)


def _called(module: Any, deterministic: bool) -> Function:
    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return call(module, q, k, v, arguments(options) | {"deterministic": deterministic})

    return attend


def flashinfer(split_size: int = 0) -> Function:
    """FlashInfer over pages; 0: splits of its choice, which depend on the batch.

    It plans by lengths and pages, as servers let it once for all layers: outside of what is timed.
    """
    module = imported("flashinfer")

    @functools.cache
    def workspace(device: torch.device) -> Tensor:
        return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    @functools.lru_cache(maxsize=64)
    def dense(batch: int, seqlen_q: int, seqlen_k: int, device: str) -> tuple[Packed, Tensor]:
        if seqlen_k % _PAGE:
            raise UnavailableError(f"expected a multiple of {_PAGE} keys, got {seqlen_k}")
        pages = torch.arange(batch * seqlen_k // _PAGE, dtype=torch.int32, device=device)
        return Packed.of([seqlen_q] * batch, [seqlen_k] * batch, device), pages.view(batch, -1)

    @functools.lru_cache(maxsize=64)
    def of_lengths(seqlens_k: Tensor, seqlen_q: int) -> Packed:
        lengths = seqlens_k.tolist()
        return Packed.of([seqlen_q] * len(lengths), lengths, str(seqlens_k.device))

    @functools.lru_cache(maxsize=256)  # more than a decode has caches in turns
    def planned(
        packed: Packed,
        block_table: Tensor,
        heads: tuple[int, ...],
        page_size: int,
        dtype: torch.dtype,
        causal: bool,
        scale: float | None,
    ) -> Any:
        device, lengths = block_table.device, packed.seqused_k.tolist()
        counts = [-(-length // page_size) for length in lengths]
        indices = torch.cat([own[:count] for own, count in zip(block_table, counts, strict=True)])
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        last = torch.tensor([(n - 1) % page_size + 1 for n in lengths], dtype=torch.int32)
        pages = starts.to(device), indices, last.to(device), *heads, page_size
        options = {"sm_scale": scale, "q_data_type": dtype, "kv_data_type": dtype}
        if split_size:
            options["fixed_split_size"] = split_size // page_size  # in pages
        if packed.max_seqlen_q == 1:
            decode = module.BatchDecodeWithPagedKVCacheWrapper
            wrapper = decode(workspace(device), "NHD", use_tensor_cores=True)
            wrapper.plan(*pages, **options)
        else:
            prefill = module.BatchPrefillWithPagedKVCacheWrapper
            # Its kernels for Hopper take no such size.
            wrapper = prefill(workspace(device), "NHD", backend="fa2" if split_size else "auto")
            wrapper.plan(packed.cu_seqlens_q, *pages, causal=causal, **options)
        return wrapper

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        packed: Packed | None = None,
        block_table: Tensor | None = None,
        seqlens_k: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        rows, heads = q.reshape(-1, *q.shape[-2:]), (q.shape[-2], k.shape[-2], q.shape[-1])
        if block_table is None:
            if packed is not None or seqlens_k is not None:
                raise UnavailableError("flashinfer takes lengths of keys in pages alone")
            packed, block_table = dense(*q.shape[:2], k.shape[1], str(q.device))
            k, v = (t.reshape(-1, _PAGE, *t.shape[2:]) for t in (k, v))
        elif packed is None:
            if seqlens_k is None:
                raise UnavailableError("flashinfer takes pages with lengths of keys alone")
            packed = of_lengths(seqlens_k, q.shape[1])
        plan = planned(packed, block_table, heads, k.shape[1], q.dtype, causal, scale)
        out: Tensor = plan.run(rows, (k, v))
        return out.view(q.shape)

    return attend
