"""Timing of calls on a GPU, and their memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

_FLUSH_BYTES = 256 * 2**20  # several times the largest L2 cache
_FLUSHES = 8  # longer than the host needs for a forward and backward through autograd


def summary(values: Sequence[float]) -> dict[str, float]:
    """Returns median, 10th and 90th percentile of at least two values, in milliseconds.

    Of values that are not all finite, all three are NaN: sorting would hide some places of a NaN.
    """
    if not all(map(math.isfinite, values)):
        return dict.fromkeys(("median", "p10", "p90"), math.nan)
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {
        "median": round(statistics.median(values), 5),
        "p10": round(deciles[0], 5),
        "p90": round(deciles[-1], 5),
    }


def rotations(names: Iterable[str], rounds: int) -> Iterator[tuple[int, list[str]]]:
    """Yields each round and its order of names; each name comes first equally often."""
    order = list(names)
    for turn in range(rounds):
        yield turn, order
        order = order[1:] + order[:1]


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 3, flushes: int = 1
) -> dict[str, list[float]]:
    """Times calls in turns, so that changes of the clock rate affect all equally.

    The L2 cache is overwritten before each call. This also gives the GPU work while the host
    prepares the call: 0.1 ms on an H100 each time, so that slow host code needs several.

    Args:
        calls: a call per name, on the current stream.
        repeats: timed rounds; each runs every call once, in rotated order.
        warmup: rounds before them.
        flushes: how often the L2 cache is overwritten before each call.

    Returns:
        Milliseconds of each timed call, per name.
    """
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for turn, order in rotations(calls, warmup + repeats):
        for name in order:
            begin, end = _event(), _event()
            for _ in range(flushes):
                flush.fill_(turn)
            begin.record()
            calls[name]()
            end.record()
            if turn >= warmup:
                events[name].append((begin, end))
        torch.cuda.synchronize()
    return {name: [b.elapsed_time(e) for b, e in pairs] for name, pairs in events.items()}


def within(
    calls: Mapping[str, Callable[[], object]], budget_ms: float, most: int, least: int = 5
) -> dict[str, list[float]]:
    """Times calls in turns, as often as a budget of GPU time allows.

    Args:
        calls: a call per name, on the current stream; of those through autograd the host takes up
            to 0.8 ms.
        budget_ms: milliseconds for all timed calls together.
        most: rounds at most.
        least: rounds at least, whatever they take, but not above `most`.

    Returns:
        Milliseconds of each timed call, per name.
    """
    trial = interleaved(calls, repeats=2, warmup=1, flushes=_FLUSHES)
    round_ms = sum(min(times) + _FLUSHES * 0.1 for times in trial.values())
    repeats = round(min(most, max(least, budget_ms / round_ms)))
    return interleaved(calls, repeats=repeats, warmup=1, flushes=_FLUSHES)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]


def peak_memory(call: Callable[[], object]) -> int:
    """Returns the most bytes that a call had allocated at once, its results included."""
    call()  # what is allocated once, such as cuBLAS's workspace, does not count
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak
