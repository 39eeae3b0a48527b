"""Times the forward of packed sequences against upstream's own kernels."""

from __future__ import annotations

import sys
from typing import Any

import torch
from flash_attn_deterministic import flash_attn_varlen_func
from flash_attn_deterministic.verify.speed.upstream import Baseline, Packed

from tests.benchmarks.shared.cases import Case, means_to, ragged, timed, timed_result
from tests.benchmarks.shared.run import (
    add_baseline,
    begin_record,
    expect_close,
    lines,
    open_baseline,
    peak_memory,
    ratios_to,
    run_cases,
    timing_parser,
)
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
        where = (packed.cu_seqlens_q, packed.cu_seqlens_k, packed.max_seqlen_q, packed.max_seqlen_k)
        return flash_attn_varlen_func(q, k, v, *where, causal=case.causal)

    def fa2() -> torch.Tensor:
        return baseline.forward(q, k, v, causal=case.causal, packed=packed)[0]

    difference = float((ours().float() - fa2().float()).abs().max())
    expect_close({"fa2": difference}, 0.1)
    sides = {"ours": ours, "fa2": fa2}
    memory = {name: peak_memory(run) for name, run in sides.items()}
    times = timed(sides, budget_ms, repeats)
    return {
        **timed_result(case, case.forward_flops, times),
        "peak_bytes_with_results": memory,
        "largest_difference": difference,
        "ratio_to_fa2": ratios_to(times)["fa2"],
    }


def main() -> int:
    """Command line; the exit status is 1 if a case failed."""
    parser = timing_parser(__doc__, repeats=30, budget_ms=1000)
    add_baseline(parser, required=True)
    options = parser.parse_args()
    record = begin_record(options, geometric_means={})
    baseline = open_baseline(options.baseline, record)
    if baseline is None:
        return 1
    status = run_cases(
        options,
        record,
        CASES,
        built=lambda case: is_built(case.head_dim, case.dtype),
        measure=lambda case: measure(case, baseline, options.repeats, options.budget_ms),
        summarise=lambda results: means_to(results, "fa2"),
    )
    print("\n".join(lines(record["geometric_means"])))
    return status


if __name__ == "__main__":
    sys.exit(main())
