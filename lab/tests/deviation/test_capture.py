from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic_lab.deviation.emulate.simulate import golden_attention
from flash_attn_deterministic_lab.deviation.emulate.steps import PRESETS
from flash_attn_deterministic_lab.deviation.forward.cells import Cell, run_cell
from flash_attn_deterministic_lab.deviation.forward.inputs import read_calls
from flash_attn_deterministic_lab.deviation.instrument.capture import Captured, captured_calls
from flash_attn_deterministic_lab.errors import ArgumentError
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 48)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.linear(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        out = scaled_dot_product_attention(q, k, v, **self.options)
        return out.transpose(1, 2).flatten(2)


def _inputs() -> torch.Tensor:
    return torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))


def _error(captured: Captured) -> float:
    """How far what the model computed is from the captured call computed exactly."""
    call, out = captured.call, captured.out
    assert out is not None
    golden = golden_attention(call)
    return float((out.double() - golden).norm() / golden.norm())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"is_causal": True}, id="causal"),
        pytest.param({"attn_mask": torch.ones(40, 40).tril().bool()}, id="bool-mask"),
        pytest.param({"attn_mask": torch.linspace(-3, 0, 40)[None].expand(40, 40)}, id="bias"),
        pytest.param({"scale": 0.7}, id="scale"),
    ],
)
def test_every_layer_is_seen_and_nothing_changes(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(**options), Layer(**options))
    plain = model(_inputs())
    with captured_calls(model) as record:
        seen = model(_inputs())
    assert torch.equal(plain, seen)
    assert [call.layer for call in record.calls] == ["0", "1"]
    for captured in record.calls:
        assert captured.call.q.shape == (2, 2, 40, 8)
        assert _error(captured) < 1e-5


def test_gradients_still_flow() -> None:
    model = Layer()
    with captured_calls(model):
        model(_inputs()).sum().backward()
    assert model.linear.weight.grad is not None


def test_multihead_attention_in_eval_mode_is_seen() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with torch.no_grad(), captured_calls(model) as record:
        model(_inputs())
    assert [call.layer for call in record.calls] == ["self_attn"]


def test_our_function_is_seen() -> None:
    from flash_attn_deterministic import flash_attn_func

    class Ours(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.reshape(2, 40, 2, 8).to(torch.bfloat16)
            out = flash_attn_func(q, q, q, causal=True)
            assert isinstance(out, torch.Tensor)
            return out

    model = Ours()
    with captured_calls(model) as record:
        model(_inputs())
    (call,) = record.calls
    assert call.function == "fwd"
    assert call.call.q.shape == (2, 2, 40, 8)
    assert _error(call) < 0.01


def test_packed_sequences_are_seen_one_by_one() -> None:
    from flash_attn_deterministic import flash_attn_varlen_func

    starts = torch.tensor([0, 30, 30, 80], dtype=torch.int32)

    class Packed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.reshape(80, 2, 8).to(torch.bfloat16)
            out = flash_attn_varlen_func(q, q, q, starts, starts, 50, 50, window_size=(10, 0))
            assert isinstance(out, torch.Tensor)
            return out

    model = Packed()
    with captured_calls(model) as record:
        model(_inputs())
    assert [call.call.q.shape for call in record.calls] == [(1, 2, 30, 8), (1, 2, 50, 8)]
    assert all(_error(call) < 0.01 for call in record.calls)


def test_calls_that_are_not_captured_are_counted() -> None:
    from flash_attn_deterministic import flash_attn_func

    class Capped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.reshape(2, 40, 2, 8).to(torch.bfloat16)
            out = flash_attn_func(q, q, q, softcap=5.0)
            assert isinstance(out, torch.Tensor)
            return out

    model = Capped()
    with pytest.raises(ArgumentError, match=r"not captured: \{'fwd': 1\}"), captured_calls(model):
        model(_inputs())


def test_attention_that_is_written_out_cannot_be_hooked() -> None:
    model = nn.Linear(16, 16)
    with (
        pytest.raises(ArgumentError, match="model: expected calls of scaled_dot_product_attention"),
        captured_calls(model),
    ):
        model(_inputs())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"is_causal": True, "scale": 1.0}, id="causal-scale-1"),
        pytest.param({"attn_mask": torch.ones(40, 40).tril(-3).bool() | torch.eye(40).bool()},
                     id="mask"),
    ],
)  # fmt: skip
def test_a_replay_is_the_call_that_was_captured(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Layer(**options)
    with captured_calls(model) as record:
        model(_inputs())
    record.save(tmp_path / "calls.pt")
    (call,) = read_calls(tmp_path / "calls.pt")
    assert call.q.shape == call.k.shape == call.v.shape == (2, 2, 40, 8)
    assert _error(replace(record.calls[0], call=call)) < 1e-5
    for preset in PRESETS:
        replayed = run_cell(Cell(preset=preset, inputs=str(tmp_path / "calls.pt")))
        assert 0 < max(replayed["flash"]["max"]) < (0.2 if preset == "fp8" else 0.05)


def test_groups_and_windows_survive_a_replay(tmp_path: Path) -> None:
    from flash_attn_deterministic import flash_attn_func

    class Grouped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.reshape(2, 40, 2, 8).to(torch.bfloat16)
            out = flash_attn_func(q, q[:, :, :1], q[:, :, 1:], window_size=(7, 2), causal=False)
            assert isinstance(out, torch.Tensor)
            return out

    model = Grouped()
    with captured_calls(model) as record:
        model(_inputs())
    assert _error(record.calls[0]) < 0.01
    record.save(tmp_path / "calls.pt")
    (call,) = read_calls(tmp_path / "calls.pt")
    assert (call.k.shape[1], call.window) == (1, (7, 2))
    assert _error(replace(record.calls[0], call=call)) < 0.01


def test_a_file_without_masks_is_refused(tmp_path: Path) -> None:
    """What earlier versions wrote: its causal calls would be replayed as full ones."""
    tensor = torch.ones(1, 1, 8, 8)
    torch.save([{"q": tensor, "k": tensor, "v": tensor}], tmp_path / "old.pt")
    with pytest.raises(ArgumentError, match="expected q, k, v, mask, causal, scale, window"):
        read_calls(tmp_path / "old.pt")


def test_hooks_are_gone_afterwards() -> None:
    model = Layer()
    with captured_calls(model) as record:
        model(_inputs())
    model(_inputs())
    assert len(record.calls) == 1
    assert not model._forward_pre_hooks
    assert torch.backends.mha.get_fastpath_enabled()
