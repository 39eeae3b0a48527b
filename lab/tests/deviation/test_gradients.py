from __future__ import annotations

import itertools
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic_lab.cli import main
from flash_attn_deterministic_lab.deviation.attentions.registry import find_attention
from flash_attn_deterministic_lab.deviation.emulate.steps import PRESETS
from flash_attn_deterministic_lab.deviation.instrument import gradients
from flash_attn_deterministic_lab.deviation.instrument.gradients import run_gradients
from flash_attn_deterministic_lab.deviation.instrument.target import ModelPlan, Target, load_target
from flash_attn_deterministic_lab.deviation.study.files import read_result
from flash_attn_deterministic_lab.errors import ArgumentError
from torch import nn
from torch.nn import functional


def _biased(q: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """Attention whose output is always a little too large."""
    return functional.scaled_dot_product_attention(q, *rest, **options) + 0.05


class _Model(nn.Module):
    """Returns a loss from its call, as a user's model does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (out.transpose(1, 2).flatten(2).float() - target).square().mean()


def _batches() -> Any:
    generator = torch.Generator().manual_seed(3)
    while True:
        x = torch.randn(2, 12, 16, generator=generator)
        yield {"x": x, "target": x.roll(1, 1)}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    found = types.ModuleType("my_model")
    found.__dict__.update(
        model=_Model, batches=_batches, biased=_biased, blind=lambda: nn.Linear(16, 1),
        nothing=lambda: None,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "my_model", found)
    return "my_model"


def test_a_users_model_and_a_biased_kernel(module: str, tmp_path: Path) -> None:
    """The positive control: an error of one sign has a systematic share near 1."""
    target = load_target(f"{module}:model", f"{module}:batches", 6, "cpu")
    names = ("sdpa-math", "explicit", f"{module}:biased", "fa3")
    value = run_gradients(ModelPlan("m", names), target, tmp_path)
    # What is added to every output reaches the bias of V the same way in every batch.
    bias = value["layers"]["qkv.bias"]
    assert bias[f"{module}:biased"]["systematic"][0] > 0.5
    assert bias["explicit"]["systematic"][1] < 0.5
    whole = value["whole"]
    assert whole["sdpa-math"]["error"][1] < whole["explicit"]["error"][1] < 0.1
    assert whole["explicit"]["error"][2] < whole[f"{module}:biased"]["error"][0] * 10
    for found in whole.values():
        for low, middle, high in found.values():
            assert low <= middle <= high
    assert set(value["layers"]) == {"qkv.weight", "qkv.bias"}
    assert 0.02 < value["forward"]["00"][f"{module}:biased"][1] < 0.5
    assert value["missing"]["fa3"] == "fa3 does not run on cpu"
    assert read_result(tmp_path, "gradients")["whole"].keys() == whole.keys()


def test_an_interrupted_comparison_keeps_what_it_has(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(f"{module}:model", f"{module}:batches", 3, "cpu")
    plan = ModelPlan("m", ("explicit",))
    real, done = gradients._one_batch, 0

    def interrupted(*args: Any) -> dict[str, Any]:
        nonlocal done
        done += 1
        if done == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(gradients, "_one_batch", interrupted)
    assert run_gradients(plan, target, tmp_path)["done"] == 2
    assert run_gradients(plan, target, tmp_path, seconds=0)["done"] == 2
    done = 2
    with pytest.raises(KeyboardInterrupt):
        run_gradients(plan, target, tmp_path)


def test_statistics_of_known_errors() -> None:
    """Errors of which half is common: the systematic share is the share of squares."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(24, 4000, generator=generator, dtype=torch.float64)
    noise = torch.randn(24, 4000, generator=generator, dtype=torch.float64)
    common = torch.randn(4000, generator=generator, dtype=torch.float64)
    error = 0.1 * (noise + common)
    (found,) = gradients._of_grams((error @ error.T)[None], exact @ exact.T)
    assert found["error"][1] == pytest.approx(0.1 * 2**0.5, rel=0.03)
    assert found["noise"][1] == pytest.approx(0.1 * 2**0.5, rel=0.05)
    assert found["systematic"][0] < 0.5 < found["systematic"][2] + 0.02


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_intervals_cover_planted_errors(share: float) -> None:
    """Noise as well: its spread between batches is not smaller because a batch was drawn twice."""
    generator = torch.Generator().manual_seed(0)
    shape = (8, 200)
    hits = dict.fromkeys(("error", "noise", "systematic"), 0)
    true = {"error": 0.1 / 2**0.5, "noise": 0.1, "systematic": share}
    common = torch.zeros(200, dtype=torch.float64)
    common[0] = share**0.5
    for _ in range(100):
        drawn = torch.randn(2, *shape, generator=generator, dtype=torch.float64) / 200**0.5
        error = 0.1 * (common + (1 - share) ** 0.5 * drawn[0])
        exact = drawn[1] + torch.eye(200, dtype=torch.float64)[1]
        (found,) = gradients._of_grams((error @ error.T)[None], exact @ exact.T)
        for name, (low, _, high) in found.items():
            hits[name] += low <= true[name] <= high
    assert min(hits.values()) >= 87, hits


def test_a_sample_of_a_large_tensor_counts_for_all_of_it() -> None:
    ones = {"large": torch.ones(2), "small": torch.ones(2)}
    wrong = {"large": 1.1 * ones["large"], "small": ones["small"]}
    samples = [{"gradients": {"exact": ones, "a": wrong}, "outputs": {}}] * 3
    whole = gradients._statistics(samples, ["a"], {"large": 6, "small": 2})["whole"]["a"]
    assert whole["error"][1] == pytest.approx((6 * 0.01 / 8) ** 0.5)


def test_a_weight_that_a_batch_does_not_use_has_no_gradient_there(tmp_path: Path) -> None:
    class Experts(_Model):
        def __init__(self) -> None:
            super().__init__()
            self.expert = nn.Linear(16, 16)
            self.idle = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = super().forward(self.expert(x) if x.sum() > 0 else x, target)
            return loss

    batches = list(itertools.islice(_batches(), 6))
    signs = {bool(batch["x"].sum() > 0) for batch in batches}
    assert signs == {True, False}
    target = Target(Experts(), batches, None)
    value = run_gradients(ModelPlan("m", ("explicit",)), target, tmp_path)
    assert set(value["layers"]) == {"qkv.weight", "qkv.bias", "expert.weight", "expert.bias"}


def test_rows_without_a_key_are_zero() -> None:
    q = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)  # the first row sees nothing
    for name in (
        "exact",
        "explicit",
        "explicit:p24",
        *PRESETS,
        "torch-lines",
        "torch-lines-shifted",
    ):
        leaf = q.clone().requires_grad_()
        out = find_attention(name)(leaf, leaf, leaf, attn_mask=mask)
        assert not out[..., 0, :].any(), name
        (gradient,) = torch.autograd.grad(out.sum(), leaf)
        assert gradient.isfinite().all(), name
        if name != "fp8":  # whose P has 4 bits
            assert torch.allclose(out, functional.scaled_dot_product_attention(q, q, q, mask),
                                  atol=1e-3), name  # fmt: skip


