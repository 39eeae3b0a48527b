"""Timing of calls on a GPU, and their memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

_FLUSH_BYTES = 256 * 2**20  # several times the largest L2 cache


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


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 3
) -> dict[str, list[float]]:
    """Times calls in turns, so that a drifting clock meets all of them alike.

    The L2 cache is overwritten before each; that also gives the GPU work while the host prepares
    the launch.

    Args:
        calls: a call per name, on the current stream.
        repeats: timed rounds; each runs every call once, in rotated order.
        warmup: rounds before them.

    Returns:
        Milliseconds of each timed call, per name.
    """
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    names = list(calls)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in names}
    for turn in range(warmup + repeats):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            begin, end = _event(), _event()
            flush.fill_(turn)
            begin.record()
            calls[name]()
            end.record()
            if turn >= warmup:
                events[name].append((begin, end))
        torch.cuda.synchronize()
    return {name: [b.elapsed_time(e) for b, e in pairs] for name, pairs in events.items()}


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
