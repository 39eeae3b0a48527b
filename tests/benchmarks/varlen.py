"""Times the forward of packed sequences against upstream's own kernels."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from flash_attn_deterministic import flash_attn_varlen_func, get_deterministic_mode

from tests.benchmarks.baseline import Baseline, Packed
from tests.benchmarks.cases import Case, means, timed
from tests.benchmarks.common import (
    environment,
    open_baseline,
    peak_memory,
    print_means,
    run_cases,
)
from tests.benchmarks.lengths import ragged
from tests.gpu.attention import DTYPES, is_built, make_qkv

RAGGED = ragged(64, 1, 8192)
# nheads, nheads_k, head_dim
SHAPES = ((32, 8, 128), (16, 16, 128), (32, 32, 64))
CASES = tuple(
    Case(len(RAGGED), max(RAGGED), *shape, causal, lengths=RAGGED)
    for shape in SHAPES
    for causal in (False, True)
)


def measure(case: Case, baseline: Baseline, repeats: int, budget_ms: float) -> dict[str, Any]:
    """Times one case.

    Returns:
        Milliseconds and memory per side, and the ratio of medians.

    Raises:
        RuntimeError: the sides disagree.
    """
    packed = Packed.of(case.lengths)
    shape = (1, sum(case.lengths), case.nheads, case.head_dim)
    q, k, v = (t[0] for t in make_qkv(shape, nheads_k=case.nheads_k, dtype=DTYPES[case.dtype]))

    def ours() -> torch.Tensor:
        return flash_attn_varlen_func(
            q,
            k,
            v,
            packed.cu_seqlens_q,
            packed.cu_seqlens_k,
            packed.max_seqlen_q,
            packed.max_seqlen_k,
            causal=case.causal,
        )

    def fa2() -> torch.Tensor:
        return baseline.varlen_forward(q, k, v, packed, causal=case.causal)[0]

    difference = float((ours().float() - fa2().float()).abs().max())
    if not difference <= 0.1:
        raise RuntimeError(f"the sides disagree by {difference}")
    sides = {"ours": ours, "fa2": fa2}
    memory = {name: peak_memory(run) for name, run in sides.items()}
    times = timed(sides, budget_ms, repeats)
    return {
        "name": case.name,
        **asdict(case),
        "ms": times,
        "tflops": round(case.forward_flops / times["ours"]["median"] / 1e9, 1),
        "peak_bytes_with_results": memory,
        "largest_difference": difference,
        "ratio_to_fa2": round(times["ours"]["median"] / times["fa2"]["median"], 4),
    }


def main() -> int:
    """Command line; the exit status is 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--baseline", type=Path, required=True, help="libfa2_baseline.so")
    parser.add_argument("--wheel", type=Path, help="the installed wheel's file, for its sha256")
    parser.add_argument("--repeats", type=int, default=30, help="at most")
    parser.add_argument("--budget-ms", type=float, default=1000, help="GPU time of a case")
    options = parser.parse_args()

    record: dict[str, Any] = {
        **environment(options.wheel, sys.argv),
        "repeats": options.repeats,
        "budget_ms": options.budget_ms,
        "split_size": get_deterministic_mode().split_size,
        "geometric_means": {},
        "cases": [],
        "failed": [],
    }
    baseline = open_baseline(options.baseline, record)
    if baseline is None:
        return 1

    def summarise() -> None:
        record["geometric_means"] = means(record["cases"], ("fa2",))

    status = run_cases(
        options.out,
        record,
        CASES,
        built=lambda case: is_built(case.head_dim, case.dtype),
        measure=lambda case: measure(case, baseline, options.repeats, options.budget_ms),
        summarise=summarise,
    )
    print_means(record["geometric_means"])
    return status


if __name__ == "__main__":
    sys.exit(main())
