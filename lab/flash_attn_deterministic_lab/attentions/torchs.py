"""torch's scaled_dot_product_attention by backend, and FlexAttention, compiled."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from .attention import Function

_SDPA: Any = functional.scaled_dot_product_attention  # before a study replaces it


def masks_chunks(backend: SDPBackend | None) -> bool:
    """Returns whether a backend itself aligns a causal mask to the bottom right corner.

    torch's flash kernels do, and take no other mask. The rest gets a tensor, with which cuDNN takes
    three times as long: nothing follows from that for its kernels.
    """
    return backend == SDPBackend.FLASH_ATTENTION


def sdpa(backend: SDPBackend | None) -> Function:
    """Returns SDPA, held to a backend."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        scale: float | None = None,
        mask: Any = None,
        seqlens_k: Tensor | None = None,
    ) -> Tensor:
        # SDPA's own causal mask is aligned to the top left corner.
        chunk = causal and q.shape[1] != k.shape[1]
        if seqlens_k is not None or (chunk and not masks_chunks(backend)):
            mask = _mask(q, k, causal, seqlens_k)
        elif chunk:
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(q.shape[1], k.shape[1])
        with nullcontext() if backend is None else sdpa_kernel(backend):
            out: Tensor = _SDPA(
                *(t.transpose(1, 2) for t in (q, k, v)),
                attn_mask=mask,
                is_causal=causal and mask is None,
                scale=scale,
                enable_gqa=q.shape[2] != k.shape[2],
            )
        return out.transpose(1, 2)

    return attend


def _mask(q: Tensor, k: Tensor, causal: bool, seqlens_k: Tensor | None) -> Tensor:
    """Returns (batch or 1, 1, seqlen_q, seqlen_k), bool: visible keys."""
    rows = torch.arange(q.shape[1], device=q.device)[:, None]
    keys = torch.arange(k.shape[1], device=q.device)
    lengths = torch.tensor([k.shape[1]], device=q.device) if seqlens_k is None else seqlens_k
    lengths = lengths.view(-1, 1, 1, 1)
    visible = (keys < lengths).expand(-1, 1, q.shape[1], -1)
    return visible & (keys <= rows + lengths - q.shape[1]) if causal else visible


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """torch.use_deterministic_algorithms, with a warning where torch has no such algorithm."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextmanager
def deterministic_torch() -> Iterator[None]:
    """The same without a word."""
    with warnings.catch_warnings(), deterministic_algorithms():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def flex_settings() -> Iterator[None]:
    """What calls of FlexAttention run in."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    # The first: a backward that is timed runs many times over what its forward saved. The second:
    # past the limit torch would run something else, uncompiled.
    with functorch.patch(donated_buffer=False), dynamo.patch(recompile_limit=64):
        yield


def flex(**options: Any) -> Function:
    """Returns FlexAttention, compiled, with these options of its kernels."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    compiled: Any = torch.compile(flex_attention)

    def block_mask(sizes: tuple[int, int, int], causal: bool, seqlens_k: Tensor) -> Any:
        # Tensors, because each new number would be compiled in.
        ahead = seqlens_k - sizes[1] if causal else seqlens_k

        def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (key < seqlens_k[batch]) & (key <= row + ahead[batch])

        device = str(seqlens_k.device)
        batch, seqlen_q, seqlen_k = sizes
        return create_block_mask(visible, batch, None, seqlen_q, seqlen_k, device=device)

    @functools.lru_cache(maxsize=4)  # made once, as programs do: it takes longer than the call
    def causal_mask(sizes: tuple[int, int, int], device: torch.device) -> Any:
        lengths = torch.full(sizes[:1], sizes[2], dtype=torch.int32, device=device)
        return block_mask(sizes, True, lengths)

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        scale: float | None = None,
        seqlens_k: Tensor | None = None,
    ) -> Tensor:
        sizes = q.shape[0], q.shape[1], k.shape[1]
        mask = None
        if seqlens_k is not None:
            mask = block_mask(sizes, causal, seqlens_k)
        elif causal:
            mask = causal_mask(sizes, q.device)
        out: Tensor = compiled(
            *(t.transpose(1, 2) for t in (q, k, v)),
            block_mask=mask,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
            kernel_options=options or None,
        )
        return out.transpose(1, 2)

    return attend
