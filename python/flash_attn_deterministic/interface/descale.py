"""The scales of a cache in 8 bits, around a call on the numbers that it holds.

A key is k_descale times what the cache holds: so is its score, if the query is scaled instead. An
output is v_descale times that of the values that the cache holds. Both products are taken in
float32, one by one, and rounded to q's dtype: no bit of a row depends on other rows, or on how the
call between them is carried out.
"""

from __future__ import annotations

from typing import Any

import torch

from ..checks.numbers import as_float
from ..checks.ops import validate
from ..checks.tensors import FP8, check_device, check_dtype, check_tensor, is_fp8
from ..errors import ArgumentError
from ..schemas import argument_names
from ..types import Call

Descale = float | torch.Tensor | None


def check_descales(call: Call, k_descale: Any, v_descale: Any) -> None:
    """Checks a call and its scales; raises as `flash_attn_func`."""
    if k_descale is None and v_descale is None:
        return
    validate(*call)  # with the caller's tensors, and before their shapes are used
    cache, starts = _cache_and_starts(call)
    batch = call[1][0].shape[0] if starts is None else starts.shape[0] - 1
    for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
        if descale is not None:
            _check(name, descale, cache, (batch, cache.shape[-2]))


def _cache_and_starts(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the keys of a call, and where its packed sequences of queries begin."""
    given = dict(zip(argument_names(call[0]), call[1], strict=False))
    return given["k_cache"] if "k_cache" in given else given["k"], given.get("cu_seqlens_q")


def _check(name: str, descale: Any, cache: torch.Tensor, shape: tuple[int, int]) -> None:
    if not is_fp8(cache):
        raise ArgumentError(
            f"{name}: expected None with keys and values in {cache.dtype}, got a scale; scales are "
            f"for those in {FP8}"
        )
    if not isinstance(descale, torch.Tensor):
        number = as_float(name, descale, "a float, a torch.Tensor or None")
        if not abs(number) <= torch.finfo(torch.float32).max:  # NaN too
            raise ArgumentError(f"{name}: expected a finite number of float32, got {number}")
        return
    check_tensor(name, descale)
    check_dtype(name, descale, torch.float32, "float()")
    # Not `in`: torch.compile finds no equal shapes there if a size is symbolic.
    if not any(descale.shape == one for one in ((), (1,), shape[1:], shape)):
        raise ArgumentError(
            f"{name}: expected shape (batch, nheads_k) = {shape}, (nheads_k,) or (), got "
            f"{tuple(descale.shape)}"
        )
    check_device(name, descale, cache.device)


def with_scaled_query(call: Call, k_descale: Descale, v_descale: Descale) -> Call:
    """Returns a call with q times k_descale; checks both scales."""
    check_descales(call, k_descale, v_descale)
    op, (q, *others) = call
    return op, (q if k_descale is None else scaled(q, k_descale, call), *others)


def scaled(rows: torch.Tensor, descale: float | torch.Tensor, call: Call) -> torch.Tensor:
    """Returns rows of queries of a call times the scale of their sequence and KV head."""
    keys, cu_seqlens_q = _cache_and_starts(call)
    nheads_k = keys.shape[-2]
    if not isinstance(descale, torch.Tensor):
        number = as_float("descale", descale)
        descale = torch.full((), number, dtype=torch.float32, device=rows.device)
    if descale.dim() == 2 and descale.stride(0) == 0:
        descale = descale[0]  # one for all sequences, expanded
    # A tensor of at least one dimension: the product is float32 then. No call on a cache has a
    # gradient; torch.compile reads no stride of what is detached, so it comes last.
    each = descale.detach().expand(*descale.shape[:-1], nheads_k)
    each = each.repeat_interleave(rows.shape[-2] // nheads_k, -1)
    if each.dim() == 2:
        if cu_seqlens_q is None:
            each = each[:, None]
        else:
            token = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
            sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), token, right=True)
            each = each[sequence.clamp(max=each.shape[0] - 1)]  # also rows of no sequence
    return (rows * each[..., None]).to(rows.dtype)
