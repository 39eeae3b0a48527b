"""Times the peers on one shape, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..verify.speed.measure import interleaved, peak_memory, summary
from .peers import OURS, Call, Peer
from .problem import Problem, Shape

# Largest difference from ours that still counts as the same function, over the largest number.
_TOLERANCE = 0.05


def measure(shape: Shape, device: str, peers: Sequence[Peer], repeats: int) -> dict[str, Any]:
    """Times all peers that can run a shape.

    Args:
        shape: what to time.
        device: "cuda" or "cpu".
        peers: implementations; ours among them.
        repeats: timed rounds.

    Returns:
        `ms` and, on CUDA, `peak_bytes` above the inputs by peer; `ratio` of each median to ours;
        `failed`: reasons by peer.
    """
    problem = Problem.draw(shape, device)
    calls: dict[str, Call] = {}
    failed: dict[str, str] = {}
    expected: torch.Tensor | None = None
    peaks: dict[str, int] = {}
    with torch.set_grad_enabled(shape.kind == "backward"):
        for peer in sorted(peers, key=lambda peer: peer is not OURS):
            try:
                call = peer.call(problem)
                result = call().detach().float()
                if expected is None and peer is OURS:
                    expected = result
                elif expected is not None:
                    _compare(result, expected)
                if device == "cuda":
                    peaks[peer.name] = peak_memory(call)
                    if shape.kind == "decode":
                        call = _graph(call)
                calls[peer.name] = call
            except Exception as error:
                text = str(error).strip().splitlines()
                failed[peer.name] = f"{type(error).__name__}: {text[0] if text else ''}"[:300]
        timed = interleaved(calls, repeats=repeats) if device == "cuda" else _cpu(calls, repeats)
    times = {name: summary(values) for name, values in timed.items()}
    ours = times.get(OURS.name)
    return {
        "name": shape.name,
        **asdict(shape),
        "ms": times,
        "ratio": {}
        if ours is None
        else {name: round(one["median"] / ours["median"], 4) for name, one in times.items()},
        "peak_bytes": peaks,
        "failed": failed,
    }


def _compare(result: torch.Tensor, expected: torch.Tensor) -> None:
    gap = float((result - expected).abs().max())
    if not gap <= _TOLERANCE * float(expected.abs().max()):
        raise ValueError(f"the result differs from ours by {gap:.3g}")


def _graph(call: Call) -> Callable[[], Any]:
    """Captures a call, so that the host's launches do not count; serving does the same."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _cpu(calls: dict[str, Call], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(max(2, repeats)):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return times
