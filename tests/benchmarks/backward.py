"""Times the backward against upstream's own kernels, in both modes, and torch's flash backend.

All sides run in one process, in turns, on the same inputs. Writes JSON after every case, so that an
interrupted run leaves what it had.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from flash_attn_deterministic import flash_attn_func, flash_attn_varlen_func

from tests.benchmarks.baseline import Baseline, Packed
from tests.benchmarks.cases import DENSE, FEATURES, PACKED, Case, means, timed
from tests.benchmarks.common import (
    environment,
    fail,
    open_baseline,
    peak_memory,
    print_means,
    run_cases,
)
from tests.gpu.attention import DTYPES, is_built, make_qkv, same_bits

Gradients = tuple[torch.Tensor, ...]
Backward = Callable[[], Gradients]

OPS = torch.ops.flash_attn_deterministic


def dense_sides(case: Case, baseline: Baseline | None) -> dict[str, Backward]:
    """Returns the backward of each side, forwards done, for sequences of one length."""
    shape = (case.batch, case.seqlen, case.nheads, case.head_dim)
    q, k, v = make_qkv(shape, nheads_k=case.nheads_k, dtype=DTYPES[case.dtype])
    dout = make_qkv(shape, seqlen_k=1, dtype=DTYPES[case.dtype], seed=1)[0]
    scores = case.scores()
    given = {**FEATURES[case.feature], "alibi_slopes": scores.alibi_slopes}
    out, lse, _ = flash_attn_func(q, k, v, causal=case.causal, return_attn_probs=True, **given)
    numbers = (scores.dropout_p, case.head_dim**-0.5, *case.window, scores.softcap)

    def ours(deterministic: bool) -> Gradients:
        # The mask of dropout is another than the forward's, which takes as long.
        result: Gradients = OPS.bwd(
            dout, q, k, v, out, lse, scores.alibi_slopes, scores.rng_state, *numbers, deterministic
        )
        return result

    sides: dict[str, Backward] = {"ours": lambda: ours(True), "ours_atomics": lambda: ours(False)}
    if baseline is not None and all(
        baseline.holds(case.head_dim, q.dtype, case.causal, scores, backward=backward)
        for backward in (False, True)
    ):
        # Its causal ALiBi counts from another key than ours: the same out, another softmax_lse.
        saved = baseline.forward(q, k, v, causal=case.causal, scores=scores)

        def fa2(deterministic: bool) -> Gradients:
            return baseline.backward(
                dout, q, k, v, *saved, causal=case.causal, deterministic=deterministic,
                scores=scores,
            )  # fmt: skip

        sides["fa2"] = lambda: fa2(False)
        sides["fa2_deterministic"] = lambda: fa2(True)
    if case.feature:
        return sides
    try:
        sides["sdpa"] = sdpa_side(case, q, k, v, dout)
    except RuntimeError as error:  # a torch whose flash backend takes no groups of heads
        fail(error)
    return sides


def sdpa_side(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> Backward:
    """Returns the backward of torch's flash backend."""
    # Views: the same memory, in the order of dimensions that torch takes.
    q_t, k_t, v_t = (t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            q_t, k_t, v_t, is_causal=case.causal, enable_gqa=case.nheads != case.nheads_k
        )
    gradient = dout.transpose(1, 2)

    def sdpa() -> Gradients:
        found = torch.autograd.grad(out, (q_t, k_t, v_t), gradient, retain_graph=True)
        return tuple(one.transpose(1, 2) for one in found)

    return sdpa


