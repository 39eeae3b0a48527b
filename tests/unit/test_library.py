from __future__ import annotations

import subprocess
import sys

import flash_attn_deterministic as package
import pytest
import torch
from calls import CALLS
from flash_attn_deterministic._ops.schemas import BACKWARD, FORWARD


def test_import_stays_light() -> None:
    script = (
        "import sys, torch; before = set(sys.modules); import flash_attn_deterministic;"
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "flash_attn_deterministic.interface" in loaded
    assert "flash_attn_deterministic.reference" not in loaded
    assert [name for name in loaded if not name.startswith("flash_attn_deterministic")] == []


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
@pytest.mark.parametrize("key", ["CPU", "CUDA", "Meta"])
def test_op_is_registered(name: str, key: str) -> None:
    op = f"flash_attn_deterministic::{name}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op, key)


def test_all_functions_are_public() -> None:
    assert set(CALLS) <= set(package.__all__)
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        if name != "__version__":
            assert getattr(package, name).__doc__
