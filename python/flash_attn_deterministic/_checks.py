"""Checks of arguments before an op is called.

They read shapes, dtypes and devices only, so that torch.compile can trace them with dynamic shapes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ._architectures import any_runs_on
from ._build_info import build_info
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    DtypeError,
    MissingInstanceError,
    UnsupportedDeviceError,
    UnsupportedError,
)

MAX_HEAD_DIM = 256
DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_LAYOUT = "(batch, seqlen, nheads, head_dim)"


def check_supported(
    dropout_p: float,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
) -> None:
    """Refuses the arguments of flash_attn's interface that this version does not compute.

    Raises:
        UnsupportedError: one of them is in use.
    """
    if dropout_p != 0.0:
        raise _unsupported("dropout_p", "0.0", dropout_p)
    if tuple(window_size) != (-1, -1):
        raise _unsupported("window_size", "(-1, -1)", window_size)
    if softcap != 0.0:
        raise _unsupported("softcap", "0.0", softcap)
    if alibi_slopes is not None:
        raise _unsupported("alibi_slopes", "None", type(alibi_slopes).__name__)


def check_scale(softmax_scale: float) -> None:
    """Checks that the softmax scale is a positive, finite number.

    The kernels scale scores after masking, as flash_attn's do: -inf times a scale of 0 or less
    would make a masked key visible, or NaN.

    Raises:
        ArgumentTypeError: not a number.
        ArgumentError: NaN, infinite, zero or negative.
    """
    if not isinstance(softmax_scale, (float, int, torch.SymFloat, torch.SymInt)):
        raise ArgumentTypeError(
            f"softmax_scale: expected a float or None, got {type(softmax_scale).__name__}; "
            "pass float(softmax_scale)"
        )
    # Comparisons instead of math.isfinite, which torch.compile can't put a symbolic number into.
    if not 0 < softmax_scale < float("inf"):
        raise ArgumentError(
            f"softmax_scale: expected a positive, finite number, got {softmax_scale}; for a "
            "negative scale negate q, for scale 0 pass a q of zeros"
        )


def check_causal(causal: bool) -> None:
    """Checks that causal is a flag, not for instance a softmax scale in its place.

    Raises:
        ArgumentTypeError: neither a bool nor an int.
    """
    if not isinstance(causal, (bool, int)):
        raise ArgumentTypeError(f"causal: expected a bool, got {type(causal).__name__}")


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks types, dtypes, devices and shapes of q, k and v.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16.
        k: (batch, seqlen_k, nheads_k, head_dim), like q.
        v: like k.

    Raises:
        ArgumentTypeError: not a tensor.
        DtypeError: a wrong dtype.
        ArgumentError: a wrong shape, or tensors on several devices.
        UnsupportedDeviceError: neither on the CPU nor on a CUDA device.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ArgumentError(
                f"{name}: expected 4 dimensions {_LAYOUT}, got shape {tuple(tensor.shape)}"
            )
    _check_dtypes(q, k, v)
    _check_devices(q, k, v)
    _check_shapes(q, k, v)


def check_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Checks that this wheel has a kernel for a call on CUDA tensors.

    Under torch.compile this is left to the op itself, which repeats it when it runs: what the
    wheel and the machine hold can't be traced.

    Args:
        device: where the tensors are; only CUDA devices need kernels.
        dtype: float16 or bfloat16.
        head_dim: 1 to 256.

    Raises:
        MissingInstanceError: no kernel for this dtype and head dim.
        UnsupportedDeviceError: no code for this GPU's architecture.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return
    problem = _instance_problem(dtype, head_dim)
    if problem:
        raise MissingInstanceError(problem)
    problem = device_problem(device.index or 0)
    if problem:
        raise UnsupportedDeviceError(problem)


@functools.cache
def _instance_problem(dtype: torch.dtype, head_dim: int) -> str:
    kernel_head_dim = build_info().kernel_head_dim(head_dim)
    name = DTYPE_NAMES[dtype]
    held = [i for i in build_info().instances if i.direction == "fwd"]
    if any((i.dtype, i.head_dim) == (name, kernel_head_dim) for i in held):
        return ""
    holds = ", ".join(f"{i.dtype} {i.head_dim}" for i in held) or "none"
    return (
        f"q: this wheel has no forward kernel for {name} and head_dim {head_dim} (it would be "
        f"{name} {kernel_head_dim}); it holds: {holds}; install the release wheel"
    )


@functools.cache
def device_problem(index: int) -> str:
    """Returns "" if this wheel runs on CUDA device number `index`, otherwise why not."""
    if not torch.cuda.is_available():
        return ""  # only fake tensors get here, and those launch nothing
    capability = torch.cuda.get_device_capability(index)
    architectures = build_info().architectures
    if any_runs_on(architectures, capability):
        return ""
    return (
        f"cuda:{index} ({torch.cuda.get_device_name(index)}) has compute capability "
        f"{capability[0]}.{capability[1]}; this wheel holds code for {', '.join(architectures)}; "
        "build one with CMAKE_CUDA_ARCHITECTURES set for this GPU"
    )


def _check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if q.dtype not in DTYPE_NAMES:
        raise DtypeError(
            f"q: expected dtype torch.float16 or torch.bfloat16, got {q.dtype}; convert q, k and "
            "v with .to(torch.bfloat16)"
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise DtypeError(
                f"{name}: expected {q.dtype}, the dtype of q, got {tensor.dtype}; convert it with "
                f"{name}.to(q.dtype)"
            )


def _check_devices(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise UnsupportedDeviceError(
            f"q: expected a tensor on the CPU or on a CUDA device, got one on {q.device}"
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.device != q.device:
            raise ArgumentError(
                f"{name}: expected a tensor on {q.device}, the device of q, got one on "
                f"{tensor.device}; move it with {name}.to(q.device)"
            )


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    batch, _, nheads, head_dim = q.shape
    _, seqlen_k, nheads_k, _ = k.shape
    if batch == 0:
        raise ArgumentError(f"q: expected a batch of at least 1, got shape {tuple(q.shape)}")
    if head_dim == 0 or head_dim > MAX_HEAD_DIM:
        raise ArgumentError(f"q: expected a head_dim of 1 to {MAX_HEAD_DIM}, got {head_dim}")
    if nheads == 0:
        raise ArgumentError(f"q: expected at least 1 head, got shape {tuple(q.shape)}")
    if nheads_k == 0 or nheads % nheads_k != 0:
        raise ArgumentError(
            f"k: expected a number of heads that divides the {nheads} heads of q, got {nheads_k}"
        )
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ArgumentError(
            f"k: expected shape ({batch}, seqlen_k, nheads_k, {head_dim}), with the batch and "
            f"head_dim of q, got {tuple(k.shape)}"
        )
    if v.shape != k.shape:
        raise ArgumentError(
            f"v: expected shape {(batch, seqlen_k, nheads_k, head_dim)}, the shape of k, got "
            f"{tuple(v.shape)}"
        )


def _unsupported(name: str, expected: str, given: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: this version of flash_attn_deterministic supports {expected} only, got {given}"
    )
