from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flash_attn_deterministic.deviation import claims
from flash_attn_deterministic.deviation.cells import Cell
from flash_attn_deterministic.deviation.claims import (
    CLAIMS,
    CONDITIONAL,
    NOT_REPRODUCED,
    NOT_TESTED,
    REPRODUCED,
    Evidence,
    decide,
    judge_all,
)
from flash_attn_deterministic.deviation.forward_plots import Points
from flash_attn_deterministic.deviation.metrics import METRICS


def _result(flash: float, baseline: float = 1.0, difference: float = 1.0) -> dict[str, Any]:
    values = {"flash": flash, "baseline": baseline, "difference": difference}
    return {
        pair: {metric: [0.9 * value, value, 1.1 * value] for metric in METRICS}
        for pair, value in values.items()
    }


def _verdict(key: str, evidence: Evidence) -> str:
    (claim,) = (claim for claim in CLAIMS if claim.key == key)
    return claim.judge(evidence).verdict


def _forward(figure: str, points: Points) -> Evidence:
    return Evidence(forward={figure: points})


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param([True, True], REPRODUCED, id="all"),
        pytest.param([True, False], CONDITIONAL, id="some"),
        pytest.param([False, False], NOT_REPRODUCED, id="none"),
        pytest.param([], NOT_TESTED, id="no-data"),
    ],
)
def test_verdict_of_cases(held: list[bool], expected: str) -> None:
    outcome = decide([(f"case {number}", holds, "1") for number, holds in enumerate(held)])
    assert outcome.verdict == expected
    assert (outcome.condition == "holds with case 0") == (expected == CONDITIONAL)


def test_nothing_is_judged_without_data() -> None:
    assert {outcome.verdict for _, outcome in judge_all(Evidence())} == {NOT_TESTED}
    assert len({claim.key for claim in CLAIMS}) == len(CLAIMS)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"bf16": 3.0, "fp16": 2.0, "fp32": 1.0, "fp64": 0.1}, REPRODUCED),
        ({"bf16": 3.0, "fp16": 4.0, "fp32": 1.0, "fp64": 0.1}, NOT_REPRODUCED),
    ],
    ids=["falls", "rises"],
)
def test_formats(values: dict[str, float], expected: str) -> None:
    points: Points = [(Cell(format=f), _result(1, 1, x)) for f, x in values.items()]
    assert _verdict("formats", _forward("3", points)) == expected


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(4.9, NOT_REPRODUCED), (5.0, REPRODUCED), (20.0, REPRODUCED), (20.1, NOT_REPRODUCED)],
)
def test_tenfold_is_5_to_20(ratio: float, expected: str) -> None:
    points: Points = [(Cell(), _result(ratio, 1.0))]
    assert _verdict("tenfold", _forward("5", points)) == expected


def test_conditions_are_named() -> None:
    points: Points = [
        (Cell(preset="paper", inputs="uniform"), _result(10)),
        (Cell(preset="kernel", inputs="normal"), _result(0.5)),
    ]
    (claim,) = (claim for claim in CLAIMS if claim.key == "tenfold")
    outcome = claim.judge(_forward("5", points))
    assert outcome.verdict == CONDITIONAL
    assert outcome.condition == "holds with preset paper, uniform [0, 1), lengths 1024"
    assert any("(does not hold)" in number for number in outcome.numbers)


@pytest.mark.parametrize(
    ("key", "last", "expected"),
    [
        ("length-max", 1.4, NOT_REPRODUCED),
        ("length-max", 1.6, REPRODUCED),
        ("length-relative", 1.6, REPRODUCED),
        ("length-mean", 1.4, NOT_REPRODUCED),
    ],
)
def test_growth_with_length(key: str, last: float, expected: str) -> None:
    points: Points = [
        (Cell(seqlen=2048), _result(last, 1, last)),
        (Cell(seqlen=128), _result(1, 1, 1)),
    ]
    assert _verdict(key, _forward("5", points)) == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [(1.05, NOT_REPRODUCED), (1.2, CONDITIONAL), (0.8, CONDITIONAL)],
)
def test_swapping_matters_only_where_blocks_differ(changed: float, expected: str) -> None:
    points: Points = [
        (Cell(block_c=256, block_r=64), _result(1)),
        (Cell(block_c=64, block_r=256), _result(changed)),
        (Cell(block_c=64, block_r=64), _result(1)),
        (Cell(block_c=64, block_r=64), _result(1)),
    ]
    assert _verdict("swapped", _forward("6a", points)) == expected


