"""The standard that ours is compared with: torch's scaled_dot_product_attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

FLASH = "torch SDPA, flash backend"
DEFAULT = "torch SDPA, default backend"


def name(device: str) -> str:
    """Returns which backend is the standard on a device."""
    return FLASH if device == "cuda" else DEFAULT


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
    """Runs SDPA with any lengths, its causal mask aligned to the bottom right as ours is.

    On CUDA the flash op itself is called: the function above it aligns to the top left.
    """
    head_dim, group = q.shape[3], q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    if q.device.type == "cuda":
        q, k, v = (functional.pad(t, (0, -head_dim % 8)).transpose(1, 2) for t in (q, k, v))
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, scale=head_dim**-0.5
        )
        return out.transpose(1, 2)[..., :head_dim]  # type: ignore[no-any-return]
    mask = None
    if causal:
        shape = (q.shape[1], k.shape[1])
        mask = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    # A row that sees nothing is NaN on the CPU.
    return out.transpose(1, 2).nan_to_num(0.0)