def packed_sides(case: Case, baseline: Baseline | None) -> dict[str, Backward]:
    """Returns the backward of each side, forwards done, for packed sequences."""
    packed = Packed.of(case.lengths)
    shape = (1, sum(case.lengths), case.nheads, case.head_dim)
    q, k, v = (t[0] for t in make_qkv(shape, nheads_k=case.nheads_k, dtype=DTYPES[case.dtype]))
    dout = make_qkv(shape, seqlen_k=1, dtype=DTYPES[case.dtype], seed=1)[0][0]
    where = (packed.cu_seqlens_q, packed.cu_seqlens_k)
    lengths = (packed.max_seqlen_q, packed.max_seqlen_k)
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, *where, *lengths, causal=case.causal, return_attn_probs=True
    )
    scores = (0.0, case.head_dim**-0.5, -1, 0 if case.causal else -1, 0.0)

    def ours(deterministic: bool) -> Gradients:
        result: Gradients = OPS.varlen_bwd(
            dout, q, k, v, out, lse, *where, None, None, *lengths, *scores, deterministic
        )
        return result

    sides: dict[str, Backward] = {"ours": lambda: ours(True), "ours_atomics": lambda: ours(False)}
    if baseline is not None:

        def fa2(deterministic: bool) -> Gradients:
            return baseline.varlen_backward(
                dout, q, k, v, out, lse, packed, causal=case.causal, deterministic=deterministic
            )

        sides["fa2"] = lambda: fa2(False)
        sides["fa2_deterministic"] = lambda: fa2(True)
    return sides


def difference(found: Gradients, expected: Gradients) -> float:
    """Returns the largest ratio of the norm of a difference to that of a gradient."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def measure(
    case: Case, baseline: Baseline | None, repeats: int, budget_ms: float
) -> dict[str, Any]:
    """Times one case.

    Args:
        case: The shape.
        baseline: Upstream's own kernels, if there.
        repeats: timed calls of each side, at most.
        budget_ms: milliseconds for all of them.

    Returns:
        Milliseconds and memory per side, and ratios of medians.

    Raises:
        RuntimeError: the sides disagree, or ours does not repeat its bits.
    """
    sides = (packed_sides if case.lengths else dense_sides)(case, baseline)
    first = sides["ours"]()
    results_bytes = sum(gradient.nbytes for gradient in first)
    # With dropout the other sides have other masks.
    compared = ["ours_atomics"] if case.feature == "dropout" else [n for n in sides if n != "ours"]
    differences = {name: difference(first, sides[name]()) for name in compared}
    if not all(d <= 0.02 for d in differences.values()):
        raise RuntimeError(f"the sides disagree: {differences}")
    if not all(map(same_bits, first, sides["ours"]())):
        raise RuntimeError("the same call gave other bits")
    del first
    memory = {name: peak_memory(run) for name, run in sides.items()}
    times = timed(sides, budget_ms, repeats)
    result: dict[str, Any] = {
        "name": case.name,
        **asdict(case),
        "ms": times,
        "tflops": round(case.backward_flops / times["ours"]["median"] / 1e9, 1),
        "peak_bytes_with_results": memory,
        "scratch_bytes": {name: peak - results_bytes for name, peak in memory.items()},
        "relative_difference_to_ours": differences,
    }
    for other in times:
        if other != "ours":
            ratio = times["ours"]["median"] / times[other]["median"]
            result[f"ratio_to_{other}"] = round(ratio, 4)
    return result


def main() -> int:
    """Command line; the exit status is 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--baseline", type=Path, help="libfa2_baseline.so")
    parser.add_argument("--wheel", type=Path, help="the installed wheel's file, for its sha256")
    parser.add_argument("--repeats", type=int, default=20, help="at most")
    parser.add_argument("--budget-ms", type=float, default=600, help="GPU time of a case")
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    options = parser.parse_args()

    record: dict[str, Any] = {
        **environment(options.wheel, sys.argv),
        "repeats": options.repeats,
        "budget_ms": options.budget_ms,
        "baseline": None,
        "geometric_means": {},
        "cases": [],
        "failed": [],
    }
    baseline = open_baseline(options.baseline, record)

    def summarise() -> None:
        record["geometric_means"] = means(record["cases"], ("fa2", "fa2_deterministic", "sdpa"))

    status = run_cases(
        options.out,
        record,
        (*DENSE, *PACKED),
        built=lambda case: is_built(case.head_dim, case.dtype, "bwd"),
        measure=lambda case: measure(case, baseline, options.repeats, options.budget_ms),
        only=options.only,
        summarise=summarise,
    )
    print_means(record["geometric_means"])
    return status


if __name__ == "__main__":
    sys.exit(main())