@pytest.mark.parametrize(("last", "expected"), [(0.9, NOT_REPRODUCED), (0.7, REPRODUCED)])
def test_larger_blocks(last: float, expected: str) -> None:
    points: Points = [(Cell(block_c=512), _result(last)), (Cell(block_c=8), _result(1))]
    assert _verdict("larger", _forward("6c", points)) == expected


@pytest.mark.parametrize(("other", "expected"), [(1.0, REPRODUCED), (1.01, NOT_REPRODUCED)])
def test_rows_must_be_equal(other: float, expected: str) -> None:
    points: Points = [(Cell(block_r=16), _result(1)), (Cell(block_r=32), _result(other))]
    assert _verdict("rows", _forward("rows", points)) == expected


@pytest.mark.parametrize(
    ("rescale", "state", "expected"),
    [(0.9, 0.5, REPRODUCED), (0.05, 0.04, NOT_REPRODUCED), (0.5, 0.9, NOT_REPRODUCED)],
)
def test_the_rescale_factor_must_be_the_largest_step(
    rescale: float, state: float, expected: str
) -> None:
    points: Points = [
        (Cell(), _result(1)),
        (Cell(only="rescale"), _result(rescale)),
        (Cell(only="state"), _result(state)),
    ]
    assert _verdict("rescale", _forward("ablation", points)) == expected


def _bias(one: float, moved: float) -> Evidence:
    def cell(inputs: str, shifted: bool) -> Cell:
        return Cell(kind="bias", preset="kernel", inputs=inputs, ties=2, shifted=shifted)

    def result(mean: float) -> dict[str, Any]:
        found = {"away": [mean] * 4, "bias": [mean] * 4, "stderr": [0.01] * 4}
        return {"product": found, "output": {**found, "away": [0.0] * 4}}

    return _forward(
        "bias",
        [
            (cell("one_sign", False), result(one)),
            (cell("one_sign", True), result(moved)),
            (cell("two_signs", False), result(0.001)),
        ],
    )


def test_bias_needs_the_effect_and_its_controls() -> None:
    assert _verdict("bias", _bias(0.17, 0.002)) == REPRODUCED
    assert _verdict("bias", _bias(0.17, 0.17)) == CONDITIONAL
    assert _verdict("bias", _bias(0.001, 0.001)) == CONDITIONAL


def _kernels(**change: Any) -> Evidence:
    point = {"inputs": "uniform", "format": "bf16", "seqlen": 512, "head_dim": 64}
    value = {
        "configuration": {"device": "cuda"},
        "forward": [
            {**point, "backend": "ours", "result": _result(1)["flash"]},
            {**point, "backend": "baseline", "result": _result(1)["flash"]},
        ],
        "agreement": [
            {"preset": "kernel", "equal": 0.99, "within_1_ulp": 1.0, "largest_ulp": 1.0, **point}
        ],
        "run_to_run": [
            {"backend": "ours", "output": "dq", "same_bits": True, "repeats": 10,
             "relative": 0.0, "seqlen": 512},
            {"backend": "torch_flash", "output": "dq", "same_bits": False, "repeats": 10,
             "relative": 1e-3, "seqlen": 512},
        ],
        "speed": [
            {"backend": "torch_flash", "model": "m", "milliseconds": 10.0, "speedup": 0.5}
        ],
    }  # fmt: skip
    return Evidence(kernels={**value, **change})


