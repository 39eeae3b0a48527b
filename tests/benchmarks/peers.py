"""Times prefill or backward beside the fastest kernels for Hopper: FlashAttention-4 and -3, cuDNN.

All sides run in one process, in turns, on the same inputs. JSON is written after each case, so that
a cut leaves what there was; after --seconds no further case starts. Where FlashAttention-3 and -4
come from: peer_libraries.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flash_attn_deterministic import get_deterministic_mode
from flash_attn_deterministic.bench.measure import measure
from flash_attn_deterministic.bench.peers import OURS, PEERS, VARIANTS, Peer

from tests.benchmarks import peer_libraries
from tests.benchmarks.common import environment, geometric_mean, run_cases
from tests.benchmarks.peer_cases import BACKWARD, FORWARD, Case
from tests.gpu.attention import is_built

CASES = {"forward": FORWARD, "backward": BACKWARD}
_TORCH = ("sdpa-cudnn", "sdpa-flash")
# A forward of FlashAttention-3 goes over the keys in one split, unless it is told otherwise; with
# few queries on many keys its heuristic may be faster.
SIDES = {
    "forward": ("fa4", "fa3-one-split", *_TORCH),
    "chunk": ("fa4", "fa3-one-split", "fa3", *_TORCH),
    "backward": ("ours-atomics", "fa4-deterministic", "fa3-deterministic", "fa3", *_TORCH),
}
# What "best" is the fastest of.
RIVALS = {
    "forward": ("fa4", "fa3-one-split", "fa3", "sdpa-cudnn"),
    "backward": ("fa4-deterministic", "fa3-deterministic", "sdpa-cudnn"),
}
ALL = "all"


def sides(kind: str, case: Case) -> list[Peer]:
    """Returns ours and the peers that a case is timed with."""
    known = {peer.name: peer for peer in (*PEERS, *VARIANTS)}
    names = SIDES["chunk"] if case.group == "chunk" else SIDES[kind]
    return [OURS, *(known[name] for name in names)]


def measure_case(kind: str, case: Case, repeats: int, budget_ms: float) -> dict[str, Any]:
    """Times one case.

    Args:
        kind: "forward" or "backward".
        case: the shape.
        repeats: timed rounds, at most.
        budget_ms: milliseconds of GPU time for them.

    Returns:
        Milliseconds by side, TFLOP/s, our time over theirs, and why the others could not run.

    Raises:
        RuntimeError: ours failed.
    """
    shape = case.shape
    found = measure(shape, "cuda", sides(kind, case), repeats, budget_ms)
    times = found["ms"]
    if OURS.name not in times:
        raise RuntimeError(found["failed"].get(OURS.name, "ours was not timed"))
    ours = times[OURS.name]["median"]
    over = {name: round(ours / one["median"], 4) for name, one in times.items()}
    del over[OURS.name]
    rivals = [over[name] for name in RIVALS[kind] if name in over]
    if rivals:
        over["best"] = max(rivals)
    del found["ratio"]
    return {
        **found,
        "group": case.group,
        "tflops": {
            name: round(shape.flops / one["median"] / 1e9, 1) for name, one in times.items()
        },
        "ours_over": over,
    }


def summarise(cases: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Sums up our time over others'.

    Args:
        cases: results of measure_case.

    Returns:
        By group, by head dim ("D128") and for all: by side the geometric "mean", the "worst" ratio
        and its case, and the number of "cases".
    """
    found: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for case in cases:
        for group in (ALL, case["group"], f"D{case['head_dim']}"):
            for side, ratio in case["ours_over"].items():
                found.setdefault(group, {}).setdefault(side, []).append((ratio, case["name"]))
    return {
        group: {
            side: {
                "mean": round(geometric_mean([ratio for ratio, _ in ratios]), 4),
                "worst": max(ratios)[0],
                "worst_case": max(ratios)[1],
                "cases": len(ratios),
            }
            for side, ratios in of_sides.items()
        }
        for group, of_sides in found.items()
    }


def lines(summary: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Returns a summary for a terminal: our time over others', mean and worst."""
    return [
        f"{group:20} {side:18} mean {one['mean']:.3f}, worst {one['worst']:.3f} "
        f"({one['worst_case']}), {one['cases']} cases"
        for group, of_sides in summary.items()
        for side, one in of_sides.items()
    ]


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--kind", choices=tuple(CASES), required=True)
    found.add_argument("--out", type=Path, required=True, help="JSON file to write")
    found.add_argument("--wheel", type=Path, help="the installed wheel's file, for its sha256")
    found.add_argument("--repeats", type=int, default=20, help="at most")
    found.add_argument("--budget-ms", type=float, default=150, help="GPU time of a case")
    found.add_argument("--seconds", type=float, default=600, help="no further case starts after")
    found.add_argument("--only", default="", help="part of the names of the cases to run")
    found.add_argument("--groups", nargs="+", metavar="GROUP", help="groups to run (default: all)")
    found.add_argument("--list", action="store_true", help="print groups and names, run nothing")
    peer_libraries.add_arguments(found)
    return found


def chosen(options: argparse.Namespace) -> list[Case]:
    """Returns the cases that a command line asks for.

    Raises:
        ValueError: there is no such group.
    """
    cases = CASES[options.kind]
    groups = list(dict.fromkeys(case.group for case in cases))
    unknown = [group for group in options.groups or () if group not in groups]
    if unknown:
        raise ValueError(f"--groups: no {', '.join(unknown)}; there are {', '.join(groups)}")
    return [
        case
        for case in cases
        if options.only in case.name and (not options.groups or case.group in options.groups)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 1 if ours failed in a case."""
    command = parser()
    options = command.parse_args(arguments)
    try:
        cases = chosen(options)
        peer_libraries.find(options)
    except (ValueError, FileNotFoundError) as error:
        command.error(str(error))
    if options.list:
        print("\n".join(f"{case.group}: {case.name}" for case in cases))
        return 0
    record: dict[str, Any] = {
        **environment(options.wheel, sys.argv),
        "kind": options.kind,
        "peers": peer_libraries.versions(),
        "repeats": options.repeats,
        "budget_ms": options.budget_ms,
        "split_size": get_deterministic_mode().split_size,
        "summary": {},
        "cases": [],
        "failed": [],
    }
    direction = "fwd" if options.kind == "forward" else "bwd"

    def bring_up_to_date() -> None:
        record["summary"] = summarise(record["cases"])

    status = run_cases(
        options.out,
        record,
        cases,
        built=lambda case: is_built(case.shape.head_dim, "bf16", direction),
        measure=lambda case: measure_case(options.kind, case, options.repeats, options.budget_ms),
        summarise=bring_up_to_date,
        seconds=options.seconds,
    )
    print("\n".join(lines(record["summary"])))
    return status


if __name__ == "__main__":
    sys.exit(main())
