"""Times decode steps through CUDA graphs: ours by split size and from pages, upstream's heuristic,
and a kernel that only reads the keys and values, which is the floor.

A graph holds several calls, so that launches do not count; they go over several caches where one
would fit in the L2 cache.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import geometric_mean
from typing import Any

import torch
from flash_attn_deterministic import flash_attn_func, flash_attn_with_kvcache
from flash_attn_deterministic.verify.speed.decode import Step, rotation, time_graphs
from flash_attn_deterministic.verify.speed.measure import interleaved
from flash_attn_deterministic.verify.speed.upstream import Baseline

from tests.benchmarks.shared.decode_cases import Case, read
from tests.benchmarks.shared.run import (
    add_baseline,
    begin_record,
    expect_close,
    open_baseline,
    peak_memory,
    run_cases,
    timing_parser,
)
from tests.gpu.attention import is_built

_PAGE_BLOCK_SIZE = 16  # serving engines' usual one


CASES = (
    Case(1, 1, 4096, 32, 8, 128),
    Case(8, 1, 4096, 32, 8, 128),
    Case(64, 1, 4096, 32, 8, 128),
    Case(1, 1, 32_768, 32, 8, 128),
    Case(8, 1, 32_768, 32, 8, 128),
    Case(64, 1, 16_384, 32, 8, 128),
    Case(1, 1, 131_072, 32, 8, 128),
    Case(256, 1, 2048, 32, 8, 128),
    Case(8, 1, 8192, 32, 1, 128),
    Case(64, 1, 8192, 32, 1, 128),
    Case(8, 1, 8192, 32, 8, 64),
    Case(64, 1, 4096, 32, 8, 64),
)


def shuffled_pages(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts keys and values into pages of 16 tokens that lie in any order.

    Args:
        kv: (2, batch, seqlen, nheads_k, head_dim); seqlen a multiple of 16.

    Returns:
        Pages, (2, batch * seqlen / 16, 16, nheads_k, head_dim), and the block table, int32
        (batch, seqlen / 16).
    """
    pages = kv.view(2, -1, _PAGE_BLOCK_SIZE, *kv.shape[3:])
    table = torch.randperm(pages.shape[1], device=kv.device)
    shuffled = torch.empty_like(pages)
    shuffled[:, table] = pages
    return shuffled, table.int().view(kv.shape[1], -1)


def measure(
    case: Case, baseline: Baseline | None, splits: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Times one case at several split sizes.

    Returns:
        Milliseconds of a call and memory per side, and ratios of medians.
    """
    sets, calls = rotation(case.kv_bytes)
    row = (case.head_dim,)
    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q = [torch.randn((case.batch, 1, case.nheads, *row), **bf16) for _ in range(sets)]
    shape = (2, case.batch, case.seqlen, case.nheads_k, *row)
    kv = [torch.randn(shape, **bf16) for _ in range(sets)]
    paged = [shuffled_pages(t) for t in kv]
    lengths = torch.full((case.batch,), case.seqlen, device="cuda", dtype=torch.int32)

    def from_pages(i: int) -> torch.Tensor:
        (key, value), table = paged[i]
        return flash_attn_with_kvcache(q[i], key, value, cache_seqlens=lengths, block_table=table)

    def ours(split_size: int) -> Callable[[int], torch.Tensor]:
        return lambda i: flash_attn_func(q[i], kv[i][0], kv[i][1], split_size=split_size)

    sides: dict[str, Callable[[int], torch.Tensor]] = {f"ours_{s}": ours(s) for s in splits}
    sides["ours_paged"] = from_pages  # at the default split size
    if baseline is not None:
        sides["fa2"] = lambda i: baseline.forward(q[i], kv[i][0], kv[i][1], num_splits=0)[0]
    results = {name: step(0).float() for name, step in sides.items()}
    expected = results["fa2" if baseline is not None else f"ours_{splits[0]}"]
    allowed = 0.05 * float(expected.abs().max())
    differences = {n: float((one - expected).abs().max()) for n, one in results.items()}
    expect_close(differences, allowed)
    del results, expected

    result_bytes = q[0].nbytes + 4 * case.batch * case.nheads
    scratch = {}
    for name, step in sides.items():
        scratch[name] = max(0, peak_memory(lambda step=step: step(0)) - result_bytes)  # type: ignore[misc]

    steps: dict[str, Step] = {**sides, "read": lambda i: read(kv[i])}
    timer = functools.partial(interleaved, repeats=repeats)
    times = time_graphs(steps, sets, calls, timer)
    floor = times["read"]["median"]
    result: dict[str, Any] = {
        "name": case.name.removeprefix("q1 "),
        **asdict(case),
        "dtype": "bf16",
        "kv_bytes": case.kv_bytes,
        "sets": sets,
        "calls_per_graph": calls,
        "ms": times,
        "floor_ms": round(floor, 5),
        "read_gb_per_s": round(case.kv_bytes / floor / 1e6, 1),
        "scratch_bytes": scratch,
        "ratio_to_floor": {n: round(times[n]["median"] / floor, 4) for n in sides},
    }
    if baseline is not None:
        fa2 = times["fa2"]["median"]
        result["ratio_to_fa2"] = {
            n: round(times[n]["median"] / fa2, 4) for n in sides if n != "fa2"
        }
    return result


def geometric_means(cases: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the geometric means of the ratios over all cases."""
    means: dict[str, dict[str, float]] = {}
    for ratio in ("ratio_to_fa2", "ratio_to_floor"):
        found = [case[ratio] for case in cases if ratio in case]
        for name in found[0] if found else ():
            mean = geometric_mean([one[name] for one in found])
            means.setdefault(ratio, {})[name] = round(mean, 4)
    return means


def main() -> int:
    """Command line; the exit status is 1 if a case failed."""
    parser = timing_parser(__doc__, repeats=20)
    add_baseline(parser)
    parser.add_argument("--splits", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    options = parser.parse_args()
    record = begin_record(options, geometric_means={})
    baseline = open_baseline(options.baseline, record)
    status = run_cases(
        options,
        record,
        CASES,
        built=lambda case: is_built(case.head_dim, "bf16"),
        measure=lambda case: measure(case, baseline, options.splits, options.repeats),
        summarise=lambda results: {"geometric_means": geometric_means(results)},
    )
    print(record["geometric_means"])
    return status


if __name__ == "__main__":
    sys.exit(main())
