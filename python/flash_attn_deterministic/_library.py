"""The ops of the namespace torch.ops.flash_attn_deterministic.

Schemas are defined here, so that a torch without CUDA needs no binary; `_C.so` adds the CUDA
implementations through torch's stable ABI.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .errors import LibraryError, MissingInstanceError, UnsupportedError

_NAMESPACE = "flash_attn_deterministic"
_KERNELS = Path(__file__).with_name("_C.so")

_library: Any = torch.library.Library(_NAMESPACE, "DEF")  # type: ignore[no-untyped-call, unused-ignore]
_library.define(
    "fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal)"
    " -> (Tensor out, Tensor softmax_lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# Keeps the error out of the trace: under torch.compile the backward is traced along with the
# forward, and must fail when it runs, not when it is traced.
_library.define(
    "bwd_missing(Tensor dout, Tensor q, Tensor k, Tensor v) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

Outputs = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _fwd_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool
) -> Outputs:
    from . import reference  # here, to keep the package's import short

    return reference.attention(q, k, v, softmax_scale, causal)


def _fwd_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool
) -> Outputs:
    batch, seqlen_q, nheads, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    softmax_lse = q.new_empty((batch, nheads, seqlen_q), dtype=lse_dtype)
    return q.new_empty(q.shape), softmax_lse


def _bwd_missing(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Gradients:
    raise UnsupportedError(
        "this version of flash_attn_deterministic has no backward: call it under "
        "torch.no_grad(), or detach q, k and v"
    )


def _bwd_missing_fake(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Gradients:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    ctx.save_for_backward(*inputs[:3])


def _backward(
    ctx: Any, dout: torch.Tensor, dlse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
    dq, dk, dv = torch.ops.flash_attn_deterministic.bwd_missing(dout, *ctx.saved_tensors)
    return dq, dk, dv, None, None


_library.impl("fwd", _fwd_cpu, "CPU")
_library.impl("bwd_missing", _bwd_missing, "CompositeExplicitAutograd")
torch.library.register_fake(f"{_NAMESPACE}::fwd", _fwd_fake, lib=_library)
torch.library.register_fake(f"{_NAMESPACE}::bwd_missing", _bwd_missing_fake, lib=_library)
torch.library.register_autograd(
    f"{_NAMESPACE}::fwd", _backward, setup_context=_setup_context, lib=_library
)


def _load_kernels(path: Path) -> str:
    """Loads the CUDA implementations.

    Args:
        path: the shared library.

    Returns:
        "" when loaded, otherwise why there are none.

    Raises:
        LibraryError: the library is there but does not load.
    """
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not path.exists():
        return f"the wheel holds no kernels ({path} does not exist)"
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call, unused-ignore]
    except (OSError, RuntimeError) as error:
        raise LibraryError(
            f"{path} does not load into torch {torch.__version__}; it needs torch >= 2.10: {error}"
        ) from error
    return ""


def _register_missing(reason: str) -> None:
    def fwd_missing(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool
    ) -> Outputs:
        raise MissingInstanceError(
            f"no CUDA kernels: {reason}; install the release wheel beside a CUDA build of torch, "
            "or move q, k and v to the CPU"
        )

    _library.impl("fwd", fwd_missing, "CUDA")


kernels_missing = _load_kernels(_KERNELS)
if kernels_missing:
    _register_missing(kernels_missing)
