"""Times the peers on one shape, in turns."""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..verify.named import first_line
from ..verify.speed.measure import peak_memory, rotations, summary, within
from .compare import compare
from .peers import OURS, Call, Peer, Result, Unavailable
from .problem import Problem, Shape

_REASON = 160  # characters of the reason why a peer failed


def measure(
    shape: Shape,
    device: str,
    peers: Sequence[Peer],
    repeats: int,
    budget_ms: float = math.inf,
) -> dict[str, Any]:
    """Times all peers that can run a shape.

    Args:
        shape: what to time.
        device: "cuda" or "cpu".
        peers: implementations; ours among them.
        repeats: timed rounds, at most.
        budget_ms: milliseconds of GPU time for them, which may cost rounds.

    Returns:
        `ms` and, on CUDA, `peak_bytes` above the inputs by peer; `ratio` of each median to ours;
        `failed`: reasons by peer.
    """
    calls: dict[str, _Isolated] = {}
    failed: dict[str, str] = {}
    peaks: dict[str, int] = {}
    expected: Result | None = None
    try:
        if device == "cuda":
            # The graphs of the last shape had memory of their own.
            torch.cuda.empty_cache()
        problem = Problem.draw(shape, device)
        with torch.set_grad_enabled(shape.kind in ("backward", "step")):
            for peer in sorted(peers, key=lambda peer: peer is not OURS):
                try:
                    call, result, peak = _prepare(peer, problem, expected, device)
                except Exception as error:
                    failed[peer.name] = _reason(error)
                    continue
                calls[peer.name] = _Isolated(call)
                if peak is not None:
                    peaks[peer.name] = peak
                if peer is OURS:
                    expected = result
            timed = within(calls, budget_ms, repeats) if device == "cuda" else _cpu(calls, repeats)
    except Exception as error:  # out of memory, or a call broke the GPU
        timed = {}
        failed = {peer.name: failed.get(peer.name, _reason(error)) for peer in peers}
    for name, one in calls.items():
        if one.reason:
            failed[name] = one.reason
    times = {name: summary(values) for name, values in timed.items() if name not in failed}
    ours = times.get(OURS.name)
    return {
        "name": shape.name,
        **asdict(shape),
        "ms": times,
        "repeats": max((len(values) for values in timed.values()), default=0),
        "ratio": {}
        if ours is None
        else {name: round(one["median"] / ours["median"], 4) for name, one in times.items()},
        "peak_bytes": {name: peak for name, peak in peaks.items() if name in times},
        "failed": failed,
    }


def _prepare(
    peer: Peer, problem: Problem, expected: Result | None, device: str
) -> tuple[Callable[[], object], Result, int | None]:
    """Makes a peer ready to be timed, and compares its result with ours.

    Returns:
        What to time, its result, and its peak memory on CUDA.

    Raises:
        Exception: the peer can't run the problem, or computes something else.
    """
    cuda, kind = device == "cuda", problem.shape.kind
    before = torch.cuda.memory_allocated() if cuda else 0
    call = peer.call(problem)
    # A workspace that a peer keeps counts; what autograd saved for a backward does not.
    kept = torch.cuda.memory_allocated() - before if cuda and kind != "backward" else 0
    result = _detached(call())
    if expected is not None:
        compare(result, expected)
    if not cuda:
        return call, result, None
    peak = kept + peak_memory(call)
    if kind != "decode":
        return call, result, peak
    replay, replayed = _graph(call)
    compare(_detached(replayed), result)
    return replay, result, peak


def _detached(result: Result) -> Result:
    return tuple(tensor.detach() for tensor in result)


def _graph(call: Call) -> tuple[Callable[[], object], Result]:
    """Captures a call, so that the host's launches do not count; serving does the same.

    Returns:
        What replays it, and the result of a first replay.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, result


class _Isolated:
    """A call that, once it has raised, keeps the reason and does nothing more."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.reason = ""

    def __call__(self) -> None:
        if self.reason:
            return
        try:
            self._call()
        except Exception as error:
            self.reason = _reason(error)


def _reason(error: BaseException) -> str:
    """Sums up an exception in one sentence; its cause, if it has one, as compilers wrap theirs.

    Folders of this machine are left out: they are of no use to readers elsewhere.
    """
    while error.__cause__ is not None and not isinstance(error, Unavailable):
        error = error.__cause__
    sentence = re.split(r"(?<=\w)[.;] ", first_line(error))[0]
    return textwrap.shorten(f"{type(error).__name__}: {sentence}", _REASON, placeholder=" ...")


def _cpu(calls: Mapping[str, _Isolated], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _, order in rotations(calls, repeats):
        for name in order:
            begin = time.perf_counter()
            calls[name]()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return times
