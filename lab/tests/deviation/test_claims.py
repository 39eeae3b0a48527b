from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from flash_attn_deterministic_lab.deviation.emulate.steps import TILING
from flash_attn_deterministic_lab.deviation.forward.cells import Cell
from flash_attn_deterministic_lab.deviation.forward.plan import Points
from flash_attn_deterministic_lab.deviation.numbers.intervals import Interval
from flash_attn_deterministic_lab.deviation.report.claims import CLAIMS
from flash_attn_deterministic_lab.deviation.report.judging import (
    CONDITIONAL,
    KERNELS,
    NOT_REPRODUCED,
    NOT_TESTED,
    ON_GPU,
    REPRODUCED,
    SINKS,
    TRAINING,
    UNDECIDED,
    Case,
    Evidence,
    decide,
    emulated,
    evidence_of,
    study_of,
)

METRICS = ("max", "mean", "std", "relative", "max_relative")


def _spread(value: float, width: float = 0.01) -> list[float]:
    return [value * (1 + width * step) for step in (-1, -0.5, 0, 0.5, 1)]


def _result(flash: float, baseline: float = 1.0, difference: float = 1.0) -> dict[str, Any]:
    values = {"flash": flash, "baseline": baseline, "difference": difference}
    return {pair: {m: _spread(value) for m in METRICS} for pair, value in values.items()}


def _verdict(key: str, evidence: Evidence) -> str:
    (claim,) = (claim for claim in CLAIMS if claim.key == key)
    return claim.judge(evidence).verdict


def _case(low: float, middle: float, high: float) -> Case:
    return Case("case", Interval(low, middle, high), 1.0, 2.0)


INSIDE, BELOW, PARTLY = _case(1.1, 1.2, 1.3), _case(0.1, 0.2, 0.3), _case(0.9, 1.2, 1.3)


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        pytest.param([INSIDE, INSIDE], REPRODUCED, id="all"),
        pytest.param([INSIDE, BELOW], CONDITIONAL, id="some"),
        pytest.param([INSIDE, PARTLY], UNDECIDED, id="none-fails"),
        pytest.param([INSIDE, BELOW, PARTLY], CONDITIONAL, id="some-decided"),
        pytest.param([BELOW, PARTLY], NOT_REPRODUCED, id="none"),
        pytest.param([PARTLY], UNDECIDED, id="undecided"),
        pytest.param([_case(2.1, 2.2, 2.3)], NOT_REPRODUCED, id="above-is-out-too"),
        pytest.param([_case(math.nan, math.nan, math.nan)], UNDECIDED, id="overflow"),
        pytest.param([], NOT_TESTED, id="no-data"),
    ],
)
def test_verdict_of_cases(cases: list[Case], expected: str) -> None:
    assert decide(cases).verdict == expected


def test_a_case_says_on_which_side_it_fails() -> None:
    assert "(below the range)" in str(BELOW)
    assert "(above the range)" in str(_case(3, 4, 5))
    assert "(not decided)" in str(PARTLY)
    assert str(INSIDE) == "case: 1.2 [1.1, 1.3]"


def test_nothing_is_judged_without_data() -> None:
    assert {claim.judge({}).verdict for claim in CLAIMS} == {NOT_TESTED}
    assert len({claim.key for claim in CLAIMS}) == len(CLAIMS)


def _sweep(figure: str, field: str, differences: dict[Any, float]) -> Evidence:
    """Cells of a figure that differ in a field, with so large a difference from baseline."""
    points: Points = [
        (replace(Cell(), **{field: value}), _result(1, 1, difference))
        for value, difference in differences.items()
    ]
    return {emulated(figure): points}


FALLS = {"bf16": 8.0, "fp16": 1.0, "fp32": 1e-3, "fp64": 1e-9}
RISES = {"bf16": 3.0, "fp16": 4.0, "fp32": 1.0, "fp64": 0.1}


