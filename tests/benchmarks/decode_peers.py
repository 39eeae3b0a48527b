"""Times decode of one or a few queries through CUDA graphs: ours by path, FlashAttention-3 at its
default, upstream's heuristic, and a kernel that only reads the keys and values.

Where FlashAttention-3 comes from: peer_libraries.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from flash_attn_deterministic import explain, flash_attn_func, flash_attn_with_kvcache
from flash_attn_deterministic.verify.contract.device_override import device_override
from flash_attn_deterministic.verify.scoreboard import fa3
from flash_attn_deterministic.verify.speed.decode import rotation, time_graphs
from flash_attn_deterministic.verify.speed.measure import within
from flash_attn_deterministic.verify.speed.upstream import Baseline

from tests.benchmarks import peer_libraries
from tests.benchmarks.shared.decode_cases import Case, read
from tests.benchmarks.shared.run import (
    add_baseline,
    begin_record,
    expect_close,
    lines,
    means,
    open_baseline,
    ratios_to,
    run_cases,
    timing_parser,
)
from tests.gpu.attention import is_built

_FORCED = ("few_rows", "scores_first", "parts")
_DEVICE = "cuda"

Step = Callable[[int], torch.Tensor]


CASES = (
    Case(1, 1, 4096, 32, 8, 128),
    Case(8, 1, 4096, 32, 8, 128),
    Case(8, 1, 8192, 32, 1, 128),
    Case(16, 1, 4096, 16, 2, 256),
    Case(3, 1, 777, 40, 8, 128),
    Case(1, 1, 32_768, 32, 8, 128),
    Case(1, 1, 100_000, 8, 1, 128),
    Case(64, 1, 4096, 64, 8, 128),
    Case(17, 1, 9000, 32, 8, 128),
    Case(128, 1, 1500, 16, 16, 64),
    Case(8, 1, 8192, 32, 8, 64),
    Case(64, 1, 4096, 32, 8, 128),
    Case(8, 1, 32_768, 32, 8, 128),
    Case(64, 1, 16_384, 32, 8, 128),
    Case(1, 1, 131_072, 32, 8, 128),
    Case(256, 1, 2048, 32, 8, 128),
    Case(64, 1, 8192, 32, 1, 128),
    Case(64, 1, 4096, 32, 8, 64),
    Case(8, 5, 4096, 32, 8, 128),
    Case(32, 2, 8192, 32, 8, 128),
    Case(4, 16, 32_768, 32, 8, 128),
    Case(1, 4, 8192, 32, 8, 128),
    Case(8, 1, 3000, 32, 8, 128, 16),
    Case(1, 1, 20_000, 32, 8, 128, 256),
    Case(32, 1, 6000, 32, 8, 128, 16),
    Case(64, 1, 2000, 28, 4, 128, 64),
    # Where parts of a few queries and the path scores-first should be equally fast.
    Case(2, 5, 4096, 32, 8, 128),
    Case(4, 5, 4096, 32, 8, 128),
    Case(4, 1, 8192, 64, 2, 128),
    Case(8, 5, 4096, 32, 8, 64),
)


def _forced(step: Step, path: str) -> Step:
    def run(i: int) -> torch.Tensor:
        with device_override(f"path={path}"):
            return step(i)

    return run


def _paged(tensor: torch.Tensor, table: torch.Tensor, size: int) -> torch.Tensor:
    batch, count = table.shape
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, count * size - tensor.shape[1]))
    pages = torch.empty(batch * count, size, *tensor.shape[2:], device=_DEVICE, dtype=tensor.dtype)
    pages[table.flatten().long()] = padded.reshape(batch * count, size, *tensor.shape[2:])
    return pages


def _is_wanted(side: str, only: Sequence[str]) -> bool:
    return not only or side == "ours" or side in only


def measure(
    case: Case,
    baseline: Baseline | None,
    with_fa3: bool,
    repeats: int,
    budget_ms: float,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Times one case.

    Args:
        case: shape.
        baseline: upstream's own kernels, if there.
        with_fa3: whether FlashAttention-3 is loaded.
        repeats: timed replays of each side, at most.
        budget_ms: milliseconds of GPU time for them; at least 5 are made.
        only: sides to time beside ours; empty: all.

    Returns:
        Milliseconds of a call per side, ratios of medians, and what the plan says.
    """
    sets, calls = rotation(case.kv_bytes)
    bf16: dict[str, Any] = {"device": _DEVICE, "dtype": torch.bfloat16}
    q = [torch.randn(case.batch, case.seqlen_q, case.nheads, case.head_dim, **bf16)] * sets
    shape = (case.batch, case.seqlen, case.nheads_k, case.head_dim)
    kv = [torch.randn((2, *shape), **bf16) for _ in range(sets)]
    dense = [(one[0], one[1]) for one in kv]
    lengths = torch.full((case.batch,), case.seqlen, device=_DEVICE, dtype=torch.int32)

    def contiguous(i: int) -> torch.Tensor:
        return flash_attn_func(q[i], *dense[i], causal=True)

    sides: dict[str, Step] = {"ours": contiguous}
    options: dict[str, torch.Tensor] = {}
    caches = dense
    if case.page_block_size:
        size = case.page_block_size
        count = -(-case.seqlen // size)
        table = torch.randperm(case.batch * count, device=_DEVICE).view(case.batch, count).int()
        caches = [(_paged(k, table, size), _paged(v, table, size)) for k, v in dense]
        options = {"block_table": table}
        sides["contiguous"] = contiguous
        paged_call: dict[str, Any] = {"cache_seqlens": lengths, "block_table": table}
        plan = explain(flash_attn_with_kvcache, q[0], *caches[0], causal=True, **paged_call)
        sides["ours"] = lambda i: flash_attn_with_kvcache(
            q[i], *caches[i], causal=True, **paged_call
        )
    else:
        plan = explain(flash_attn_func, q[0], *dense[0], causal=True)
    for name in _FORCED:
        sides[name] = _forced(sides["ours"], name)
    if with_fa3:
        paged: dict[str, Any] = {}
        if options:
            paged = {"page_table": options["block_table"], "seqused_k": lengths}
        sides["fa3"] = lambda i: fa3.attend(q[i], *caches[i], causal=True, **paged)
    if baseline is not None and not options and case.seqlen_q == 1:
        sides["fa2"] = lambda i: baseline.forward(q[i], *dense[i], num_splits=0)[0]
    sides = {name: step for name, step in sides.items() if _is_wanted(name, only)}
    results = {name: step(0).float() for name, step in sides.items()}
    expected = results["ours"]
    differences = {name: float((one - expected).abs().max()) for name, one in results.items()}
    expect_close(differences, 0.05 * float(expected.abs().max()))
    if _is_wanted("read", only):
        sides["read"] = lambda i: read(kv[i])
    timer = functools.partial(within, budget_ms=budget_ms, most=repeats)
    times = time_graphs(sides, sets, calls, timer)
    return {
        "name": case.name,
        **asdict(case),
        "group": case.group,
        "plan": asdict(plan),
        "ms": times,
        "ours_over": ratios_to(times),
    }


def summarise(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns means of our time over others', by side and group."""
    ratios = (
        (side, result["group"], result["name"], ratio)
        for result in results
        for side, ratio in result["ours_over"].items()
    )
    return {"means": means(ratios)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 1 if a case failed."""
    parser = timing_parser(__doc__, repeats=20, budget_ms=300, seconds=600)
    add_baseline(parser)
    peer_libraries.add_arguments(parser, with_fa4=False)
    parser.add_argument("--sides", nargs="+", default=[], help="to time beside ours; default: all")
    options = parser.parse_args(arguments)
    peer_libraries.find(options, parser)
    record = begin_record(options, peers=peer_libraries.versions(), means={})
    baseline = open_baseline(options.baseline, record)
    with_fa3 = record["peers"]["fa3"] is not None
    status = run_cases(
        options,
        record,
        CASES,
        built=lambda case: is_built(case.head_dim, "bf16"),
        measure=lambda case: measure(
            case, baseline, with_fa3, options.repeats, options.budget_ms, options.sides
        ),
        summarise=summarise,
    )
    print("\n".join(lines(record["means"])))
    return status


if __name__ == "__main__":
    sys.exit(main())
