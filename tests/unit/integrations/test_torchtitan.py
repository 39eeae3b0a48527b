"""TorchTitan's own attention with these kernels, on the CPU; `nox -s torchtitan` installs it."""

from __future__ import annotations

from typing import Any

import flash_attn_deterministic as package
import pytest
import torch
from bits import bits_equal

pytest.importorskip("torchtitan.models.common.attention")

from flash_attn_deterministic.integrations import torch as provider
from torchtitan.models.common import attention as titan

varlen_func: Any = package.flash_attn_varlen_func


def draw(heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 40, heads, 32, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("window", [(-1, 0), (7, 0), (-1, -1)])
def test_varlen_attention_has_the_bits_of_the_public_function(window: tuple[int, int]) -> None:
    q, k, v = (t.requires_grad_() for t in (draw(4, 0), draw(2, 1), draw(2, 2)))
    starts = torch.tensor([0, 13, 40], dtype=torch.int32)
    mask = titan.VarlenMetadata(starts, starts, 27, 27)
    layer: Any = titan.VarlenAttention(titan.VarlenAttention.Config(window_size=window))
    handle = provider.Handle("CPU")
    try:
        out = layer(q, k, v, attention_masks=mask, enable_gqa=True)
        torch.autograd.backward(out.sum())
    finally:
        handle.remove()
    same = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    expected = varlen_func(*(t[0] for t in same), starts, starts, 27, 27, window_size=window)
    torch.autograd.backward(expected.sum())
    assert bits_equal(out[0], expected)
    for one, other in zip((q, k, v), same, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert bits_equal(one.grad, other.grad)
