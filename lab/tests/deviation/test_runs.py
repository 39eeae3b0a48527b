"""Distances between checkpoints, and token log-probabilities."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic_lab.cli import main
from flash_attn_deterministic_lab.deviation.attentions.registry import find_attention
from flash_attn_deterministic_lab.deviation.instrument.target import ModelPlan, load_target
from flash_attn_deterministic_lab.deviation.instrument.tokens import run_tokens
from flash_attn_deterministic_lab.deviation.instrument.weights import compare_runs, parse_references
from flash_attn_deterministic_lab.errors import ArgumentError


def _run(folder: Path, change: float, name: str = "step-1.pt") -> Path:
    folder.mkdir(exist_ok=True)
    weights = {name: torch.ones(3, 2) for name in "uv"} | {"bias": torch.ones(3)}
    weights["w"] = torch.arange(6.0).reshape(2, 3)
    weights = {key: value + change for key, value in weights.items()}
    torch.save({"model": weights}, folder / name)
    return folder


def test_distances_beside_known_ones(tmp_path: Path) -> None:
    a, b, c, d = (_run(tmp_path / name, x) for name, x in zip("abcd", (0, 0.1, 0.4, 0),
                                                             strict=True))  # fmt: skip
    _run(a, 0, "step-2.pt")
    references = parse_references([f"data={c}", str(d)])
    value = compare_runs(a, b, references, tmp_path / "out")
    assert list(value["checkpoints"]) == ["step-1.pt"]  # step 2 is in A alone
    found = value["checkpoints"]["step-1.pt"]
    assert found["B"]["max_difference"] == pytest.approx(0.1, rel=1e-3)
    assert found["B"]["wasserstein"] == pytest.approx(0.1, rel=1e-3)
    assert found["B"]["l2"] == pytest.approx(0.1 * math.sqrt(18 / (55 + 6 + 6)), rel=1e-3)
    assert found["data"]["l1"] == pytest.approx(0.4, rel=1e-3)
    assert found["d"]["l1"] == 0
    assert json.loads((tmp_path / "out" / "weights.json").read_text())["kind"] == "weights"


def test_safetensors_are_read(tmp_path: Path) -> None:
    import safetensors.torch as safetensors

    for name, change in (("a", 0.0), ("b", 1.0)):
        (tmp_path / name).mkdir()
        for shard in (1, 2):
            weights = {f"w{shard}": torch.ones(2, 2) + change, f"v{shard}": torch.ones(2, 2)}
            path = tmp_path / name / f"model-0000{shard}-of-00002.safetensors"
            safetensors.save_file(weights, str(path))
        torch.save({"state": {}}, tmp_path / name / "optimizer.pt")  # what trainers write beside
    value = compare_runs(tmp_path / "a", tmp_path / "b", {}, tmp_path / "out")
    # Shards are one checkpoint: two matrices differ by their own size, two are equal.
    assert list(value["checkpoints"]) == ["model.safetensors"]
    assert value["checkpoints"]["model.safetensors"]["B"]["l2"] == pytest.approx(0.5**0.5)


def test_two_files_need_no_common_name(tmp_path: Path) -> None:
    a, b = (_run(tmp_path, change, f"{change}.pt") / f"{change}.pt" for change in (0, 1))
    (found,) = compare_runs(a, b, {}, tmp_path / "out")["checkpoints"].values()
    assert found["B"]["max_difference"] == 1


def test_runs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    a = _run(tmp_path / "a", 0)
    b = _run(tmp_path / "b", 0, "other.pt")
    with pytest.raises(ArgumentError, match="run_b: expected checkpoints named like"):
        compare_runs(a, b, {}, tmp_path / "out")
    with pytest.raises(ArgumentError, match="run: expected checkpoints"):
        compare_runs(a, tmp_path / "none", {}, tmp_path / "out")
    with pytest.raises(ArgumentError, match=r"reference data: .*\(step-1.pt\), got other.pt"):
        compare_runs(a, a, {"data": b}, tmp_path / "out")
    plain = torch.load(a / "step-1.pt")["model"]
    for change, message in (
        ({"w": torch.ones(5, 5)}, r"only A has w \(2, 3\), only this one w \(5, 5\)"),
        ({"x": torch.ones(5, 5)}, r"only A has -, only this one x \(5, 5\)"),
        ({"w": torch.full((2, 3), math.nan)}, "expected finite weights, got NaN .* in w"),
    ):
        torch.save({**plain, **change}, b / "step-1.pt")
        with pytest.raises(ArgumentError, match=message):
            compare_runs(a, b, {}, tmp_path / "out")
    (b / "step-1.pt").write_text("no weights")
    with pytest.raises(ArgumentError, match="expected weights"):
        compare_runs(a, b, {}, tmp_path / "out")
    for bad in ("A=x", "=x", f"x={tmp_path / 'missing'}"):
        with pytest.raises(ArgumentError, match="reference: expected"):
            parse_references([bad])
    assert not (tmp_path / "out").exists()


def test_the_command_prints_distances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (_run(tmp_path / name, x) for name, x in zip("abc", (0, 0.1, 0.2), strict=True))
    arguments = ["deviation", "weights", str(a), str(b), "--reference", f"init={c}"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert "step-1.pt init: max_difference " in capsys.readouterr().out


def test_padding_does_not_count(tmp_path: Path) -> None:
    target = load_target("language-tiny", "", 3, "cpu")

    real, mask = target.workload, torch.ones(4, 48, dtype=torch.long)
    assert real is not None
    outputs = real.outputs

    class Padded:
        def outputs(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return outputs(model, batch["tokens"])

    mask[:, :40] = 0
    target.batches = [{"tokens": batch, "attention_mask": mask} for batch in target.batches]
    target.workload = Padded()  # type: ignore[assignment]
    value = run_tokens(ModelPlan("m", ("exact", "explicit:p4")), target, tmp_path)
    assert value["tokens"] == 3 * 4 * 8


def test_logits_that_are_nan_are_named(tmp_path: Path) -> None:
    target = load_target("language-tiny", "", 3, "cpu")
    torch.nn.init.constant_(next(target.model.parameters()), math.nan)
    with pytest.raises(ArgumentError, match="expected finite logits with exact, got NaN"):
        run_tokens(ModelPlan("m", ("exact", "explicit")), target, tmp_path)


def test_an_attention_has_no_mismatch_with_itself(tmp_path: Path) -> None:
    target = load_target("language-tiny", "", 3, "cpu")
    value = run_tokens(ModelPlan("m", ("kernel", "kernel")), target, tmp_path)
    assert value["kl"] == [0, 0, 0]
    assert value["same"] == 1
    assert value["difference"]["q1"] == 0
    assert value["tokens"] == 3 * 4 * 48
    assert value["configuration"]["model"] == "m"


def test_log_probabilities_of_two_attentions_differ_a_little(tmp_path: Path) -> None:
    target = load_target("language-tiny", "", 3, "cpu")
    value = run_tokens(ModelPlan("m", ("exact", "explicit:p4")), target, tmp_path)
    low, middle, high = value["kl"]
    assert 0 < low <= middle <= high < 0.1
    assert 0 < value["difference"]["q0.5"] <= value["difference"]["q1"] < 1
    assert value["difference"]["largest_ratio"] > 1
    assert value["batch_invariant"]["exact"]


def test_decode_is_compared_with_prefill(tmp_path: Path) -> None:
    target = load_target("language-tiny", "", 2, "cpu")
    value = run_tokens(ModelPlan("m", ("ours-decode", "ours")), target, tmp_path)
    assert (value["same"], value["kl"][1]) == (1, 0)
    assert value["batch_invariant"] == {"ours-decode": True, "ours": True}
    # The same function, in products of other shapes.
    value = run_tokens(ModelPlan("m", ("sdpa-flash-decode", "sdpa-flash")), target, tmp_path)
    assert value["same"] < 1
    assert 0 < value["kl"][1] < 1e-4


def test_batch_dependence_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn_deterministic_lab.deviation.instrument import tokens

    plain: Any = find_attention("explicit")

    def dependent(q: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        found: torch.Tensor = plain(q, *args, **options)
        return found * len(q)

    monkeypatch.setattr(
        tokens, "find_attention", lambda name: dependent if name == "mine" else plain
    )
    target = load_target("language-tiny", "", 3, "cpu")
    value = run_tokens(ModelPlan("m", ("mine", "explicit")), target, tmp_path)
    assert value["batch_invariant"] == {"mine": False, "explicit": True}