@pytest.mark.parametrize(
    ("key", "evidence", "expected"),
    [
        ("formats", _sweep("3", "format", FALLS), REPRODUCED),
        ("formats", _sweep("3", "format", RISES), NOT_REPRODUCED),
        *((key, _sweep("5", "seqlen", {2048: factor, 128: 1.0}), expected)
          for key in ("length-max", "length-relative", "length-mean")
          for factor, expected in ((1.3, NOT_REPRODUCED), (1.7, REPRODUCED))),
        ("larger", _sweep("6c", "block_c", {512: 0.9, 8: 1.0}), NOT_REPRODUCED),
        ("larger", _sweep("6c", "block_c", {512: 0.7, 8: 1.0}), REPRODUCED),
        # Pairs: the second over the first.
        *((key, _sweep(figure, "block_c", {128: 1.0, 64: factor}),
           REPRODUCED if factor == wanted else NOT_REPRODUCED)
          for key, figure, wanted in (("swapped", "6a", 1.5), ("square", "6b", 1.0))
          for factor in (1.5, 1.0, 0.5)),
    ],
)  # fmt: skip
def test_claims_on_sweeps(key: str, evidence: Evidence, expected: str) -> None:
    assert _verdict(key, evidence) == expected


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(4.5, NOT_REPRODUCED), (5.0, UNDECIDED), (10, REPRODUCED), (21, NOT_REPRODUCED)],
)
def test_tenfold_is_two_sided(ratio: float, expected: str) -> None:
    result = {**_result(1), "flash": dict.fromkeys(METRICS, _spread(ratio, 0.04))}
    assert _verdict("tenfold", {emulated("5"): [(Cell(), result)]}) == expected


@pytest.mark.parametrize(
    ("alone", "others", "expected"),
    [(0.9, 0.1, REPRODUCED), (0.7, 0.8, CONDITIONAL), (0.05, 0.95, NOT_REPRODUCED)],
    ids=["cause", "not-alone", "no-cause"],
)
@pytest.mark.parametrize(("key", "steps"), [("rescale", "rescale"), ("tiling", TILING)])
def test_steps_alone_and_all_steps_but_them(
    key: str, steps: str, alone: float, others: float, expected: str
) -> None:
    points: Points = [
        (Cell(), _result(1)),
        (Cell(only="state"), _result(0.5)),
        (Cell(only=steps), _result(alone)),
        (Cell(exempt=steps), _result(others)),
    ]
    assert _verdict(key, {emulated("ablation"): points}) == expected


@pytest.mark.parametrize(
    ("rounded", "residual", "expected"), [(20.0, 1.0, REPRODUCED), (1.0, 5.0, NOT_REPRODUCED)]
)
def test_claims_about_d(rounded: float, residual: float, expected: str) -> None:
    values = {"rounded": rounded, "residual": residual, "residual8": residual, "exact": 1.0}
    result: Any = {
        f"{place} {name}": {"relative": _spread(value, 0.001)}
        for place, value in values.items()
        for name in ("dq", "dk")
    }
    evidence: Evidence = {emulated("backward"): [(Cell(kind="gradients"), result)]}
    for key in ("d-matters", "d-cure", "d-cure-8"):
        assert _verdict(key, evidence) == expected


POINT = {"inputs": "uniform", "format": "bf16", "seqlen": 512, "head_dim": 64}


def _kernels(residual: float = 0.1) -> Evidence:
    value = {
        "forward": [
            {**POINT, "backend": n, "result": _result(1)["flash"]} for n in ("ours", "explicit")
        ],
        "backward": [
            {**POINT, "backend": name, "gradient": "dq", "result": _result(size)["flash"]}
            for name, size in (("ours", 6.0), ("ours+residual", residual), ("explicit", 1.0))
        ],
        "run_to_run": [
            {"backend": "ours", "output": "dq", "same_bits": True, "repeats": 10, "seqlen": 512},
        ],
    }  # fmt: skip
    return {ON_GPU: value, KERNELS: value}


def test_kernel_claims() -> None:
    evidence = _kernels()
    assert _verdict("real", evidence) == NOT_REPRODUCED
    for key in ("real-backward", "real-residual", "noise"):
        assert _verdict(key, evidence) == REPRODUCED, key
    assert _verdict("real-residual", _kernels(residual=3.0)) == NOT_REPRODUCED
    kernels = {**evidence[ON_GPU], "configuration": {"device": "cpu"}}
    for key in ("real", "real-backward"):
        assert _verdict(key, evidence_of({"kernels": kernels})) == NOT_TESTED
    assert _verdict("noise", evidence_of({"kernels": kernels})) == REPRODUCED
    kernels["run_to_run"][0]["same_bits"] = False
    assert _verdict("noise", evidence_of({"kernels": kernels})) == NOT_REPRODUCED


