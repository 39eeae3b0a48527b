"""Times prefill or backward beside the fastest kernels for Hopper: FlashAttention-4 and -3, cuDNN.

All sides run in one process, in turns, on the same inputs. Where FlashAttention-3 and -4 come from:
peer_libraries.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from flash_attn_deterministic.bench.measure import measure
from flash_attn_deterministic.bench.peers import OURS, PEERS, VARIANTS, Peer

from tests.benchmarks import peer_libraries
from tests.benchmarks.shared.peer_cases import BACKWARD, FORWARD, Case
from tests.benchmarks.shared.run import (
    Means,
    begin_record,
    lines,
    means,
    ratios_to,
    run_cases,
    timing_parser,
)
from tests.gpu.attention import is_built

CASES = {"forward": FORWARD, "backward": BACKWARD}
_TORCH = ("sdpa-cudnn", "sdpa-flash")
# FlashAttention-3's forward is timed with one split; with few queries on many keys its own choice
# may be faster.
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


def sides(kind: str, case: Case) -> list[Peer]:
    """Returns ours and the peers that a case is timed with."""
    known = {peer.name: peer for peer in (*PEERS, *VARIANTS)}
    names = SIDES["chunk"] if case.group == "chunk" else SIDES[kind]
    return [OURS, *(known[name] for name in names)]


def measure_case(kind: str, case: Case, repeats: int, budget_ms: float) -> dict[str, Any]:
    """Times one case of a kind, "forward" or "backward".

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
    over = ratios_to(times, OURS.name)
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


def summarise(results: Sequence[Mapping[str, Any]]) -> Means:
    """Returns means of our time over others': by group, by head dim ("D128") and of "all"."""
    return means(
        (group, side, result["name"], ratio)
        for result in results
        for group in ("all", result["group"], f"D{result['head_dim']}")
        for side, ratio in result["ours_over"].items()
    )


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    found = timing_parser(__doc__, repeats=20, budget_ms=150, seconds=600)
    found.add_argument("--kind", choices=tuple(CASES), required=True)
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
        if any(part in case.name for part in options.only)
        and (not options.groups or case.group in options.groups)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 1 if ours failed in a case."""
    command = parser()
    options = command.parse_args(arguments)
    try:
        cases = chosen(options)
    except ValueError as error:
        command.error(str(error))
    peer_libraries.find(options, command)
    if options.list:
        print("\n".join(f"{case.group}: {case.name}" for case in cases))
        return 0
    versions = peer_libraries.versions()
    record = begin_record(options, kind=options.kind, peers=versions, summary={})
    direction = "fwd" if options.kind == "forward" else "bwd"
    status = run_cases(
        options,
        record,
        cases,
        built=lambda case: is_built(case.shape.head_dim, "bf16", direction),
        measure=lambda case: measure_case(options.kind, case, options.repeats, options.budget_ms),
        summarise=lambda results: {"summary": summarise(results)},
    )
    print("\n".join(lines(record["summary"])))
    return status


if __name__ == "__main__":
    sys.exit(main())
