"""What the timing scripts share: options, the loop over cases, memory, and means of ratios."""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Protocol, TypeVar

import torch
from flash_attn_deterministic import get_deterministic_mode
from flash_attn_deterministic.verify.speed.upstream import Baseline, BaselineError

from tests.benchmarks.shared.record import environment, sha256, write_json


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Case = TypeVar("_Case", bound=_Named)
Means = dict[str, dict[str, dict[str, Any]]]


def file_parser(doc: str | None, out: Path | None = None) -> argparse.ArgumentParser:
    """Returns a parser of the options that every script has; without a default, --out is needed."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--out", type=Path, required=not out, default=out, help="JSON to write")
    parser.add_argument("--wheel", type=Path, help="file of the installed wheel, for its sha256")
    return parser


def timing_parser(
    doc: str | None,
    *,
    repeats: int,
    budget_ms: float | None = None,
    seconds: float = math.inf,
    out: Path | None = None,
) -> argparse.ArgumentParser:
    """Returns a parser with the options of a script that times cases, and their defaults."""
    parser = file_parser(doc, out)
    parser.add_argument("--repeats", type=int, default=repeats, help="timed calls, at most")
    if budget_ms is not None:
        parser.add_argument("--budget-ms", type=float, default=budget_ms, help="GPU time of a case")
    words = "no further case starts after"
    parser.add_argument("--seconds", type=float, default=seconds, metavar="S", help=words)
    words = "parts of names: cases whose name has one of them run; default: all"
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help=words)
    return parser


def add_baseline(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Adds --baseline."""
    words = "libfa2_baseline.so, upstream's own kernels"
    parser.add_argument("--baseline", type=Path, required=required, help=words)


def begin_record(options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Returns the record of a run that has measured nothing yet."""
    given = {n: v for n, v in vars(options).items() if n in ("repeats", "budget_ms", "splits")}
    split_size = get_deterministic_mode().split_size
    return {
        **environment(options.wheel, sys.argv),
        **given,
        "split_size": split_size,
        "baseline": None,
        **more,
        "cases": [],
        "failed": [],
    }


def peak_memory(call: Callable[[], object]) -> int:
    """Returns the most bytes that a call held at once, its results included.

    Counts the bytes that it asked for: the allocator may hand out larger blocks.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
    del result
    return peak


def fail(error: Exception) -> str:
    """Prints and returns one line about an exception."""
    line = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    print(line, file=sys.stderr, flush=True)
    return line


def expect_close(differences: Mapping[str, float], limit: float) -> None:
    """Compares the sides of a case.

    Raises:
        RuntimeError: one differs from ours by more than a limit, or is NaN.
    """
    if not all(difference <= limit for difference in differences.values()):
        raise RuntimeError(f"the sides disagree: {differences}")


def open_baseline(path: Path | None, record: dict[str, Any]) -> Baseline | None:
    """Opens upstream's own kernels.

    Args:
        path: libfa2_baseline.so; None: none asked for.
        record: gets the library's hash, or the reason why it does not load.
    """
    if path is None:
        return None
    try:
        baseline = Baseline(path)
        record["baseline"] = {"sha256": sha256(path)}
    except (OSError, BaselineError) as error:
        record["failed"].append({"name": "baseline", "error": fail(error)})
        return None
    return baseline


def run_cases(
    options: argparse.Namespace,
    record: dict[str, Any],
    cases: Iterable[_Case],
    *,
    built: Callable[[_Case], bool],
    measure: Callable[[_Case], dict[str, Any]],
    summarise: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda results: {},
) -> int:
    """Measures cases one after another; writes JSON after each, so that a cut loses one at most.

    Args:
        options: of `timing_parser`.
        record: of `begin_record`. "left_out" gets the names of cases for which there was no time,
            or no GPU after another case broke it.
        cases: shapes, each with a name.
        built: whether the installed wheel holds what a case needs.
        measure: returns the result of a case, with times by side under "ms".
        summarise: returns what the record says about all results so far.

    Returns:
        Exit status: 1 if anything failed.
    """
    end, broken = time.monotonic() + options.seconds, ""
    record["left_out"] = []
    for case in cases:
        if not any(part in case.name for part in options.only):
            continue
        if time.monotonic() > end or broken:
            record["left_out"].append(case.name)
            continue
        if not built(case):
            record["failed"].append({"name": case.name, "error": "not in this wheel"})
            continue
        try:
            result = measure(case)
        except Exception as error:
            traceback.print_exc()
            record["failed"].append({"name": case.name, "error": fail(error)})
            broken = _broken_device()
        else:
            record["cases"].append(result)
            record |= summarise(record["cases"])
            medians = {name: ms["median"] for name, ms in result["ms"].items()}
            print(f"{case.name:36} {medians}", flush=True)
        write_json(options.out, record)
        if not broken:
            torch.cuda.empty_cache()
    if record["left_out"]:
        reason = broken or f"after {options.seconds:.0f} seconds"
        print(f"left out, {reason}: {len(record['left_out'])} cases", flush=True)
        write_json(options.out, record)
    return 1 if record["failed"] else 0


def _broken_device() -> str:
    """Returns why the GPU takes no more work from this process, as after an illegal access."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def ratios_to(times: Mapping[str, Mapping[str, float]], ours: str = "ours") -> dict[str, float]:
    """Returns our median time over that of each other side."""
    own = times[ours]["median"]
    return {name: round(own / one["median"], 4) for name, one in times.items() if name != ours}


def means(ratios: Iterable[tuple[str, str, str, float]]) -> Means:
    """Sums up ratios of times.

    Args:
        ratios: two keys to sum up by, the name of the case, and the ratio.

    Returns:
        By both keys the geometric "mean", the "worst" ratio and its case, and the number of
        "cases".
    """
    found: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for outer, inner, name, ratio in ratios:
        found.setdefault(outer, {}).setdefault(inner, []).append((ratio, name))
    return {
        outer: {
            inner: {
                "mean": round(geometric_mean(ratio for ratio, _ in own), 4),
                "worst": max(own)[0],
                "worst_case": max(own)[1],
                "cases": len(own),
            }
            for inner, own in groups.items()
        }
        for outer, groups in found.items()
    }


def lines(summary: Means) -> Iterator[str]:
    """Yields means for a terminal."""
    for outer, groups in summary.items():
        for inner, one in groups.items():
            yield (
                f"{outer:20} {inner:18} mean {one['mean']:.3f}, worst {one['worst']:.3f} "
                f"({one['worst_case']}), {one['cases']} cases"
            )
