"""Accuracy passes on the package, and its bounds catch what is wrong."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from flash_attn_deterministic.verify import accuracy, bounds, exact
from flash_attn_deterministic.verify.contract import Attention
from flash_attn_deterministic.verify.features import FEATURES

from tests.drawn import draw_case
from tests.planted_faults import FAULTS, Fault, caught

OURS = Attention.installed()
ON_CPU = list(accuracy.cases("cpu"))


def measure(dense: Any = OURS.dense, feature: str = "") -> list[dict[str, Any]]:
    attention = dataclasses.replace(OURS, dense=dense)
    among = [case for case in ON_CPU if feature in ("", case.feature) and case.form == "dense"]
    rows: list[dict[str, Any]] = accuracy.measure((64, "bf16"), "cpu", attention, among)["rows"]
    return rows


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (40, "fp16")])
def test_ours_passes(head_dim: int, dtype: str) -> None:
    rows = accuracy.measure((head_dim, dtype), "cpu", OURS)["rows"]
    assert [row["name"] for row in rows if not row["passed"]] == []
    assert len({row["name"] for row in rows}) == len(rows)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_calls_pass(seed: int) -> None:
    config, case = draw_case(seed, longest=130, head_dims=range(1, 80))
    rows = accuracy.measure(config, "cpu", OURS, [case])["rows"]
    assert rows
    assert [row for row in rows if not row["passed"]] == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_feature_is_measured_forward_and_backward(device: str) -> None:
    found = list(accuracy.cases(device))
    assert {case.feature for case in found if case.backward} == FEATURES.keys()
    assert len({case.name for case in found}) == len(found)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_fails(value: float) -> None:
    def dense(*args: Any, **options: Any) -> Any:
        found = OURS.dense(*args, **options)
        return (found[0] * value, *found[1:]) if isinstance(found, tuple) else found * value

    measured = measure(dense, "causal")
    rows = [row for row in measured if row["tensor"] not in ("softmax_lse", "max_logits")]
    assert not any(row["passed"] for row in rows)
    assert {row["ours"]["largest"] for row in rows} == {math.inf}


def test_a_row_without_keys_is_exactly_nothing() -> None:
    q, k = torch.ones(1, 3, 1, 8), torch.ones(1, 1, 1, 8)
    wanted = exact.Definition(causal=True).forward(q, k, k)
    assert wanted.softmax_lse[0, 0].tolist()[:2] == [math.inf, math.inf]
    own = {"out": wanted.out, "softmax_lse": wanted.softmax_lse}

    def ratios(**changes: torch.Tensor) -> list[float]:
        found = bounds.forward({**own, **changes}, wanted, torch.float16, 0.0)
        return [error.ratio for error in found.values()]

    assert ratios() == [0.0, 0.0]
    assert ratios(softmax_lse=-own["softmax_lse"])[1] == math.inf
    assert ratios(softmax_lse=own["softmax_lse"].nan_to_num(posinf=9.0))[1] == math.inf
    assert ratios(out=own["out"] + 1e-3)[0] > 1


def test_beside_a_standard_that_is_no_number_nothing_passes() -> None:
    fine, wanted = bounds.Error(0.0, 0.0, 0.0), torch.zeros(3, dtype=torch.float64)
    error, _ = accuracy._beside(fine, torch.tensor([0.0, math.nan, 0.0]), wanted)
    assert error.ratio == math.inf


def test_errors_over_twice_torchs_fail() -> None:
    wanted = torch.zeros(2, dtype=torch.float64)
    for largest, passed in ((0.39, True), (0.41, False)):
        own = bounds.Error(largest, largest, 0.1)
        error, torchs = accuracy._beside(own, torch.tensor([0.2, -0.1]), wanted)
        assert torchs.largest == pytest.approx(0.2)
        assert (error.ratio <= 1.0) == passed


def test_the_definition_is_torchs_own_attention() -> None:
    """The oracle itself, against what torch makes of a mask."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, n, h, 16, generator=generator, dtype=torch.float64)
        for n, h in ((9, 4), (13, 2), (13, 2), (9, 4))
    )
    row, key = torch.arange(9)[:, None] + 4, torch.arange(13)
    slopes = torch.rand(2, 4, generator=generator, dtype=torch.float64)
    mask = -slopes[..., None, None] * (row - key).abs()
    mask = mask.masked_fill((key < row - 5) | (key > row + 2), -math.inf)
    definition = exact.Definition(window_size=(5, 2), alibi_slopes=slopes, softmax_scale=0.7)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    wide = [leaves[0], *(t.repeat_interleave(2, dim=2) for t in leaves[1:])]
    wide_q, wide_k, wide_v = (t.transpose(1, 2) for t in wide)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        wide_q, wide_k, wide_v, attn_mask=mask, scale=0.7
    ).transpose(1, 2)
    torch.testing.assert_close(definition.forward(q, k, v).out, wanted)
    found = definition.gradients(q, k, v, dout)
    for one, other in zip(found, torch.autograd.grad(wanted, leaves, dout), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    """In every case that has the feature."""
    for config in fault.configs:
        found = caught(fault, config, "cpu")
        assert found
        assert [name for name, ok in found.items() if not ok] == []


def test_every_feature_has_a_fault_of_its_own() -> None:
    met = {feature for fault in FAULTS for feature in fault.features}
    assert met == FEATURES.keys()
