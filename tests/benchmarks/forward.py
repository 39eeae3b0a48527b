"""Times the forward against upstream's own kernels and torch's flash backend.

All sides run in one process, in turns, on the same inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from flash_attn_deterministic import flash_attn_func
from flash_attn_deterministic.verify.speed.upstream import Baseline

from tests.benchmarks.shared.cases import DENSE, FEATURES, Case, means_to, timed, timed_result
from tests.benchmarks.shared.run import (
    add_baseline,
    begin_record,
    expect_close,
    fail,
    lines,
    open_baseline,
    peak_memory,
    ratios_to,
    run_cases,
    timing_parser,
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
    """Times one case, at `splits` too where the case has several splits.

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
    named = {name: one for name, one in times.items() if not name.startswith("ours_")}
    result = {
        **timed_result(case, case.forward_flops, named),
        "peak_bytes_with_results": {name: memory[name] for name in named},
        "largest_difference_to_ours": differences,
        **{f"ratio_to_{other}": ratio for other, ratio in ratios_to(named).items()},
        "splits": {},
    }
    for name in (name for name in times if name not in named):
        ratios = ratios_to({**named, "ours": times[name]})
        result["splits"][name.removeprefix("ours_")] = {
            "ms": times[name],
            "peak_bytes_with_results": memory[name],
            **{f"ratio_to_{other}": ratio for other, ratio in ratios.items()},
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
    expect_close(differences, 0.1)
    return differences


def main() -> int:
    """Command line; the exit status is 1 if a case failed."""
    parser = timing_parser(__doc__, repeats=30, budget_ms=400)
    add_baseline(parser)
    parser.add_argument(
        "--splits", type=int, nargs="*", default=[1024, 4096, 0], help="besides the mode's"
    )
    options = parser.parse_args()
    record = begin_record(options, geometric_means={})
    baseline = open_baseline(options.baseline, record)
    status = run_cases(
        options,
        record,
        DENSE,
        built=lambda case: is_built(case.head_dim, case.dtype),
        measure=lambda case: measure(
            case, baseline, options.repeats, options.budget_ms, options.splits
        ),
        summarise=lambda results: means_to(results, "fa2", "sdpa"),
    )
    print("\n".join(lines(record["geometric_means"])))
    return status


if __name__ == "__main__":
    sys.exit(main())