@pytest.mark.parametrize(
    ("model", "batches", "count", "message"),
    [
        pytest.param("nothing", "", 3, "workload: expected one of", id="workload"),
        pytest.param("my_model:model", "", 3, "batches: expected MODULE:FUNCTION", id="batches"),
        pytest.param("my_model:model", "my_model:batches", 1, "count: expected", id="count"),
        pytest.param("my_model:model", "none.pt", 3, "batches: expected a list", id="file"),
        pytest.param("builtins:list", "", 3, "model: expected builtins:list", id="no-model"),
        pytest.param("my_model:nothing", "", 3, "got NoneType", id="none"),
        pytest.param("my_model:biased", "", 3, "without arguments: missing", id="arguments"),
        pytest.param("none.py:model", "", 3, "there is no file none.py", id="no-file"),
        pytest.param("my_model:model", "my_model:nothing", 3, "iterator .* NoneType", id="no-list"),
    ],
)
def test_bad_targets_are_refused(
    module: str, model: str, batches: str, count: int, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        load_target(model, batches, count, "cpu")


def test_checkpoints_are_loaded_or_refused(module: str, tmp_path: Path) -> None:
    other = _Model()
    torch.save({"model": other.state_dict()}, tmp_path / "a.pt")
    target = load_target(f"{module}:model", f"{module}:batches", 2, "cpu", tmp_path / "a.pt")
    assert torch.equal(target.model.qkv.weight, other.qkv.weight)  # type: ignore[union-attr, arg-type]
    weights = other.state_dict()
    torch.save({**weights, "qkv.bias": weights["qkv.bias"] * math.nan}, tmp_path / "nan.pt")
    with pytest.raises(ArgumentError, match=r"nan.pt: expected finite weights, .* in qkv.bias"):
        load_target(f"{module}:model", f"{module}:batches", 2, "cpu", tmp_path / "nan.pt")
    with pytest.raises(ArgumentError, match=r"expected weights .*, got .*none.pt: .*No such file"):
        load_target(f"{module}:model", f"{module}:batches", 2, "cpu", tmp_path / "none.pt")
    torch.save({"other": torch.ones(2)}, tmp_path / "b.pt")
    with pytest.raises(ArgumentError, match="checkpoint: expected weights of"):
        load_target(f"{module}:model", f"{module}:batches", 2, "cpu", tmp_path / "b.pt")


def test_a_model_without_attention_is_an_error(module: str, tmp_path: Path) -> None:
    torch.save([torch.ones(1, 16)] * 2, tmp_path / "batches.pt")
    target = load_target(f"{module}:blind", str(tmp_path / "batches.pt"), 2, "cpu")
    with pytest.raises(ArgumentError, match="model: expected calls"):
        run_gradients(ModelPlan("m", ("explicit",)), target, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda model: model.requires_grad_(False), "require a gradient", id="frozen"),
        pytest.param(
            lambda model: nn.init.constant_(model.qkv.bias, math.nan), "expected finite gradients",
            id="nan",
        ),
    ],
)  # fmt: skip
def test_models_without_a_gradient_are_refused(
    change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    model = _Model()
    change(model)
    target = Target(model, list(itertools.islice(_batches(), 3)), None)
    with pytest.raises(ArgumentError, match=message):
        run_gradients(ModelPlan("m", ("explicit",)), target, tmp_path)
    with pytest.raises(ArgumentError, match="attention: expected at least one name"):
        run_gradients(ModelPlan("m", ()), target, tmp_path)


def test_the_command_draws_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["deviation", "gradients", "--quick", "--attention", "explicit,kernel",
                 "--out", str(tmp_path)]  # fmt: skip
    assert main(arguments) == 0
    page = (tmp_path / "report.html").read_text()
    assert "<td>blocks.*.qkv.weight</td><td>explicit</td>" in page
    assert "<td>01 blocks.1</td>" in page  # the second call of attention, by its module
    assert "systematic" in capsys.readouterr().out
