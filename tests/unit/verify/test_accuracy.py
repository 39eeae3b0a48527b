from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flash_attn_deterministic.verify import accuracy, exact, limits
from flash_attn_deterministic.verify.contract import Attention

OURS = Attention.installed()


@pytest.fixture(autouse=True)
def one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = accuracy.Shape("130-gqa", 1, 130, 130, 2, 1)
    monkeypatch.setattr(accuracy, "_FORWARD", {"cpu": (shape,)})
    monkeypatch.setattr(accuracy, "_BACKWARD", {"cpu": (shape,)})


def measure(dense: Any = OURS.dense) -> list[dict[str, Any]]:
    attention = Attention(dense, OURS.varlen, OURS.kvcache, OURS.path)
    rows: list[dict[str, Any]] = accuracy.measure((64, "bf16"), "cpu", attention)["rows"]
    return rows


def test_ours_passes() -> None:
    rows = measure()
    assert {row["tensor"] for row in rows} == {"out", "dq", "dk", "dv"}
    assert all(row["passed"] for row in rows)


def test_errors_above_the_limit_fail() -> None:
    rows = measure(lambda *args, **options: OURS.dense(*args, **options) * 1.05)
    assert not any(row["passed"] for row in rows)
    assert all(row["ratio"] > limits.ACCURACY_RATIO for row in rows)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_fails(value: float) -> None:
    rows = measure(lambda *args, **options: OURS.dense(*args, **options) * value)
    assert not any(row["passed"] for row in rows)
    assert {row["ours"]["largest"] for row in rows} == {math.inf}


def test_beside_a_standard_that_is_no_number_nothing_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = exact.forward

    def broken(q: torch.Tensor, *arguments: Any) -> torch.Tensor:
        out = forward(q, *arguments)
        return out if arguments[-1] is None else out * math.nan

    monkeypatch.setattr(exact, "forward", broken)
    assert not any(row["passed"] for row in measure() if row["direction"] == "forward")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_error_that_is_no_number_is_infinite(value: float) -> None:
    found = accuracy.errors(torch.tensor([1.0, value]), torch.ones(2, dtype=torch.float64))
    assert found == {"largest": math.inf, "rmse": math.inf}
