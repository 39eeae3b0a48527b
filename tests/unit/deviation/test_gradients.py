from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic.__main__ import main
from flash_attn_deterministic.deviation.emulate.gradients import kept_output
from flash_attn_deterministic.deviation.instrument import gradients
from flash_attn_deterministic.deviation.instrument.gradients import GradientPlan, run_gradients
from flash_attn_deterministic.deviation.instrument.target import load_target
from flash_attn_deterministic.deviation.numbers.formats import parse_format
from flash_attn_deterministic.deviation.study.files import read_result
from flash_attn_deterministic.errors import ArgumentError
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
    for name, value in (("model", _Model), ("batches", _batches), ("biased", _biased),
                        ("blind", lambda: nn.Linear(16, 1))):  # fmt: skip
        setattr(found, name, value)
    monkeypatch.setitem(sys.modules, "my_model", found)
    return "my_model"


def test_a_users_model_and_a_biased_kernel(module: str, tmp_path: Path) -> None:
    """The positive control: an error of one sign has a systematic share near 1."""
    target = load_target(f"{module}:model", f"{module}:batches", 6, "cpu")
    names = ("sdpa-math", "explicit", f"{module}:biased", "fa3")
    value = run_gradients(GradientPlan("m", names), target, tmp_path)
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
    assert "flash_attn_interface" in value["missing"]["fa3"]
    assert value["memory_bytes"] == 4 * 4 * 6 * (16 * 48 + 48)
    assert read_result(tmp_path, "gradients")["whole"].keys() == whole.keys()


def test_it_resumes_batch_by_batch(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(f"{module}:model", f"{module}:batches", 3, "cpu")
    plan = GradientPlan("m", ("explicit",))
    whole = run_gradients(plan, target, tmp_path / "whole")
    real, done = gradients._one_batch, 0

    def interrupted(*args: Any) -> dict[str, Any]:
        nonlocal done
        done += 1
        if done == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(gradients, "_one_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_gradients(plan, target, tmp_path / "parts")
    parts = run_gradients(plan, target, tmp_path / "parts")
    assert done == 4
    assert parts["layers"] == whole["layers"]
    # All is done: nothing is kept but the result, and nothing is done again.
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["gradients.json"]
    assert run_gradients(plan, target, tmp_path / "parts")["whole"].keys() == {"explicit"}
    assert done == 4
    with pytest.raises(ArgumentError, match="holds another comparison"):
        run_gradients(GradientPlan("other", ("explicit",)), target, tmp_path / "parts")


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


@pytest.mark.parametrize(
    ("model", "batches", "count", "message"),
    [
        pytest.param("nothing", "", 3, "workload: expected one of", id="workload"),
        pytest.param("my_model:model", "", 3, "batches: expected MODULE:FUNCTION", id="batches"),
        pytest.param("my_model:model", "my_model:batches", 1, "count: expected", id="count"),
        pytest.param("my_model:model", "none.pt", 3, "batches: expected a list", id="file"),
        pytest.param("builtins:list", "", 3, "model: expected builtins:list", id="no-model"),
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
    torch.save({"other": torch.ones(2)}, tmp_path / "b.pt")
    with pytest.raises(ArgumentError, match="checkpoint: expected weights of"):
        load_target(f"{module}:model", f"{module}:batches", 2, "cpu", tmp_path / "b.pt")


def test_a_model_without_attention_is_an_error(module: str, tmp_path: Path) -> None:
    torch.save([torch.ones(1, 16)] * 2, tmp_path / "batches.pt")
    target = load_target(f"{module}:blind", str(tmp_path / "batches.pt"), 2, "cpu")
    with pytest.raises(ArgumentError, match="model: expected calls"):
        run_gradients(GradientPlan("m", ("explicit",)), target, tmp_path / "out")


def test_the_residual_gives_back_what_rounding_took() -> None:
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(50, 64, generator=generator) * torch.logspace(-6, 3, 64)
    number_format = parse_format("bf16")
    lost = (kept_output(out, number_format, "rounded") - out).abs() / out.abs()
    for delta, bits in (("residual", 2.0**-16), ("residual8", 2.0**-15)):
        kept = kept_output(out, number_format, delta)
        assert float(((kept - out).abs() / out.abs()).max()) <= bits < float(lost.max()) / 100
    with pytest.raises(ArgumentError, match="delta: expected one of"):
        kept_output(out, number_format, "half")


def test_the_command_draws_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["deviation", "gradients", "--quick", "--attention", "explicit,kernel",
                 "--out", str(tmp_path)]  # fmt: skip
    assert main(arguments) == 0
    page = (tmp_path / "gradients.html").read_text()
    assert page.count("<figure>") == 3
    assert "systematic" in capsys.readouterr().out
    assert main([*arguments[:3], "--attention", "explicit", "--out", str(tmp_path)]) == 1
