"""What tests of calls watch, and what they begin with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flash_attn_deterministic.schemas import BACKWARD


@pytest.fixture
def dynamo() -> None:
    """Forgets what was compiled before."""
    torch._dynamo.reset()


@pytest.fixture
def one_rank() -> Iterator[str]:
    """The name of a process group of this process alone."""
    dist: Any = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.fixture
def backward_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The backward ops that ran, with their argument deterministic."""
    ops = torch.ops.flash_attn_deterministic
    calls: list[tuple[str, bool]] = []

    def spy(name: str, op: Any) -> Any:
        def run(*arguments: Any) -> Any:
            calls.append((name, arguments[-3]))  # the residual and dlse come last
            return op(*arguments)

        return run

    for name in BACKWARD:
        monkeypatch.setattr(ops, name, spy(name, getattr(ops, name)))
    return calls