def _training(**scales: float) -> Evidence:
    """Five seeds whose distances grow with the square root of the steps, to so many hundredths."""
    steps, against = [0, 1, 4, 16, 64], {"base": "", "fp16": "fp32", "fp16-kernel": "fp16"}
    scales = {"base": 0.0, "repeat": 0.0, "kernel": 1.0, "nudge-1": 1.0, "nudge-2": 1.1,
              "init": 50.0, "fp32": 1.0, "fp16": 3.0, "fp16-kernel": 1.0} | scales  # fmt: skip
    seeds: dict[str, Any] = {str(seed): {} for seed in range(5)}
    for number, histories in enumerate(seeds.values()):
        for name, scale in scales.items():
            distances = [scale * (1 + number / 50) * 1e-2 * step**0.5 for step in steps]
            of_all = dict.fromkeys(("max_difference", "wasserstein", "l2", "function"), distances)
            histories[name] = {"steps": steps, "probe": 0.2, **of_all}
    runs = {name: {"against": against.get(name, "base"), "attention": name} for name in scales}
    return {TRAINING: {"runs": runs, "seeds": seeds, "configuration": {}}}


@pytest.mark.parametrize(
    ("key", "scales", "expected"),
    [
        ("repeat", {}, REPRODUCED),
        ("repeat", {"repeat": 1e-7}, NOT_REPRODUCED),
        ("init", {}, REPRODUCED),
        ("init", {"init": 1.0}, NOT_REPRODUCED),
        ("grows", {}, REPRODUCED),
        ("low-precision", {}, REPRODUCED),
        ("low-precision", {"fp16": 10.0}, NOT_REPRODUCED),
        ("low-precision", {"fp16": 0.5}, NOT_REPRODUCED),
        ("steeper", {}, REPRODUCED),
        ("steeper", {"fp16": 0.5}, NOT_REPRODUCED),
        ("null", {}, REPRODUCED),
        ("null", {"kernel": 10.0}, CONDITIONAL),  # farther, not steeper
        ("loss", {}, REPRODUCED),
        ("language-loss", {}, NOT_TESTED),
    ],
)
def test_claims_on_trainings(key: str, scales: dict[str, float], expected: str) -> None:
    assert _verdict(key, _training(**scales)) == expected


def test_a_language_model_has_verdicts_of_its_own() -> None:
    value = {**_training()[TRAINING], "kind": "training",
             "configuration": {"workload": "language-small"}}  # fmt: skip
    evidence = evidence_of({study_of(value): value})
    assert _verdict("language-low-precision", evidence) == REPRODUCED
    assert _verdict("low-precision", evidence) == NOT_TESTED


@pytest.mark.parametrize(
    ("loss", "expected"), [(0.2, REPRODUCED), (0.206, NOT_REPRODUCED), (None, UNDECIDED)]
)
def test_a_changed_loss_is_a_share_of_it(loss: float | None, expected: str) -> None:
    evidence = _training()
    for histories in evidence[TRAINING]["seeds"].values():
        for name in ("kernel", "nudge-1", "nudge-2", "init", "fp32", "repeat"):
            histories[name]["probe"] = loss
    assert _verdict("loss", evidence) == expected


LINES_NAME, MOVED, CURED = "torch-lines", "torch-lines-shifted", "kernel+residual"


def _sinks(change: dict[str, tuple[float, float]]) -> Evidence:
    """Gradients on rows with equal maxima: (error, systematic share) of each attention."""
    values = {LINES_NAME: (150.0, 0.7), MOVED: (70.0, 0.0), "kernel": (20, 0.4),
              "sdpa": (80, 0.9), "explicit": (20, 0.9), CURED: (0.9, 0.0)}  # fmt: skip
    whole = {
        name: {"error": [error * 0.9, error, error * 1.1],
               "systematic": [share - 0.05, share, share + 0.05]}
        for name, (error, share) in (values | change).items()
    }  # fmt: skip
    return {SINKS: whole}


@pytest.mark.parametrize(
    ("key", "change", "expected"),
    [
        ("failure-lines", {}, REPRODUCED),
        ("failure-lines", {LINES_NAME: (150.0, 0.0)}, CONDITIONAL),
        ("failure-lines", {LINES_NAME: (1.0, 0.0)}, NOT_REPRODUCED),
        ("failure-remedy", {}, REPRODUCED),
        ("failure-remedy", {MOVED: (70.0, 0.7)}, NOT_REPRODUCED),
        ("failure-remedy", {MOVED: (70.0, 0.08)}, UNDECIDED),
        ("failure-kernels", {}, NOT_REPRODUCED),
        ("failure-kernels", {"kernel": (1.0, 0.0)}, CONDITIONAL),
        ("failure-residual", {}, REPRODUCED),
        ("failure-residual", {CURED: (20.0, 0.4)}, NOT_REPRODUCED),
    ],
)
def test_failure_claims(key: str, change: dict[str, Any], expected: str) -> None:
    assert _verdict(key, _sinks(change)) == expected
