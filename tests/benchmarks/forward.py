"""Times the forward against upstream's own kernels and torch's flash backend.

All sides run in one process, in turns, on the same inputs. Writes JSON after every case, so that an
interrupted run leaves what it had.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from flash_attn_deterministic import flash_attn_func, get_deterministic_mode

from tests.benchmarks.baseline import Baseline
from tests.benchmarks.cases import DENSE, FEATURES, Case, means, timed
from tests.benchmarks.common import (
    environment,
    fail,
    open_baseline,
    peak_memory,
    print_means,
    run_cases,
)
from tests.gpu.attention import DTYPES, is_built, make_qkv

Contender = Callable[[], torch.Tensor]


# Split sizes are compared where sequences have several splits, at the head dims in common use.
def _compares_splits(case: Case) -> bool:
    return case.seqlen >= 4096 and case.head_dim in (64, 128) and not case.feature


def measure(
    case: Case,
    baseline: Baseline | None,
    repeats: int,
    budget_ms: float,
    splits: Sequence[int] = (),
) -> dict[str, Any]:
    """Times one case.

    Args:
        case: The shape.
        baseline: Upstream's own kernels, if there.
        repeats: timed calls of each side, at most.
        budget_ms: milliseconds for all of them.
        splits: split sizes to time besides the mode's, where the case has several.

    Returns:
        Milliseconds and memory per side, and ratios of medians; those of `splits` apart.

    Raises:
        RuntimeError: the sides disagree.
    """
    shape = (case.batch, case.seqlen, case.nheads, case.head_dim)
    q, k, v = make_qkv(shape, nheads_k=case.nheads_k, dtype=DTYPES[case.dtype])
    # Views: the same memory, in the order of dimensions that torch takes.
    q_t, k_t, v_t = (t.transpose(1, 2) for t in (q, k, v))
    scores = case.scores()
    options = {**FEATURES[case.feature], "alibi_slopes": scores.alibi_slopes}

    def ours(split_size: int | None = None) -> torch.Tensor:
        out: torch.Tensor = flash_attn_func(
            q, k, v, causal=case.causal, split_size=split_size, **options
        )
        return out

    def sdpa() -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                q_t, k_t, v_t, is_causal=case.causal, enable_gqa=case.nheads != case.nheads_k
            )
        return out.transpose(1, 2)

    sides: dict[str, Contender] = {"ours": ours}
    if not case.feature:
        try:
            sdpa()
            sides["sdpa"] = sdpa
        except RuntimeError as error:  # a torch whose flash backend takes no groups of heads
            fail(error)
    if baseline is not None and baseline.holds(case.head_dim, q.dtype, case.causal, scores):
        sides["fa2"] = lambda: baseline.forward(q, k, v, causal=case.causal, scores=scores)[0]
    for size in splits if _compares_splits(case) else ():
        sides[f"ours_{size}"] = lambda size=size: ours(size)  # type: ignore[misc]
    differences = _differences(case, sides)
    memory = {name: peak_memory(run) for name, run in sides.items()}
    times = timed(sides, budget_ms, repeats)
    named = [name for name in sides if not name.startswith("ours_")]
    result: dict[str, Any] = {
        "name": case.name,
        **asdict(case),
        "ms": {name: times[name] for name in named},
        "tflops": round(case.forward_flops / times["ours"]["median"] / 1e9, 1),
        "peak_bytes_with_results": {name: memory[name] for name in named},
        "largest_difference_to_ours": differences,
        "splits": {},
    }
    others = [name for name in named if name != "ours"]
    for other in others:
        ratio = times["ours"]["median"] / times[other]["median"]
        result[f"ratio_to_{other}"] = round(ratio, 4)
    for name, own in times.items():
        if name not in named:
            result["splits"][name.removeprefix("ours_")] = {
                "ms": own,
                "peak_bytes_with_results": memory[name],
                **{f"ratio_to_{o}": round(own["median"] / times[o]["median"], 4) for o in others},
            }
    return result


def _differences(case: Case, sides: Mapping[str, Contender]) -> dict[str, float]:
    """Compares the other sides with ours.

    Raises:
        RuntimeError: they disagree, or ours is not finite.
    """
    expected = sides["ours"]()
    if not bool(expected.isfinite().all()):
        raise RuntimeError("ours is not finite")
    if case.feature == "dropout":  # the masks are others
        return {}
    differences = {
        name: float((run() - expected).abs().max()) for name, run in sides.items() if name != "ours"
    }
    if not all(d <= 0.1 for d in differences.values()):
        raise RuntimeError(f"the sides disagree: {differences}")
    return differences


def main() -> int:
    """Command line; the exit status is 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--baseline", type=Path, help="libfa2_baseline.so")
    parser.add_argument("--wheel", type=Path, help="the installed wheel's file, for its sha256")
    parser.add_argument("--repeats", type=int, default=30, help="at most")
    parser.add_argument("--budget-ms", type=float, default=400, help="GPU time of a case")
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument(
        "--splits", type=int, nargs="*", default=[1024, 4096, 0], help="besides the mode's"
    )
    options = parser.parse_args()

    record: dict[str, Any] = {
        **environment(options.wheel, sys.argv),
        "repeats": options.repeats,
        "budget_ms": options.budget_ms,
        "split_size": get_deterministic_mode().split_size,
        "baseline": None,
        "geometric_means": {},
        "cases": [],
        "failed": [],
    }
    baseline = open_baseline(options.baseline, record)

    def summarise() -> None:
        record["geometric_means"] = means(record["cases"], ("fa2", "sdpa"))

    status = run_cases(
        options.out,
        record,
        DENSE,
        built=lambda case: is_built(case.head_dim, case.dtype),
        measure=lambda case: measure(
            case, baseline, options.repeats, options.budget_ms, options.splits
        ),
        only=options.only,
        summarise=summarise,
    )
    print_means(record["geometric_means"])
    return status


if __name__ == "__main__":
    sys.exit(main())
