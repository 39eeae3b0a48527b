"""What tests of the two families of kernels need."""

from __future__ import annotations

import pytest
import torch
from flash_attn_deterministic.build_info import build_info


@pytest.fixture
def hopper() -> None:
    """Skips where the sm90 family cannot run."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the sm90 family runs on compute capability 9.0 alone")
    if not any(name.startswith("90a") for name in build_info().architectures):
        pytest.skip("this wheel holds no 90a-real")
