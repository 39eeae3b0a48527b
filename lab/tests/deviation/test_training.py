from __future__ import annotations

import math
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic_lab.deviation.attentions.registry import find_attention
from flash_attn_deterministic_lab.deviation.study import environment
from flash_attn_deterministic_lab.deviation.study.files import read_result
from flash_attn_deterministic_lab.deviation.training import training_study
from flash_attn_deterministic_lab.deviation.training.language import (
    LANGUAGE_SIZES,
    Language,
    corpus,
)
from flash_attn_deterministic_lab.deviation.training.runs import (
    MEASURES,
    Run,
    Setup,
    State,
    States,
    compare,
    nudged,
    train,
)
from flash_attn_deterministic_lab.deviation.training.text_to_image import (
    SIZES,
    TEXT_LENGTH,
    WORDS,
    Drawings,
    draw_batch,
)
from flash_attn_deterministic_lab.deviation.training.training_study import (
    TrainingPlan,
    left_out,
    plan_of,
    printed,
    run_of,
    run_training,
)
from flash_attn_deterministic_lab.deviation.training.workload import find_workload
from flash_attn_deterministic_lab.errors import ArgumentError
from torch import nn

SETUP = Setup("drawings-tiny", "explicit", steps=6, device="cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    with environment.one_thread():
        yield


def test_drawings_show_what_the_text_says() -> None:
    images, texts = draw_batch(64, 32, torch.Generator().manual_seed(0))
    assert images.shape == (64, 3, 32, 32)
    assert texts.shape == (64, TEXT_LENGTH)
    assert float(images.min()) >= -1
    assert float(images.max()) <= 1
    for image, text in zip(images, texts, strict=True):
        words = {WORDS[index] for index in text.tolist()}
        image = image * 0.5 + 0.5
        if "small" in words:
            corner = float(image[0, 0, 0])
            assert corner == pytest.approx(0.1 if "dark" in words else 0.8, abs=1e-6)
        # The pixel furthest from grey has the shape's colour.
        flat = image.flatten(1)
        pixel = flat[:, (flat.amax(0) - flat.amin(0)).argmax()]
        strongest = {"red": 0, "green": 1, "blue": 2}
        colour = next(word for word in (*strongest, "yellow") if word in words)
        if colour == "yellow":
            assert pixel[2] < pixel[:2].min()
        else:
            assert int(pixel.argmax()) == strongest[colour]


@pytest.fixture(scope="module")
def base() -> States:
    return train(SETUP, Run("base", against=""), 0, None, keep=True)[1]


def test_a_repeat_is_exact_and_every_difference_is_seen(base: States) -> None:
    history, _, _ = train(SETUP, run_of("repeat"), 0, base, keep=False)
    assert all(value == 0 for name in MEASURES for value in history[name])
    names = ("nudge-1", "init", "data", "fp32", "fp16", "pure_bf16", "sdpa", "paper", "kernel",
             "explicit:p5")  # fmt: skip
    for name in names:
        history, _, _ = train(SETUP, run_of(name), 0, base, keep=False)
        assert history["l2"][-1] > 0, name
        starts_apart = name in ("init", "nudge-1", "pure_bf16")
        assert (history["l2"][0] > 0) == starts_apart, name
        assert math.isfinite(history["probe"])


@pytest.mark.parametrize("number", [1, 2])
def test_a_nudge_is_one_gap_of_one_weight(base: States, number: int) -> None:
    run = run_of(f"nudge-{number}")
    history, _, _ = train(replace(SETUP, steps=1), run, 0, base, keep=False)
    weight = base[0].weights[0].flatten()[number - 1].bfloat16()
    gap = float(torch.nextafter(weight.abs(), torch.tensor(math.inf).bfloat16()) - weight.abs())
    assert history["max_difference"][0] * len(base[0].weights) == pytest.approx(gap)


@pytest.mark.parametrize("name", ["drawings-small", "language-small"])
def test_a_nudged_weight_has_a_gradient(name: str) -> None:
    """A row of an embedding that no batch reads has none: nothing would follow from its nudge."""
    workload = find_workload(name)
    model = workload.model(find_attention("explicit"))
    loss = workload.loss(model, workload.batch(torch.Generator().manual_seed(0)))
    (gradient,) = torch.autograd.grad(loss, [nudged(model)])
    assert gradient.flatten()[:3].count_nonzero() == 3


def test_float16_does_not_underflow(base: States) -> None:
    """Loss scaling: as near to float32 as bfloat16 is, or nearer, from the first step on."""
    _, fp32, _ = train(SETUP, run_of("fp32"), 0, None, keep=True)
    near, _, _ = train(SETUP, run_of("fp16"), 0, fp32, keep=False)
    far, _, _ = train(SETUP, replace(run_of("fp32"), precision="bf16"), 0, fp32, keep=False)
    assert near["l2"][-1] < far["l2"][-1]


def test_distances_of_known_weights() -> None:
    base = [torch.tensor([[0.0, 1.0], [2.0, 3.0]])]
    moved = [torch.tensor([[1.0, 0.0], [2.0, 3.5]])]
    outputs = torch.tensor([1.0, -1.0])
    found = compare(State(moved, outputs + 0.5), State(base, outputs))
    assert found == {
        "max_difference": 1.0, "wasserstein": 0.125, "l1": 0.625,
        "l2": pytest.approx(1.5 / math.sqrt(14)), "function": pytest.approx(0.5 / math.sqrt(2)),
    }  # fmt: skip


PLAN = TrainingPlan(SETUP, ("repeat", "sdpa", "fp16-sdpa"), (0, 1))


def test_a_study_pairs_seeds_and_keeps_the_first_model(tmp_path: Path) -> None:
    value = run_training(PLAN, tmp_path)
    assert list(value["seeds"]) == ["0", "1"]
    # Its flash in FP16 is compared with fp16, which was not asked for, and that with fp32.
    assert set(value["seeds"]["0"]) == {"base", "repeat", "sdpa", "fp32", "fp16", "fp16-sdpa"}
    assert value["runs"]["fp16-sdpa"]["against"] == "fp16"
    assert value["seeds"]["0"]["fp16-sdpa"]["l2"][-1] > 0
    assert (tmp_path / "base.pt").exists()
    read = read_result(tmp_path, "training")
    assert read["seeds"].keys() == value["seeds"].keys()
    text = printed(value)
    assert "sdpa" in text
    assert "6 steps each" in text


def test_jobs_train_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = replace(PLAN, runs=("repeat",))
    for jobs in (1, 2):
        run_training(plan, tmp_path / str(jobs), jobs=jobs)
    one, two = (read_result(tmp_path / jobs, "training")["seeds"] for jobs in ("1", "2"))
    assert one == two
    capsys.readouterr()
    plan = replace(plan, seeds=(0,))
    late = run_training(plan, tmp_path / "late", seconds=0, jobs=2)
    assert left_out(plan, late) == 1
    assert "2/2" not in capsys.readouterr().err  # what was left out is not done
    with pytest.raises(ArgumentError, match="jobs: expected at least 1, got 0"):
        run_training(plan, tmp_path, jobs=0)


def test_held_out_text_is_not_trained_on() -> None:
    language = Language(replace(LANGUAGE_SIZES["tiny"], batch=4096, context=8))
    end = len(corpus()) - len(corpus()) // 16
    with pytest.MonkeyPatch.context() as patch:
        places = torch.arange(len(corpus()))
        patch.setattr("flash_attn_deterministic_lab.deviation.training.language.corpus",
                      lambda: places)  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        assert language.batch(generator).max() < end <= language.held_out(generator).min()


def test_torch_is_asked_for_algorithms_that_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warned(*arguments: Any) -> Any:
        assert torch.are_deterministic_algorithms_enabled()
        warnings.warn("op does not have a deterministic implementation", stacklevel=1)
        return train(*arguments)

    monkeypatch.setattr(training_study, "train", warned)
    value = run_training(replace(PLAN, runs=("repeat",), seeds=(0,)), tmp_path)
    assert value["unrepeatable"] == ["op does not have a deterministic implementation"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_interrupted_study_goes_on_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_training(PLAN, tmp_path / "whole")
    started: list[str] = []

    def interrupted(setup: Setup, run: Run, seed: int, *rest: Any) -> Any:
        if len(started) == 3:
            started.append("stop")
            raise KeyboardInterrupt
        started.append(run.name)
        return train(setup, run, seed, *rest)

    monkeypatch.setattr(training_study, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_training(PLAN, tmp_path / "parts")
    assert len(read_result(tmp_path / "parts", "training")["seeds"]["0"]) == 3
    run_training(PLAN, tmp_path / "parts")
    whole, parts = (read_result(tmp_path / n, "training") for n in ("whole", "parts"))
    assert parts["seeds"] == whole["seeds"]
    # More seeds and runs may be added to a study, another setup may not.
    run_training(replace(PLAN, seeds=(0, 1, 2), runs=("repeat", "data")), tmp_path / "parts")
    with pytest.raises(ArgumentError, match="holds a study of another configuration"):
        run_training(replace(PLAN, setup=replace(SETUP, steps=7)), tmp_path / "parts")


def test_a_run_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(setup: Setup, run: Run, *rest: Any) -> Any:
        if run.name in ("sdpa", "fp32"):
            raise torch.cuda.OutOfMemoryError("no memory\nat all")
        return train(setup, run, *rest)

    monkeypatch.setattr(training_study, "train", fails)
    value = run_training(PLAN, tmp_path)
    assert value["missing"] == {"sdpa": "no memory", "fp32": "no memory"}
    assert "missing: sdpa: no memory" in printed(value)
    # fp16 has nothing that it could be compared with.
    assert set(value["seeds"]["0"]) == {"base", "repeat"}
    assert left_out(PLAN, value) == 0
    # However short the time is, there is a first run: other studies begin with its weights.
    late = run_training(PLAN, tmp_path / "late", seconds=0)
    assert set(late["seeds"]["0"]) == {"base"}


@pytest.mark.parametrize("workload", ["drawings-tiny", "language-tiny"])
def test_the_loss_falls(workload: str) -> None:
    setup = Setup(workload, "sdpa", steps=60, device="cpu")
    history, _, _ = train(setup, Run("base", against=""), 0, None, keep=False)
    assert history["loss"][-1] < 0.8 * history["loss"][1]
    assert history["probe"] < 0.9 * history["loss"][1]


def test_the_language_model_sees_no_byte_to_come() -> None:
    workload = Language(LANGUAGE_SIZES["tiny"])
    model = workload.model(find_attention("sdpa"))
    batch = workload.batch(torch.Generator().manual_seed(0))
    assert batch.shape == (4, 49)
    changed = batch.clone()
    changed[:, 30:] = 65
    first, second = (workload.outputs(model, tokens) for tokens in (batch, changed))
    assert first.shape == (4, 48, 256)
    assert torch.equal(first[:, :30], second[:, :30])
    assert not torch.equal(first[:, 30:], second[:, 30:])


class _Line:
    """A workload of one's own: y = 2 x."""

    def model(self, attention: object) -> nn.Module:
        return nn.Linear(1, 1)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return torch.rand((8, 1), generator=generator)

    def outputs(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch)
        return out

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model(batch) - 2 * batch).square().mean()
        return loss


def test_a_workload_of_ones_own_and_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_workload")
    module.line = _Line  # type: ignore[attr-defined]
    module.half = lambda: nn.Linear(1, 1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_workload", module)
    setup = Setup("my_workload:line", "explicit", steps=200, device="cpu")
    history, _, model = train(setup, Run("base", against="", precision="fp32"), 0, None, False)
    assert history["probe"] < 1e-3
    assert float(next(model.parameters()).detach()) == pytest.approx(2, abs=0.1)
    with pytest.raises(ArgumentError, match="got Linear without model, optimizer, batch"):
        find_workload("my_workload:half")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"workload": "huge"}, "workload: expected one of", id="workload"),
        pytest.param({"workload": "math:pi"}, "workload: expected math:pi", id="no-callable"),
        pytest.param({"workload": "builtins:list"}, "workload: expected builtins", id="no-parts"),
        pytest.param({"steps": -1}, "steps: expected at least 1", id="steps"),
        pytest.param({"runs": ["flashy"]}, "attention: expected one of", id="runs"),
        pytest.param({"runs": ["explicit:p99"]}, "format: expected", id="format"),
        pytest.param({"seeds": [-1]}, "seeds: expected at least one", id="seeds"),
        pytest.param({"seeds": []}, "seeds: expected at least one", id="no-seeds"),
        pytest.param({"base": "flashy"}, "attention: expected one of", id="base"),
    ],
)
def test_bad_plans_are_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"workload": "drawings-tiny", "device": "cpu", "steps": 3}
    with pytest.raises(ArgumentError, match=message):
        plan_of(**(arguments | change))  # type: ignore[arg-type]


def test_the_model_sees_text_and_time() -> None:
    torch.manual_seed(0)
    workload = Drawings(SIZES["tiny"])
    model = workload.model(find_attention("sdpa"))
    images, texts = draw_batch(2, 16, torch.Generator().manual_seed(0))
    times = torch.tensor([0.2, 0.2])
    plain = model(images, texts, times)
    assert plain.shape == images.shape
    assert not torch.equal(plain, model(images, texts.flip(0), times))
    assert not torch.equal(plain, model(images, texts, times + 0.5))
