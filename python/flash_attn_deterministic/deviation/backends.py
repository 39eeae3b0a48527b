"""Real implementations of attention: this package's, torch's, and torch operations written out.

Each is a function of q, k and v (batch, nheads, seqlen, head_dim) in a 16-bit dtype.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from .training.attention import explicit_attention

Backend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    deterministic: bool = True,
    split_size: int | None = None,
) -> torch.Tensor:
    """This package's flash_attn_func."""
    from .. import deterministic_mode, flash_attn_func

    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    with deterministic_mode(deterministic):
        out = flash_attn_func(q, k, v, deterministic=deterministic, split_size=split_size)
    return out.transpose(1, 2)


def _torch(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(q, k, v)


BACKENDS: dict[str, Backend] = {
    "ours": ours,
    "ours_nondeterministic": functools.partial(ours, deterministic=False),
    "torch_flash": functools.partial(_torch, SDPBackend.FLASH_ATTENTION),
    "torch_cudnn": functools.partial(_torch, SDPBackend.CUDNN_ATTENTION),
    "torch_efficient": functools.partial(_torch, SDPBackend.EFFICIENT_ATTENTION),
    "torch_math": functools.partial(_torch, SDPBackend.MATH),
    "baseline": explicit_attention,
}


def missing(
    backend: Backend, device: str, dtype: torch.dtype, head_dim: int, backward: bool
) -> str:
    """Tries a backend.

    Returns:
        "" where it works, otherwise the first line of what it raised.
    """
    tensors = [
        torch.zeros(1, 1, 64, head_dim, device=device, dtype=dtype, requires_grad=backward)
        for _ in range(3)
    ]
    try:
        # torch explains in warnings why a backend does not take a call.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = backend(*tensors)
            if backward:
                torch.autograd.backward([out.sum()])
        if device == "cuda":
            torch.cuda.synchronize()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        # Results are published: no folders of this machine in them.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return re.sub(r"(?:/[\w.+-]+)+/", "", first)
    return ""


def usable(
    device: str, dtype: torch.dtype, head_dim: int, backward: bool = False
) -> tuple[dict[str, Backend], dict[str, str]]:
    """Returns the backends that work, and why the others don't."""
    reasons = {
        name: missing(backend, device, dtype, head_dim, backward)
        for name, backend in BACKENDS.items()
    }
    works = {name: BACKENDS[name] for name, reason in reasons.items() if not reason}
    return works, {name: reason for name, reason in reasons.items() if reason}
