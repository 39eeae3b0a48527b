"""Times training calls with and without `keep_residual`, forward and backward, and their memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from flash_attn_deterministic import deterministic_mode, flash_attn_func

from tests.benchmarks.shared.cases import DENSE, Case, timed
from tests.benchmarks.shared.run import (
    begin_record,
    lines,
    means,
    peak_memory,
    run_cases,
    timing_parser,
)
from tests.gpu.attention import DTYPES, is_built, make_qkv

# At each head dim one long and one short shape, full and causal where DENSE has both.
CASES = tuple(case for case in DENSE if not case.feature and case.seqlen in (512, 4096, 16_384))
_DIRECTIONS = ("forward", "backward")


def measure(case: Case, repeats: int, budget_ms: float) -> dict[str, Any]:
    """Times one case.

    Returns:
        Milliseconds of forward and backward, without and with a residual; the ratios of medians;
        bytes that a forward keeps, without and with.
    """
    shape = (case.batch, case.seqlen, case.nheads, case.head_dim)
    q, k, v = leaves = tuple(
        tensor.requires_grad_()
        for tensor in make_qkv(shape, nheads_k=case.nheads_k, dtype=DTYPES[case.dtype])
    )
    sides: dict[str, Callable[[], object]] = {}
    kept: dict[str, int] = {}
    for keeps in (False, True):

        def forward(keeps: bool = keeps) -> torch.Tensor:
            with deterministic_mode(keep_residual=keeps):
                return flash_attn_func(q, k, v, causal=case.causal)

        out = forward()
        dout = torch.randn_like(out)

        def backward(out: torch.Tensor = out, dout: torch.Tensor = dout) -> object:
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

        name = "with residual" if keeps else "without"
        sides |= {f"forward, {name}": forward, f"backward, {name}": backward}
        kept[name] = peak_memory(forward)
    times = timed(sides, budget_ms, repeats)
    return {
        "name": case.name,
        **asdict(case),
        "ms": times,
        "ratio": {
            one: round(
                times[f"{one}, with residual"]["median"] / times[f"{one}, without"]["median"], 4
            )
            for one in _DIRECTIONS
        },
        "forward_bytes": kept,
    }


def main() -> int:
    """Command line; the exit status is 1 if a case failed."""
    options = timing_parser(__doc__, repeats=20, budget_ms=150).parse_args()
    record = begin_record(options, summary={})
    status = run_cases(
        options,
        record,
        CASES,
        built=lambda case: all(is_built(case.head_dim, case.dtype, one) for one in ("fwd", "bwd")),
        measure=lambda case: measure(case, options.repeats, options.budget_ms),
        summarise=lambda results: {
            "summary": means(
                (one, key, result["name"], result["ratio"][one])
                for result in results
                for one in _DIRECTIONS
                for key in ("all", f"D{result['head_dim']}")
            )
        },
    )
    print("\n".join(lines(record["summary"])))
    return status


if __name__ == "__main__":
    sys.exit(main())
