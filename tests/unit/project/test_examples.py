"""The example scripts run, and keep what they promise."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import make_model

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(script: str, *arguments: str) -> list[str]:
    pytest.importorskip("transformers")
    command = [sys.executable, str(EXAMPLES / script), "--device", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_whole_model_keeps_its_bits() -> None:
    *_, ours = run("whole_model.py")
    assert ours.split()[:6] == ["flash_attn_deterministic", "invariant", *["same"] * 4]


def test_a_trainer_computes_what_the_rollout_sampled(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    run("policy_gradient.py", "--json", str(file))
    steps = json.loads(file.read_text())["flash_attn_deterministic"]
    assert len(steps) == 10
    assert {(step["kl"], step["unequal"]) for step in steps} == {(0, 0)}
    assert steps[-1]["reward"] > 0.7


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("invariant_layers")


@torch.no_grad()
def test_a_model_with_biases_keeps_its_bits(layers: Any) -> None:
    model = make_model("Qwen2")
    biases = [parameter for name, parameter in model.named_parameters() if "bias" in name]
    assert len(biases) == 6
    for bias in biases:
        torch.nn.init.normal_(bias)
    ids = torch.arange(3 * 24).view(3, 24) % 97
    before = model(ids).logits
    layers.make_invariant(model, "cpu")
    whole = model(ids).logits
    assert torch.equal(whole[:1], model(ids[:1]).logits)
    assert torch.allclose(whole, before, rtol=0.05, atol=0.05)


def test_a_linear_layer_adds_its_bias_to_the_product(
    layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product in torch stands for the one in Triton."""
    monkeypatch.setattr(layers, "multiply", lambda x, weight: x @ weight.t())
    plain = torch.nn.Linear(8, 4)
    ours, x = layers.Linear(plain), torch.randn(2, 3, 8)
    assert torch.allclose(ours(x), plain(x), atol=1e-6)
    expected = torch.autograd.grad(plain(x).pow(2).sum(), [plain.weight, plain.bias])
    given = torch.autograd.grad(ours(x).pow(2).sum(), [plain.weight, plain.bias])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(given, expected, strict=True))


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        pytest.param("Gemma2", {}, r"norm: expected x / rms\(x\) \* weight, .* Gemma2", id="norm"),
        pytest.param("Mixtral", {}, "mlp.* expected matrices in torch.nn.Linear and", id="experts"),
    ],
)
def test_what_is_not_replaced_is_refused(
    layers: Any, family: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layers.make_invariant(make_model(family, **options), "cpu")


def test_training_over_ranks_has_the_bits_of_one_device() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(EXAMPLES / "train_over_ranks.py"), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--length", "128"], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "losses and weights have the same bits: yes"
    steps = [line for line in lines if line.startswith("step")]  # gloo of torch 2.10 prints, too
    assert len(steps) == 20
    first, last = (float(line.split()[2]) for line in (steps[0], steps[-1]))
    assert last < first / 2
