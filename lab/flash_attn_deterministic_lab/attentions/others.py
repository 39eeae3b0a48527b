"""FlashAttention-2 and -4, and FlashInfer, of packages that this machine has."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from ..errors import UnavailableError
from . import baseline
from .attention import Function
from .interface import arguments, call, imported

BASELINE = "FA2_BASELINE"  # path of the library that `nox -s baseline` builds
_WORKSPACE_BYTES = 256 * 2**20
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


def flashinfer() -> Function:
    """FlashInfer: decode from pages, the rest from packed sequences; planned once a shape."""
    module = imported("flashinfer")

    @functools.lru_cache(maxsize=4)
    def planned(
        queries: torch.Size,
        keys: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        causal: bool,
    ) -> Any:
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        batch, heads = queries[0], (queries[2], keys[2], queries[3])
        counts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        if queries[1] > 1:
            prefill = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
            starts = counts * queries[1], counts * keys[1]
            prefill.plan(*starts, *heads, causal=causal, q_data_type=dtype)
            return prefill
        if keys[1] % _PAGE:
            raise UnavailableError(f"expected a multiple of {_PAGE} keys, got {keys[1]}")
        pages = keys[1] // _PAGE
        decode = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        decode.plan(
            counts * pages,
            torch.arange(batch * pages, dtype=torch.int32, device=device),
            torch.full((batch,), _PAGE, dtype=torch.int32, device=device),
            *heads,
            _PAGE,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return decode

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        run = planned(q.shape, k.shape, q.dtype, q.device, causal).run
        if q.shape[1] > 1:
            out: Tensor = run(*(t.flatten(0, 1) for t in (q, k, v)))
            return out.view(q.shape)
        cache = tuple(t.reshape(-1, _PAGE, *t.shape[2:]) for t in (k, v))
        return run(q[:, 0], cache).unsqueeze(1)  # type: ignore[no-any-return]

    return attend
