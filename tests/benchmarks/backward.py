"""Times the backward against upstream's own kernels, in both modes, and torch's flash backend.

All sides run in one process, in turns, on the same inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from flash_attn_deterministic import flash_attn_func, flash_attn_varlen_func
from flash_attn_deterministic.verify.speed.upstream import Baseline, Packed

from tests.benchmarks.shared.cases import (
    DENSE,
    FEATURES,
    PACKED,
    Case,
    means_to,
    timed,
    timed_result,
)
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
            return baseline.backward(
                dout, q, k, v, out, lse, causal=case.causal, deterministic=deterministic,
                packed=packed,
            )  # fmt: skip

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
    expect_close(differences, 0.02)
    if not all(map(same_bits, first, sides["ours"]())):
        raise RuntimeError("the same call gave other bits")
    del first
    memory = {name: peak_memory(run) for name, run in sides.items()}
    times = timed(sides, budget_ms, repeats)
    return {
        **timed_result(case, case.backward_flops, times),
        "peak_bytes_with_results": memory,
        "scratch_bytes": {name: peak - results_bytes for name, peak in memory.items()},
        "relative_difference_to_ours": differences,
        **{f"ratio_to_{other}": ratio for other, ratio in ratios_to(times).items()},
    }


def main() -> int:
    """Command line; the exit status is 1 if a case failed."""
    parser = timing_parser(__doc__, repeats=20, budget_ms=600)
    add_baseline(parser)
    options = parser.parse_args()
    record = begin_record(options, geometric_means={})
    baseline = open_baseline(options.baseline, record)
    status = run_cases(
        options,
        record,
        (*DENSE, *PACKED),
        built=lambda case: is_built(case.head_dim, case.dtype, "bwd"),
        measure=lambda case: measure(case, baseline, options.repeats, options.budget_ms),
        summarise=lambda results: means_to(results, "fa2", "fa2_deterministic", "sdpa"),
    )
    print("\n".join(lines(record["geometric_means"])))
    return status


if __name__ == "__main__":
    sys.exit(main())
