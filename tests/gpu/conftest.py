"""GPU tests need a CUDA device and an installed wheel; elsewhere they are skipped, saying why."""

from __future__ import annotations

import pytest
import torch


def _missing() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    from flash_attn_deterministic._library import kernels_missing

    return kernels_missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _missing() if gpu_items else ""
    if reason:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))
