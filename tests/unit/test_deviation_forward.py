from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flash_attn_deterministic.deviation import study
from flash_attn_deterministic.deviation.cells import Cell, Result, run_cell
from flash_attn_deterministic.deviation.files import read_json, whole_file, write_json
from flash_attn_deterministic.deviation.forward import (
    FIGURES,
    Plan,
    quick_plan,
    read_forward,
    run_forward,
)
from flash_attn_deterministic.deviation.steps import PRESETS
from flash_attn_deterministic.errors import ArgumentError

PLAN = Plan(
    presets=("paper",), figures=("3",), inputs=("uniform",), seeds=2, seqlens=(16, 32, 48),
    head_dim=16, sram=512, formats=("bf16", "fp32"),
)  # fmt: skip


def test_cells_are_the_seeds_own() -> None:
    """A draw's numbers don't depend on how many others are computed with it."""
    cell = Cell(seqlen=64, head_dim=16, seeds=3)
    three, one = run_cell(cell), run_cell(replace(cell, seeds=1))
    for pair in ("flash", "baseline", "difference"):
        assert three[pair]["max"][:1] == one[pair]["max"]
        assert len(three[pair]["max"]) == 3


def test_the_papers_effect_at_a_small_size() -> None:
    found = run_cell(Cell(preset="paper", inputs="uniform", seqlen=512, seeds=2))
    assert min(found["flash"]["max"]) > 3 * max(found["baseline"]["max"])
    found = run_cell(Cell(preset="kernel", inputs="uniform", seqlen=512, seeds=2))
    assert max(found["flash"]["max"]) < 1.5 * min(found["baseline"]["max"])


