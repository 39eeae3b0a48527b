from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flash_attn_deterministic.deviation.training import runs
from flash_attn_deterministic.deviation.training.attention import (
    explicit_attention,
    find_attention,
    tiled_attention,
)
from flash_attn_deterministic.deviation.training.drawings import TEXT_LENGTH, WORDS, draw_batch
from flash_attn_deterministic.deviation.training.model import SIZES, Drawings
from flash_attn_deterministic.deviation.training.runs import RUNS, Run, Setup, measure, train
from flash_attn_deterministic.deviation.training.study import (
    TrainingPlan,
    plan_of,
    read_training,
    run_training,
)
from flash_attn_deterministic.errors import ArgumentError
from torch import nn

SETUP = Setup("", "tiny", steps=6, every=3, device="cpu")


def _tick() -> None:
    pass


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


def test_batches_follow_from_the_generator() -> None:
    first, again, other = (
        draw_batch(8, 16, torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tiled_attention_has_the_gradients_of_attention(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 2, 40, 16, generator=generator).to(dtype) for _ in range(4)]
    found = []
    for attend in (explicit_attention, tiled_attention):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
        found.append(torch.autograd.grad(attend(*leaves), leaves, tensors[3]))
    tolerance = 1e-5 if dtype == torch.float32 else 0.06
    for left, right in zip(*found, strict=True):
        assert left.dtype == right.dtype == dtype
        assert torch.allclose(left.float(), right.float(), atol=tolerance)


def test_attention_computes_in_its_own_dtype_under_autocast() -> None:
    q = torch.randn(1, 1, 8, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = find_attention("baseline")(q, q, q)
    assert torch.equal(out, explicit_attention(q, q, q))


def test_a_repeat_is_exact_and_every_difference_is_seen(tmp_path: Path) -> None:
    train(SETUP, RUNS["base"], tmp_path, "key", _tick)
    for name in ("repeat", "flash", "init", "pure_bf16", "fp32", "data"):
        history = train(SETUP, RUNS[name], tmp_path, "key", _tick)
        assert history["steps"] == [0, 1, 2, 3, 4, 6]
        last = {key: max(history[key][-1]) for key in runs.MEASURES}
        if name == "repeat":
            assert set(last.values()) == {0}
        else:
            assert all(value > 0 for value in last.values()), name


def test_weights_of_the_same_start_differ_only_later(tmp_path: Path) -> None:
    train(SETUP, RUNS["base"], tmp_path, "key", _tick)
    assert max(train(SETUP, RUNS["flash"], tmp_path, "key", _tick)["max_difference"][0]) == 0
    assert max(train(SETUP, RUNS["init"], tmp_path, "key", _tick)["max_difference"][0]) > 0


def test_measures_of_a_known_difference() -> None:
    base = {"w": torch.tensor([[0.0, 1.0], [2.0, 3.0]])}
    moved = {"w": torch.tensor([[1.0, 0.0], [2.0, 3.5]])}
    found = measure(moved, base)
    assert found == {"max_difference": [1.0], "wasserstein": [0.125], "l1": [0.625]}


def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        train(SETUP, RUNS["base"], folder, "key", _tick)
    expected = train(SETUP, RUNS["flash"], whole, "key", _tick)
    ticks = 0

    def stop() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(SETUP, RUNS["flash"], parts, "key", stop)
    found = train(SETUP, RUNS["flash"], parts, "key", _tick)
    assert json.dumps(found) == json.dumps(expected)
    weights = [
        torch.load(folder / "runs" / "flash" / "checkpoint.pt", weights_only=True)["model"]
        for folder in (whole, parts)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("key", "run"),
    [
        pytest.param("other", RUNS["base"], id="study"),
        pytest.param("key", replace(RUNS["base"], data_seed=5), id="run"),
    ],
)
def test_a_checkpoint_of_another_study_is_refused(tmp_path: Path, key: str, run: Run) -> None:
    train(SETUP, RUNS["base"], tmp_path, "key", _tick)
    checkpoint = tmp_path / "runs" / "base" / "checkpoint.pt"
    before = checkpoint.read_bytes()
    with pytest.raises(ArgumentError, match="expected a checkpoint of this study, got one of"):
        train(SETUP, run, tmp_path, key, _tick)
    assert checkpoint.read_bytes() == before


def test_a_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "base" / "checkpoint.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"nothing that torch wrote")
    with pytest.raises(ArgumentError, match="expected a checkpoint of this study"):
        train(SETUP, RUNS["base"], tmp_path, "key", _tick)


def test_the_loss_falls(tmp_path: Path) -> None:
    history = train(replace(SETUP, steps=60), RUNS["base"], tmp_path, "key", _tick)
    assert history["loss"][-1] < 0.75 * history["loss"][1]


class _Line:
    """A workload of one's own: y = 2 x."""

    def model(self, attention: object) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        x = torch.rand((8, 1), generator=generator)
        loss: torch.Tensor = (model(x) - 2 * x).square().mean()
        return loss


def test_a_workload_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_workload")
    module.line = _Line  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_workload", module)
    setup = replace(SETUP, workload="my_workload:line")
    history = train(setup, RUNS["base"], tmp_path, "key", _tick)
    assert history["names"] == ["weight"]


@pytest.mark.parametrize(
    "workload", ["nowhere:f", "math:nothing", "math", "math:pi", "builtins:list"]
)
def test_bad_workloads_are_refused(workload: str) -> None:
    with pytest.raises(ArgumentError, match="workload: expected"):
        replace(SETUP, workload=workload).make_workload()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"size": "huge"}, "size: expected one of", id="size"),
        pytest.param({"steps": 0}, "steps: expected at least 1", id="steps"),
        pytest.param({"runs": ["flashy"]}, "runs: expected names", id="runs"),
    ],
)
def test_bad_plans_are_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"size": "tiny", "device": "cpu", "steps": 3, "runs": None}
    with pytest.raises(ArgumentError, match=message):
        plan_of(**(arguments | change))  # type: ignore[arg-type]


def test_a_study_compares_runs_with_base_and_looks_into_the_model(tmp_path: Path) -> None:
    plan = TrainingPlan(SETUP, ("repeat",))
    run_training(plan, tmp_path)
    value = read_training(tmp_path / "training.json")
    assert list(value["runs"]) == ["base", "repeat"]
    assert {point["when"] for point in value["live"]} == {"before", "after"}
    assert len(value["live"]) == 2 * SIZES["tiny"].depth
    assert all(point["flash_max"] > 0 for point in value["live"])
    # More runs may be added to a study, another setup may not.
    run_training(replace(plan, runs=("repeat", "data")), tmp_path)
    with pytest.raises(ArgumentError, match="holds a study of another configuration"):
        run_training(replace(plan, setup=replace(SETUP, steps=7)), tmp_path)


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
