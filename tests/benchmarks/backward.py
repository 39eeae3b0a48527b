"""Times the backward against upstream's own kernels, in both modes, and torch's flash backend.

All sides run in one process, in turns, on the same inputs. Writes JSON after every case, so that an
interrupted run leaves what it had.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from flash_attn_deterministic import flash_attn_func, flash_attn_varlen_func
from flash_attn_deterministic.verify.speed.measure import interleaved, summary

from tests.benchmarks.baseline import Baseline, Packed
from tests.benchmarks.common import (
    environment,
    fail,
    open_baseline,
    peak_memory,
    run_cases,
)
from tests.gpu.attention import DTYPES, is_built, make_qkv, same_bits

Gradients = tuple[torch.Tensor, ...]
Backward = Callable[[], Gradients]

OPS = torch.ops.flash_attn_deterministic


@dataclass(frozen=True)
class Case:
    """A self-attention shape; lengths are those of packed sequences, empty for dense ones."""

    batch: int
    seqlen: int  # packed: the longest
    nheads: int
    nheads_k: int
    head_dim: int
    causal: bool
    dtype: str = "bf16"
    lengths: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Returns e.g. "B8 L4096 H32/8 D128 causal bf16"."""
        length = f"L{min(self.lengths)}..{self.seqlen}" if self.lengths else f"L{self.seqlen}"
        heads = f"H{self.nheads}"
        if self.nheads != self.nheads_k:
            heads += f"/{self.nheads_k}"
        sizes = f"B{self.batch} {length} {heads} D{self.head_dim}"
        return f"{sizes}{' causal' if self.causal else ''} {self.dtype}"

    @property
    def flops(self) -> int:
        """Returns the floating-point operations of the five matrix products on visible keys."""
        pairs = sum(
            length * (length + 1) // 2 if self.causal else length**2
            for length in self.lengths or [self.seqlen] * self.batch
        )
        return 10 * self.nheads * self.head_dim * pairs


def ragged(batch: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Draws the lengths of packed sequences, the same ones each time."""
    numbers = random.Random(0)
    return tuple(numbers.randint(shortest, longest) for _ in range(batch))


# batch, seqlen, nheads, nheads_k, head_dim
SHAPES = (
    (8, 4096, 32, 32, 128),
    (2, 16_384, 16, 16, 128),
    (1, 8192, 8, 8, 128),
    (1, 32_768, 4, 4, 128),
    (8, 4096, 32, 32, 64),
    (8, 4096, 32, 8, 128),
    (4, 2048, 32, 32, 64),
)
RAGGED = ragged(16, 256, 8192)
MASKS = (False, True)
CASES = (
    *(Case(*shape, causal) for shape in SHAPES for causal in MASKS),
    *(Case(16, max(RAGGED), 16, 16, 128, causal, lengths=RAGGED) for causal in MASKS),
)


def dense_sides(case: Case, baseline: Baseline | None) -> dict[str, Backward]:
    """Returns the backward of each side, forwards done, for sequences of one length."""
    shape = (case.batch, case.seqlen, case.nheads, case.head_dim)
    q, k, v = make_qkv(shape, nheads_k=case.nheads_k, dtype=DTYPES[case.dtype])
    dout = make_qkv(shape, seqlen_k=1, dtype=DTYPES[case.dtype], seed=1)[0]
    out, lse, _ = flash_attn_func(q, k, v, causal=case.causal, return_attn_probs=True)
    scores = (0.0, case.head_dim**-0.5, -1, 0 if case.causal else -1, 0.0)

    def ours(deterministic: bool) -> Gradients:
        result: Gradients = OPS.bwd(dout, q, k, v, out, lse, None, None, *scores, deterministic)
        return result

    sides: dict[str, Backward] = {"ours": lambda: ours(True), "ours_atomics": lambda: ours(False)}
    if baseline is not None:

        def fa2(deterministic: bool) -> Gradients:
            return baseline.backward(
                dout, q, k, v, out, lse, causal=case.causal, deterministic=deterministic
            )

        sides["fa2"] = lambda: fa2(False)
        sides["fa2_deterministic"] = lambda: fa2(True)
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


def measure(case: Case, baseline: Baseline | None, repeats: int) -> dict[str, Any]:
    """Times one case.

    Args:
        case: The shape.
        baseline: Upstream's own kernels, if there.
        repeats: timed calls of each side.

    Returns:
        Milliseconds and memory per side, and ratios of medians.

    Raises:
        RuntimeError: the sides disagree, or ours does not repeat its bits.
    """
    sides = (packed_sides if case.lengths else dense_sides)(case, baseline)
    first = sides["ours"]()
    results_bytes = sum(gradient.nbytes for gradient in first)
    differences = {n: difference(first, run()) for n, run in sides.items() if n != "ours"}
    if not all(d <= 0.02 for d in differences.values()):
        raise RuntimeError(f"the sides disagree: {differences}")
    if not all(map(same_bits, first, sides["ours"]())):
        raise RuntimeError("the same call gave other bits")
    del first
    memory = {name: peak_memory(run) for name, run in sides.items()}
    times = {n: summary(ms) for n, ms in interleaved(sides, repeats=repeats).items()}
    result: dict[str, Any] = {
        "name": case.name,
        **asdict(case),
        "ms": times,
        "tflops": round(case.flops / times["ours"]["median"] / 1e9, 1),
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
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    options = parser.parse_args()

    record: dict[str, Any] = {
        **environment(options.wheel, sys.argv),
        "repeats": options.repeats,
        "baseline": None,
        "cases": [],
        "failed": [],
    }
    baseline = open_baseline(options.baseline, record)
    return run_cases(
        options.out,
        record,
        CASES,
        built=lambda case: is_built(case.head_dim, case.dtype, "bwd"),
        measure=lambda case: measure(case, baseline, options.repeats),
        only=options.only,
    )


if __name__ == "__main__":
    sys.exit(main())