def test_biased_rounding() -> None:
    def away(place: str = "product", **change: object) -> float:
        cell = Cell(kind="bias", preset="kernel", inputs="one_sign", ties=2, seeds=4)
        result = run_cell(replace(cell, **change))  # type: ignore[arg-type]
        return sum(result[place]["away"]) / 4

    assert away() > 0.1
    assert abs(away("output")) < 0.02
    for change in ({"inputs": "two_signs"}, {"shifted": True}, {"format": "bf16:sr"}):
        assert abs(away(**change)) < 0.02, change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"format": "fp9"}, "format: expected", id="format"),
        pytest.param({"preset": "none"}, "preset: expected", id="preset"),
        pytest.param({"preset": "kernel", "block_c": 48}, "block_c: expected a power", id="block"),
        pytest.param({"preset": "tree", "block_c": 512}, "block_c: expected a divisor", id="split"),
        pytest.param({"seqlen": 0}, "seqlen: expected at least 1", id="seqlen"),
        pytest.param({"seeds": 0}, "seeds: expected at least 1", id="seeds"),
        pytest.param({"only": "P"}, "steps: expected names", id="step"),
    ],
)
def test_bad_cells_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        replace(Cell(), **change).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"figures": ("7",)}, "figures: expected 3, 4", id="figure"),
        pytest.param({"inputs": ("cauchy",)}, "inputs: expected one of", id="inputs"),
        pytest.param({"inputs": ("missing.pt",)}, "inputs: expected a file", id="file"),
        pytest.param({"sram": 63}, "sram: expected at least", id="sram"),
        pytest.param({"block_c": 64}, "block_r, block_c: expected", id="blocks-dont-fit"),
        pytest.param({"formats": ("fp9",)}, "format: expected", id="format"),
    ],
)
def test_bad_plans_write_nothing(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        run_forward(replace(PLAN, **change), tmp_path / "new")  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_every_figure_has_cells_that_pass_their_checks() -> None:
    plans = [Plan(figures=tuple(FIGURES), presets=(name,)) for name in PRESETS]
    plans += [Plan(figures=tuple(FIGURES)), quick_plan(Plan(figures=tuple(FIGURES)))]
    for plan in plans:
        plan.check()
        assert all(FIGURES[name](plan) for name in FIGURES)


def test_nan_inputs_are_refused(tmp_path: Path) -> None:
    tensor = torch.ones(1, 1, 8, 8)
    torch.save([{"q": tensor, "k": tensor * torch.nan, "v": tensor}], tmp_path / "calls.pt")
    plan = replace(PLAN, inputs=(str(tmp_path / "calls.pt"),))
    with pytest.raises(ArgumentError, match="k: expected finite values, got 64"):
        run_forward(plan, tmp_path / "out")


def test_captured_tensors_are_inputs(tmp_path: Path) -> None:
    q, k, v = (torch.randn(2, 3, 20, 16) for _ in range(3))
    torch.save([{"q": q, "k": k, "v": v}], tmp_path / "calls.pt")
    plan = replace(PLAN, inputs=(str(tmp_path / "calls.pt"),), figures=("3", "5", "stochastic"))
    value = run_forward(plan, tmp_path / "out")
    assert len(value["figures"]["5"]) == 1  # they have one length
    for entry in value["cells"].values():
        assert len(entry["result"]["flash"]["max"]) == 6


def test_a_run_resumes_and_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_forward(PLAN, tmp_path / "whole")
    computed: list[Cell] = []

    def interrupted(cell: Cell) -> Result:
        if computed:
            raise KeyboardInterrupt
        computed.append(cell)
        return run_cell(cell)

    monkeypatch.setattr(study, "run_cell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_forward(PLAN, tmp_path / "parts")
    assert len(list((tmp_path / "parts" / "cells").glob("*.json"))) == 1
    assert not (tmp_path / "parts" / "forward.json").exists()

    def rest(cell: Cell) -> Result:
        assert cell not in computed
        return run_cell(cell)

    monkeypatch.setattr(study, "run_cell", rest)
    run_forward(PLAN, tmp_path / "parts")
    parts = json.loads((tmp_path / "parts" / "forward.json").read_text())
    first = json.loads((tmp_path / "whole" / "forward.json").read_text())
    assert parts["cells"] == first["cells"]
    assert parts["hash"] == whole["hash"]


def test_several_processes_give_the_same(tmp_path: Path) -> None:
    one = run_forward(PLAN, tmp_path / "one")
    two = run_forward(PLAN, tmp_path / "two", jobs=2)
    assert one["cells"] == two["cells"]


def test_another_study_is_not_overwritten(tmp_path: Path) -> None:
    run_forward(PLAN, tmp_path)
    before = (tmp_path / "forward.json").read_bytes()
    other = replace(PLAN, seeds=1)
    with pytest.raises(ArgumentError, match=r"out: .* holds a study of another"):
        run_forward(other, tmp_path)
    assert (tmp_path / "forward.json").read_bytes() == before
    run_forward(other, tmp_path, force=True)
    assert (tmp_path / "forward.json").read_bytes() != before


def test_a_folder_of_something_else_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ArgumentError, match="out: expected an empty folder"):
        run_forward(PLAN, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_results_read_back_as_they_were(tmp_path: Path) -> None:
    run_forward(PLAN, tmp_path)
    figures = read_forward(tmp_path / "forward.json")
    assert [cell for cell, _ in figures["3"]] == FIGURES["3"](PLAN)


@pytest.mark.parametrize("text", ["", "{", '{"kind": "training"}', '{"kind":"forward","schema":0}'])
def test_other_files_are_no_results(tmp_path: Path, text: str) -> None:
    (tmp_path / "forward.json").write_text(text)
    with pytest.raises(ArgumentError, match=r"forward\.json: expected"):
        read_forward(tmp_path / "forward.json")


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    def fail() -> None:
        with whole_file(tmp_path / "file") as temporary:
            temporary.write_text("half")
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_json_has_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": [float("nan"), float("inf"), 1 / 3]})
    assert read_json(tmp_path / "a.json") == {"a": [None, None, 0.333333]}
