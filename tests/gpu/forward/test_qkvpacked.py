"""Packed q, k and v: the bits of their parts, and gradients in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flash_attn_deterministic import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

from tests.gpu.attention import DTYPES, assert_same, make_qkv, scratch_of, skip_unless_built
from tests.gpu.gradients import int32

pytestmark = pytest.mark.gpu

Tensors = tuple[torch.Tensor, ...]
OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (40, 7), "softcap": 3.0}],
    ids=["full", "causal", "window-softcap"],
)
CONFIG = pytest.mark.parametrize(
    ("head_dim", "dtype"), [(40, "bf16"), (64, "bf16"), (128, "fp16"), (256, "bf16")]
)


def results(function: Callable[..., Any], tensors: Tensors, *rest: Any, **options: Any) -> Tensors:
    """out and the gradients of the tensors."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves, *rest, **options)
    torch.manual_seed(3)
    gradients = torch.autograd.grad(out, leaves, torch.randn_like(out))
    return out.detach(), *gradients


@OPTIONS
@CONFIG
def test_dense(head_dim: int, dtype: str, options: dict[str, Any]) -> None:
    skip_unless_built(head_dim, dtype)
    q, k, v = make_qkv((2, 300, 4, head_dim), 300, 4, dtype=DTYPES[dtype])
    out, dq, dk, dv = results(flash_attn_func, (q, k, v), **options)
    found = results(flash_attn_qkvpacked_func, (torch.stack((q, k, v), 2),), **options)
    assert_same(found, (out, torch.stack((dq, dk, dv), 2)), ("out", "dqkv"))
    q, k, v = make_qkv((2, 200, 4, head_dim), 300, 2, dtype=DTYPES[dtype])
    out, dq, dk, dv = results(flash_attn_func, (q, k, v), **options)
    found = results(flash_attn_kvpacked_func, (q, torch.stack((k, v), 2)), **options)
    assert_same(found, (out, dq, torch.stack((dk, dv), 2)), ("out", "dq", "dkv"))


@OPTIONS
@CONFIG
def test_packed_sequences_with_tokens_of_none(
    head_dim: int, dtype: str, options: dict[str, Any]
) -> None:
    skip_unless_built(head_dim, dtype)
    starts = int32([0, 130, 130, 131, 280])
    q, k, v = (x[0] for x in make_qkv((1, 300, 4, head_dim), 300, 4, dtype=DTYPES[dtype]))
    for tensor in (q, k, v):
        tensor[280:] = float("nan")
    lengths = (starts, starts, 149, 149)
    out, dq, dk, dv = results(flash_attn_varlen_func, (q, k, v), *lengths, **options)
    packed: Tensors = (torch.stack((q, k, v), 1),)
    found = results(flash_attn_varlen_qkvpacked_func, packed, starts, 149, **options)
    assert_same(found, (out, torch.stack((dq, dk, dv), 1)), ("out", "dqkv"))
    assert not found[1][280:].any()
    keys = int32([0, 10, 100, 100, 290])
    q, k, v = (x[0] for x in make_qkv((1, 300, 4, head_dim), 300, 2, dtype=DTYPES[dtype]))
    lengths = (starts, keys, 149, 190)
    out, dq, dk, dv = results(flash_attn_varlen_func, (q, k, v), *lengths, **options)
    packed = (q, torch.stack((k, v), 1))
    found = results(flash_attn_varlen_kvpacked_func, packed, *lengths, **options)
    assert_same(found, (out, dq, torch.stack((dk, dv), 1)), ("out", "dq", "dkv"))
    assert not found[1][280:].any()
    assert not found[2][290:].any()


def test_packing_takes_no_memory() -> None:
    skip_unless_built(64, "bf16")
    tensors = make_qkv((4, 2048, 16, 64), 2048, 16)

    def taken(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> int:
        """Bytes that the backward takes besides its results."""
        leaves = [tensor.requires_grad_() for tensor in tensors]
        out = function(*leaves)
        dout = torch.ones_like(out)
        return scratch_of(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))[1]

    q, k, v = tensors
    qkv = taken(flash_attn_qkvpacked_func, torch.stack(tensors, 2))
    kv = taken(flash_attn_kvpacked_func, q.clone(), torch.stack((k, v), 2))
    # A copy of the gradients would be 50 or 34 MB.
    assert max(qkv, kv) <= taken(flash_attn_func, *tensors) + 2**20
