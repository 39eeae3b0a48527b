from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from flash_attn_deterministic_lab.deviation.emulate.steps import STEP_NAMES
from flash_attn_deterministic_lab.deviation.forward.cells import Cell, run_cell
from flash_attn_deterministic_lab.deviation.study.files import SCHEMA, read_result, write_result
from flash_attn_deterministic_lab.errors import ArgumentError


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


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("inputs", ["uniform", "normal"])
def test_d_from_the_rounded_output_and_its_cures(inputs: str, name: str) -> None:
    cell = Cell(kind="gradients", preset="kernel", format=name, inputs=inputs, seqlen=256, seeds=2)
    found = run_cell(cell)
    error = {place: max(found[f"{place} dq"]["relative"]) for place in
             ("explicit", "rounded", "residual", "residual8", "exact")}  # fmt: skip
    if inputs == "uniform":
        assert error["rounded"] > 10 * error["exact"]
        assert error["rounded"] > 4 * error["explicit"]
    for cure in ("residual", "residual8"):
        assert error[cure] < 1.1 * error["exact"]
    assert found["rounded dv"] == found["exact dv"]  # D is no part of dv


def test_only_and_exempt_take_steps_together() -> None:
    cell = Cell(only="rescale+weight")
    _, steps = cell.number_formats()
    assert set(steps) == {"rescale", "weight"}
    _, steps = replace(cell, only="", exempt="rescale+weight").number_formats()
    assert set(steps) == set(STEP_NAMES) - {"rescale", "weight"}


@pytest.mark.parametrize("text", ["", "{", '{"kind": "training"}', '{"kind":"forward","schema":0}'])
def test_other_files_are_no_results(tmp_path: Path, text: str) -> None:
    (tmp_path / "forward.json").write_text(text)
    with pytest.raises(ArgumentError, match=r"forward\.json: expected"):
        read_result(tmp_path, "forward")


def test_json_has_no_nan(tmp_path: Path) -> None:
    value = {"kind": "a", "schema": SCHEMA, "a": [float("nan"), float("inf"), 1 / 3]}
    write_result(tmp_path, value)
    assert read_result(tmp_path, "a")["a"] == [None, None, 0.3333]
