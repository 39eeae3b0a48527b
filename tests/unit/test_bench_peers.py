"""Each peer computes what ours does, of every kind; packages that need a GPU have stand-ins."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator

import peer_samples
import pytest
import torch
from flash_attn_deterministic.bench import peers
from flash_attn_deterministic.bench.compare import compare
from flash_attn_deterministic.bench.problem import Problem, Shape
from flash_attn_deterministic.verify.scoreboard import attention
from torch._functorch import config
from torch.nn.attention import flex_attention

SHAPES = (
    Shape("forward", 2, 64, 4, 4, 64),
    Shape("forward", 2, 80, 4, 2, 64, causal=True),
    Shape("forward", 1, 64, 4, 1, 64, causal=True, dtype="fp16"),
    Shape("decode", 3, 96, 8, 2, 64),
    Shape("decode", 1, 64, 4, 4, 64, dtype="fp16"),
    Shape("backward", 1, 64, 4, 4, 64),
    Shape("backward", 2, 80, 2, 2, 64, causal=True),
)


def on_cpu(name: str) -> peers.Peer:
    """A peer, said to run on the CPU."""
    (peer,) = (one for one in peers.PEERS if one.name == name)
    return dataclasses.replace(peer, devices=("cpu",))


def results(peer: peers.Peer, shape: Shape) -> peers.Result:
    with torch.set_grad_enabled(shape.kind == "backward"):
        return peer.call(Problem.draw(shape, "cpu"))()


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    peer_samples.install(monkeypatch)
    monkeypatch.setattr(peers, "_WORKSPACE_BYTES", 1024)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention as it is without a compiler."""
    monkeypatch.setattr(peers, "_compiled_flex", lambda: flex_attention.flex_attention)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("name", ["sdpa", "sdpa-flash", "flash_attn", "fa4", "flashinfer"])
@pytest.mark.usefixtures("packages")
def test_a_peer_computes_what_ours_does(name: str, shape: Shape) -> None:
    if name == "flashinfer" and shape.kind == "backward":
        pytest.skip("has no backward")
    found = results(on_cpu(name), shape)
    assert len(found) == (3 if shape.kind == "backward" else 1)
    compare(found, results(peers.OURS, shape))


@pytest.mark.parametrize("shape", SHAPES[:5], ids=lambda shape: shape.name)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("eager")
def test_flex_computes_what_ours_does(shape: Shape) -> None:
    compare(results(on_cpu("flex"), shape), results(peers.OURS, shape))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flex_compiled_computes_what_ours_does() -> None:
    try:
        found = results(on_cpu("flex"), SHAPES[1])
    except Exception as error:  # no C++ compiler, or a CPU that it has no code for
        pytest.skip(f"cannot be compiled here: {error}"[:200])
    compare(found, results(peers.OURS, SHAPES[1]))


def test_each_problem_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all shapes in one cache the last would silently run without compilation."""
    resets, compiled = [], []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))

    donated: list[bool] = []

    def flex(q: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        donated.append(config.donated_buffer)
        return q

    def compile(function: object, **options: object) -> object:
        compiled.append(options)
        return flex

    monkeypatch.setattr(torch, "compile", compile)
    for shape in SHAPES[3:5]:
        results(on_cpu("flex"), shape)
    assert len(resets) == 2
    assert compiled == [{"dynamic": False, "fullgraph": True}] * 2
    # A backward compiled with donated buffers runs once only; that of the first call counts.
    assert donated[0] is False


@pytest.mark.usefixtures("packages")
def test_pages_must_be_full() -> None:
    shape = Shape("decode", 1, 100, 2, 2, 64)
    with pytest.raises(peers.Unavailable, match="expected a multiple of 16 keys, got 100"):
        results(on_cpu("flashinfer"), shape)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        pytest.param("flash_attn", "flash_attn", id="flash_attn"),
        pytest.param("flashinfer", "flashinfer", id="flashinfer"),
        pytest.param("fa3", "flash_attn_interface", id="fa3"),
        pytest.param("fa4", "flash_attn.cute", id="fa4"),
    ],
)
def test_what_is_not_installed_says_so(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FA3_LIBRARY", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    if name == "flash_attn":
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(peers.Unavailable, match=f"{module} cannot be imported"):
        results(on_cpu(name), SHAPES[0])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_fa3_is_the_one_of_the_scoreboard(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def find(name: str, device: str) -> list[attention.Attention]:
        asked.append((name, device))
        return [attention.Attention(name, attention.DEFAULT, "1", attention.ours().attend)]

    monkeypatch.setattr(attention, "find", find)
    compare(results(on_cpu("fa3"), shape), results(peers.OURS, shape))
    assert asked == [("fa3", "cuda")]


def test_a_peer_of_another_device_says_so() -> None:
    (peer,) = (one for one in peers.PEERS if one.name == "flash_attn")
    with pytest.raises(peers.Unavailable, match="does not run on cpu"):
        results(peer, SHAPES[0])


def test_names_are_unique() -> None:
    assert len({peer.name for peer in peers.PEERS}) == len(peers.PEERS)
