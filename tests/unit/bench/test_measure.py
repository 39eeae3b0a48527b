"""What comes of peers that fail, differ or break the GPU; a GPU itself is a stand-in here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from flash_attn_deterministic.bench import measure as measuring
from flash_attn_deterministic.bench import peers
from flash_attn_deterministic.bench.problem import Problem, Shape

SHAPE = Shape("forward", 1, 64, 2, 1, 64, causal=True)
DECODE = Shape("decode", 2, 64, 2, 1, 64)
BACKWARD = Shape("backward", 1, 64, 2, 2, 64)
STEP = Shape("step", 1, 64, 2, 1, 64, causal=True)

Forward = Callable[[Problem], peers.Forward]


def peer(forward: Forward, name: str = "sdpa") -> peers.Peer:
    return peers.Peer(name, "a stand-in", forward, ("cpu",))


def run_with(forward: Forward, shape: Shape = SHAPE, device: str = "cpu") -> dict[str, Any]:
    return measuring.measure(shape, device, [peer(forward), peers.OURS], 3)


def test_ours_and_a_peer() -> None:
    for shape in (SHAPE, DECODE, BACKWARD, STEP):
        found = run_with(peers._sdpa, shape)
        assert found["failed"] == {}
        assert set(found["ms"]) == set(found["ratio"]) == {"ours", "sdpa"}
        assert found["ratio"]["ours"] == 1.0


def test_a_peer_that_fails_is_listed_with_its_reason() -> None:
    def forward(one: Problem) -> peers.Forward:
        raise RuntimeError("no kernel for this GPU\nwith a long trace")

    found = run_with(forward)
    assert found["failed"] == {"sdpa": "RuntimeError: no kernel for this GPU"}
    assert set(found["ms"]) == {"ours"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(
            RuntimeError("No available kernel. Aborting execution."),
            "RuntimeError: No available kernel",
            id="sentence",
        ),
        pytest.param(
            OSError("/opt/venv/lib/python3.11/site-packages/peer/_C.so: undefined symbol: x"),
            "OSError: _C.so: undefined symbol: x",
            id="folder",
        ),
        pytest.param(ValueError("word " * 500), "ValueError: word word", id="long"),
        pytest.param(KeyError(), "KeyError:", id="empty"),
    ],
)
def test_what_a_peer_raises_is_summed_up(error: Exception, reason: str) -> None:
    def forward(one: Problem) -> peers.Forward:
        raise error

    found = run_with(forward)["failed"]["sdpa"]
    assert found.startswith(reason)
    assert len(found) <= 160
    assert len(found) == len(reason) or "..." in found


def test_the_cause_of_a_failure_says_more() -> None:
    def forward(one: Problem) -> peers.Forward:
        raise RuntimeError("Observed exception") from NotImplementedError("no backward")

    assert run_with(forward)["failed"] == {"sdpa": "NotImplementedError: no backward"}


def test_the_words_of_a_peer_that_is_not_there_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    reason = run_with(peers._flash_attn)["failed"]["sdpa"]
    assert reason.startswith("Unavailable: flash_attn cannot be imported (")


def test_a_peer_that_fails_later_is_listed_too() -> None:
    """Such as one that runs out of memory once all others have theirs."""
    calls = []

    def forward(one: Problem) -> peers.Forward:
        run = peers._sdpa(one)

        def call() -> torch.Tensor:
            calls.append(1)
            if len(calls) > 2:
                raise MemoryError("no room")
            return run()

        return call

    found = run_with(forward)
    assert found["failed"] == {"sdpa": "MemoryError: no room"}
    assert set(found["ms"]) == set(found["ratio"]) == {"ours"}
    assert len(calls) == 3


def test_a_peer_that_computes_something_else_is_no_peer() -> None:
    assert "differs from ours" in run_with(lambda p: lambda: p.q + 1)["failed"]["sdpa"]


def test_a_nan_differs() -> None:
    assert "differs from ours" in run_with(lambda p: lambda: p.q * torch.nan)["failed"]["sdpa"]


@pytest.mark.parametrize("wrong", ["q", "k", "v"])
def test_each_gradient_counts(wrong: str) -> None:
    def forward(one: Problem) -> peers.Forward:
        leaf = getattr(one, wrong)
        twice = {wrong: leaf + (leaf - leaf.detach())}  # the same number, twice the gradient
        q, k, v = (twice.get(name, getattr(one, name)) for name in "qkv")
        run = peers._sdpa(Problem(one.shape, q, k, v, one.dout))
        return run

    assert "differs from ours" in run_with(forward, BACKWARD)["failed"]["sdpa"]


def test_a_peer_without_backward() -> None:
    one = peers.Peer("sdpa", "no backward", peers._sdpa, ("cpu",), backward=False)
    found = measuring.measure(BACKWARD, "cpu", [peers.OURS, one], 2)
    assert found["failed"] == {"sdpa": "Unavailable: has no backward"}
    assert set(found["ms"]) == {"ours"}


def test_no_room_for_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(shape: Shape, device: str) -> Problem:
        raise torch.OutOfMemoryError("tried to allocate 1 GiB\nmore words")

    monkeypatch.setattr(Problem, "draw", staticmethod(draw))
    found = run_with(peers._sdpa)
    reason = "OutOfMemoryError: tried to allocate 1 GiB"
    assert found["failed"] == {"ours": reason, "sdpa": reason}
    assert found["ms"] == found["ratio"] == {}


# --- As on a GPU --------------------------------------------------------------------------------


class Graph:
    """Replays what was called while it was captured."""

    last: Graph

    def __init__(self) -> None:
        self.replays = 0
        Graph.last = self

    def replay(self) -> None:
        self.replays += 1


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Tensors stay on the CPU; says how much memory each step took, and where calls were made."""
    seen: dict[str, Any] = {"capturing": False, "allocated": [], "timed": []}

    @contextlib.contextmanager
    def graph(one: Graph) -> Iterator[None]:
        seen["capturing"] = True
        yield
        seen["capturing"] = False

    def within(calls: Mapping[str, Callable[[], object]], budget_ms: float, most: int) -> Any:
        for name, call in calls.items():
            seen["timed"].append(name)
            call()
        return {name: [1.0] * most for name in calls}

    draw = Problem.draw
    monkeypatch.setattr(Problem, "draw", staticmethod(lambda shape, device: draw(shape, "cpu")))
    monkeypatch.setattr(measuring, "within", within)
    monkeypatch.setattr(measuring, "peak_memory", lambda call: call() and 1000)
    for name, value in {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph": graph,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda: sum(seen["allocated"]),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return seen


def test_decode_is_timed_as_a_graph(gpu: dict[str, Any]) -> None:
    captured = []

    def forward(one: Problem) -> peers.Forward:
        run = peers._sdpa(one)

        def call() -> torch.Tensor:
            captured.append(gpu["capturing"])
            return run()

        return call

    found = run_with(forward, DECODE, "cuda")
    assert found["failed"] == {}
    # Kernels are loaded before the capture, and what is timed is the replay alone.
    assert captured == [False, False, False, True]
    assert Graph.last.replays == 2
    assert gpu["timed"] == ["ours", "sdpa"]


@pytest.mark.parametrize("shape", [SHAPE, BACKWARD], ids=lambda shape: shape.kind)
def test_the_rest_is_timed_as_calls(
    gpu: dict[str, Any], shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    def graph(one: Graph) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    assert run_with(peers._sdpa, shape, "cuda")["failed"] == {}


def test_a_graph_that_computes_something_else(gpu: dict[str, Any]) -> None:
    def forward(one: Problem) -> peers.Forward:
        run = peers._sdpa(one)
        return lambda: run() * (2 if gpu["capturing"] else 1)

    found = run_with(forward, DECODE, "cuda")
    assert "differs from ours" in found["failed"]["sdpa"]
    assert set(found["peak_bytes"]) == {"ours"}


def test_a_call_that_cannot_be_captured(gpu: dict[str, Any]) -> None:
    def forward(one: Problem) -> peers.Forward:
        run = peers._sdpa(one)

        def call() -> torch.Tensor:
            if gpu["capturing"]:
                raise RuntimeError("operation not permitted when stream is capturing")
            return run()

        return call

    found = run_with(forward, DECODE, "cuda")
    assert found["failed"] == {
        "sdpa": "RuntimeError: operation not permitted when stream is capturing"
    }
    assert set(found["ms"]) == {"ours"}


@pytest.mark.parametrize("shape", [SHAPE, DECODE, BACKWARD], ids=lambda shape: shape.kind)
def test_a_workspace_is_memory_too(gpu: dict[str, Any], shape: Shape) -> None:
    def forward(one: Problem) -> peers.Forward:
        gpu["allocated"].append(500)
        return peers._sdpa(one)

    found = run_with(forward, shape, "cuda")
    # What a forward saved for the backward is not counted, and can't be told from the rest.
    kept = 0 if shape.kind == "backward" else 500
    assert found["peak_bytes"] == {"ours": 1000, "sdpa": 1000 + kept}


def test_a_peer_that_breaks_the_gpu(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def within(calls: object, budget_ms: float, most: int) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(measuring, "within", within)
    found = run_with(peers._sdpa, SHAPE, "cuda")
    assert set(found["failed"]) == {"ours", "sdpa"}
    assert found["ms"] == found["ratio"] == found["peak_bytes"] == {}
