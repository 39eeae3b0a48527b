"""Each peer computes what ours does, of every kind; packages that need a GPU have stand-ins."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator

import flash_attn_deterministic
import peer_samples
import pytest
import torch
from flash_attn_deterministic.bench import peers
from flash_attn_deterministic.bench.compare import compare
from flash_attn_deterministic.bench.problem import Problem, Shape
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
    with torch.set_grad_enabled(shape.kind in ("backward", "step")):
        return peer.call(Problem.draw(shape, "cpu"))()


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    peer_samples.install(monkeypatch)
    monkeypatch.setattr(peers, "_WORKSPACE_BYTES", 1024)


@pytest.fixture
def fa3_ops(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """FlashAttention-3's ops, which keep the options of their calls."""
    return peer_samples.install_fa3(monkeypatch)


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


# Those with what not all peers are called for.
WIDER = (
    Shape("forward", 2, 80, 4, 2, 64, causal=True, seqlen_q=33),
    Shape("forward", 1, 40, 2, 2, 64, seqlen_q=70),
    Shape("forward", 2, 80, 4, 2, 64, causal=True, window=9),
    Shape("forward", 3, 50, 4, 2, 64, causal=True, lengths=(7, 50, 1)),
    Shape("backward", 2, 30, 4, 2, 64, causal=True, lengths=(30, 12)),
    Shape("backward", 1, 60, 2, 1, 64, causal=True, window=20),
    Shape("step", 2, 64, 4, 2, 64, causal=True),
)


def on_cpu_as(name: str) -> peers.Peer:
    """A peer or a variant, said to run on the CPU."""
    (peer,) = (one for one in (*peers.PEERS, *peers.VARIANTS) if one.name == name)
    return dataclasses.replace(peer, devices=("cpu",))


@pytest.mark.parametrize("shape", [*SHAPES, *WIDER], ids=lambda shape: shape.name)
@pytest.mark.parametrize("name", ["fa3", "fa3-one-split", "fa3-deterministic"])
def test_fa3_is_called_as_its_ops_are(
    name: str, shape: Shape, fa3_ops: list[dict[str, object]]
) -> None:
    compare(results(on_cpu_as(name), shape), results(peers.OURS, shape))
    forward, *backward = fa3_ops
    assert forward["num_splits"] == (0 if name == "fa3" else 1)
    assert {call["deterministic"] for call in backward} <= {name == "fa3-deterministic"}


@pytest.mark.parametrize("shape", WIDER, ids=lambda shape: shape.name)
@pytest.mark.parametrize("name", ["fa4", "fa4-deterministic", "ours"])
@pytest.mark.usefixtures("packages")
def test_fa4_takes_every_shape(name: str, shape: Shape) -> None:
    expected = by_hand(shape)
    found = results(on_cpu_as(name), shape)
    assert len(found) == len(expected)
    compare(found, expected)


def by_hand(shape: Shape) -> peers.Result:
    """A shape's results, sequence by sequence with a mask."""
    problem = Problem.draw(shape, "cpu")
    out = peer_samples.attention(
        problem.q, problem.k, problem.v, shape.causal, shape.window, problem.cu_seqlens
    )
    if shape.kind == "forward":
        return (out,)
    return torch.autograd.grad(out, (problem.q, problem.k, problem.v), problem.dout)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        pytest.param("sdpa-flash", WIDER[3], "takes no packed sequences", id="packed"),
        pytest.param("sdpa-cudnn", WIDER[2], "has no windows", id="window"),
        pytest.param("sdpa-cudnn", WIDER[0], "top left corner", id="corner"),
        pytest.param("flash_attn", WIDER[2], "without packed sequences, windows", id="plain"),
    ],
)
def test_what_a_peer_is_not_called_for(name: str, shape: Shape, reason: str) -> None:
    with pytest.raises(peers.Unavailable, match=reason):
        results(on_cpu_as(name), shape)


def test_sdpa_flash_takes_cross_attention() -> None:
    compare(results(on_cpu("sdpa-flash"), WIDER[1]), results(peers.OURS, WIDER[1]))


def test_atomics_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def call(*arguments: object, deterministic: object, **options: object) -> torch.Tensor:
        asked.append(deterministic)
        return torch.zeros(1)

    monkeypatch.setattr(flash_attn_deterministic, "flash_attn_func", call)
    results(on_cpu_as("ours-atomics"), SHAPES[0])
    results(peers.OURS, SHAPES[0])
    assert asked == ["never", None]


def test_a_peer_of_another_device_says_so() -> None:
    (peer,) = (one for one in peers.PEERS if one.name == "flash_attn")
    with pytest.raises(peers.Unavailable, match="does not run on cpu"):
        results(peer, SHAPES[0])


def test_names_are_unique() -> None:
    every = (*peers.PEERS, *peers.VARIANTS)
    assert len({peer.name for peer in every}) == len(every)
