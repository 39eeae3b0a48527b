"""Whether this wheel holds a kernel for a call, and code for the GPU."""

from __future__ import annotations

import functools

import torch

from ..build_info import build_info
from ..errors import ArgumentError, MissingInstanceError, UnsupportedDeviceError

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
_ROW_MULTIPLE = 8  # elements


def check_kernels(
    device: torch.device, dtype: torch.dtype, head_dim: int, direction: str = "fwd"
) -> None:
    """Checks that this wheel has a kernel for a call on CUDA tensors, and code for their GPU.

    Skipped while torch.compile traces, which can't trace files and devices: the op checks again.
    The direction is "fwd" or "bwd".
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return
    problem = instance_problem(dtype, head_dim, direction)
    if problem:
        raise MissingInstanceError(problem)
    problem = device_problem(device.index or 0)
    if problem:
        raise UnsupportedDeviceError(problem)


def check_rows_aligned(name: str, cache: torch.Tensor) -> None:
    """Checks that rows of a cache start at multiples of what kernels load at a time.

    Skipped while torch.compile traces and for tensors without data: the op checks again.
    """
    if torch.compiler.is_compiling() or type(cache) not in (torch.Tensor, torch.nn.Parameter):
        return
    row_bytes = _ROW_MULTIPLE * cache.element_size()
    rule = f"expected rows that start at multiples of {row_bytes} bytes on a CUDA device"
    # The stride of a dimension of size 1 is never used.
    for size, stride in zip(cache.shape[:3], cache.stride()[:3], strict=True):
        if size != 1 and stride % _ROW_MULTIPLE:
            raise ArgumentError(
                f"{name}: {rule}, so strides that are multiples of {_ROW_MULTIPLE} elements, got "
                f"strides {cache.stride()}"
            )
    if cache.data_ptr() % row_bytes:
        raise ArgumentError(
            f"{name}: {rule}, got a first row {cache.data_ptr() % row_bytes} bytes after a "
            f"multiple (storage_offset {cache.storage_offset()})"
        )


@functools.cache
def instance_problem(dtype: torch.dtype, head_dim: int, direction: str) -> str:
    """Returns "" if this wheel has a kernel, otherwise why not; arguments as of check_kernels."""
    kernel_head_dim = build_info().kernel_head_dim(head_dim)
    name = DTYPE_NAMES[dtype]
    held = [i for i in build_info().instances if i.direction == direction]
    if any((i.dtype, i.head_dim) == (name, kernel_head_dim) for i in held):
        return ""
    holds = ", ".join(dict.fromkeys(f"{i.dtype} {i.head_dim}" for i in held)) or "none"
    return (
        f"q: this wheel has no {DIRECTIONS[direction]} kernel for {name} and head_dim {head_dim} "
        f"(it would be {name} {kernel_head_dim}); it holds: {holds}; install the release wheel"
    )


@functools.cache
def device_problem(index: int) -> str:
    """Returns "" if this wheel runs on CUDA device number `index`, otherwise why not."""
    if not torch.cuda.is_available():
        return ""  # the tensors are fake: nothing is launched
    from ..architectures import runs_on  # here, to keep the package's import short

    capability = torch.cuda.get_device_capability(index)
    architectures = build_info().architectures
    if any(runs_on(name, capability) for name in architectures):
        return ""
    return (
        f"cuda:{index} ({torch.cuda.get_device_name(index)}) has compute capability "
        f"{capability[0]}.{capability[1]}; this wheel holds code for {', '.join(architectures)}; "
        "build one with CMAKE_CUDA_ARCHITECTURES set for this GPU"
    )
