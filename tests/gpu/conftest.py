"""GPU tests need a CUDA device and an installed wheel; elsewhere they are skipped, saying why."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# torch.use_deterministic_algorithms wants it, and looks once, at the first matrix product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


if not __debug__:
    raise pytest.UsageError("python -O leaves out asserts of helpers; run tests/gpu without it")


def _missing() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    from flash_attn_deterministic.ops.library import kernels_missing

    return kernels_missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _missing() if gpu_items else ""
    if reason:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _autograd_thread() -> None:
    """Starts autograd's thread for the GPU with a kernel.

    Were a matrix product its first work there, cuBLAS would warn that it has no context yet.
    """
    one = torch.ones(1, device="cuda", requires_grad=True)
    torch.autograd.grad(one.exp(), one)


@pytest.fixture
def much_memory() -> Iterator[None]:
    """For tests that take most of a GPU's memory: one at a time, and other workers get it back."""
    with Path(tempfile.gettempdir(), "flash-attn-deterministic-much-memory").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()
