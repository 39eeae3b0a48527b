"""The standard that ours is compared with: torch's scaled_dot_product_attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

FLASH = "torch SDPA, flash backend"


@contextlib.contextmanager
def flash_only(device: str) -> Iterator[None]:
    """Restricts SDPA to its flash backend, on CUDA."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device == "cuda" else contextlib.nullcontext():
        yield


def square(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Runs SDPA on (batch, seqlen, nheads, head_dim) with as many queries as keys."""
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with flash_only(q.device.type):
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return out.transpose(1, 2)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Runs SDPA's flash op with any lengths, its causal mask aligned to the bottom right as ours.

    The op itself is called, on CUDA: the function above it aligns to the top left.
    """
    head_dim, group = q.shape[3], q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    q, k, v = (functional.pad(t, (0, -head_dim % 8)).transpose(1, 2) for t in (q, k, v))
    out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, scale=head_dim**-0.5
    )
    return out.transpose(1, 2)[..., :head_dim]  # type: ignore[no-any-return]