def test_kernel_claims() -> None:
    evidence = _kernels()
    assert _verdict("real", evidence) == NOT_REPRODUCED
    assert _verdict("agreement", evidence) == REPRODUCED
    assert _verdict("noise", evidence) == REPRODUCED
    assert _verdict("speedup", evidence) == REPRODUCED
    for key in ("speedup", "agreement", "real"):
        assert _verdict(key, _kernels(configuration={"device": "cpu"})) == NOT_TESTED
    (claim,) = (claim for claim in CLAIMS if claim.key == "noise")
    assert "torch_flash dq 1.0e-03" in claim.judge(evidence).numbers[-1]


def test_a_forward_without_a_backward_is_half_the_claim() -> None:
    run = {"backend": "ours", "output": "out", "same_bits": True, "repeats": 10,
           "relative": 0.0, "seqlen": 512}  # fmt: skip
    assert _verdict("noise", _kernels(run_to_run=[run])) == CONDITIONAL


def test_kernel_claims_fail_with_bad_data() -> None:
    run = {"backend": "ours", "output": "dq", "same_bits": False, "repeats": 10,
           "relative": 1e-3, "seqlen": 512}  # fmt: skip
    assert _verdict("noise", _kernels(run_to_run=[run])) == NOT_REPRODUCED
    share = {"preset": "kernel", "equal": 0.96, "within_1_ulp": 0.991, "largest_ulp": 3.0,
             "format": "bf16", "head_dim": 64, "inputs": "normal"}  # fmt: skip
    assert _verdict("agreement", _kernels(agreement=[share])) == REPRODUCED
    for change in ({"equal": 0.94}, {"within_1_ulp": 0.989}):
        assert _verdict("agreement", _kernels(agreement=[share | change])) == NOT_REPRODUCED
    control = share | {"preset": "control", "equal": 0.6}
    assert _verdict("agreement", _kernels(agreement=[share, control])) == REPRODUCED
    assert _verdict("agreement", _kernels(agreement=[control])) == NOT_TESTED


def _training(**last: float) -> Evidence:
    steps = [0, 1, 2, 4, 8, 16]

    def history(end: float, start: float = 0.0) -> dict[str, Any]:
        values = [[start + (end - start) * step / 16] * 3 for step in steps]
        return {"steps": steps, "loss": [1.0] * 6, "max_difference": values,
                "wasserstein": values, "l1": values}  # fmt: skip

    ends = {"flash": 1.0, "init": 5.0, "sdpa": 1.2, "pure_bf16": 4.0, "repeat": 0.0} | last
    runs = {
        name: {"history": history(end, 4.0 if name == "init" else 0.0)}
        for name, end in ends.items()
    }
    return Evidence(training={"runs": runs, "live": []})


@pytest.mark.parametrize(
    ("key", "change", "expected"),
    [
        ("repeat", {}, REPRODUCED),
        ("repeat", {"repeat": 1e-9}, NOT_REPRODUCED),
        ("init", {}, REPRODUCED),
        ("init", {"flash": 6.0}, NOT_REPRODUCED),
        ("slope", {"flash": 0.9}, REPRODUCED),
        ("slope", {"flash": 1.1}, NOT_REPRODUCED),
        ("low-precision", {}, REPRODUCED),
        ("low-precision", {"pure_bf16": 1.9}, NOT_REPRODUCED),
        ("size", {}, REPRODUCED),
        ("size", {"sdpa": 2.1}, NOT_REPRODUCED),
    ],
)
def test_training_claims(key: str, change: dict[str, float], expected: str) -> None:
    assert _verdict(key, _training(**change)) == expected


def test_thresholds_are_what_the_report_says() -> None:
    """A claim's description of its test takes its numbers from the thresholds."""
    text = {claim.key: claim.how for claim in CLAIMS}
    checks: dict[str, Callable[[], float]] = {
        "tenfold": lambda: claims.TENFOLD[0],
        "more": lambda: claims.MORE,
        "length-max": lambda: claims.GROWTH,
        "larger": lambda: claims.FALL,
    }
    for key, threshold in checks.items():
        assert f"{threshold():g}" in text[key], key
