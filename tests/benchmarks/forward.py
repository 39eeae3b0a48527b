"""Times the forward against upstream's own kernels and torch's flash backend.

All sides run in one process, in turns, on the same inputs. Writes JSON after every case, so that an
interrupted run leaves what it had.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from flash_attn_deterministic import flash_attn_func, get_deterministic_mode
from flash_attn_deterministic.verify.speed.measure import interleaved, summary

from tests.benchmarks.baseline import Baseline
from tests.benchmarks.common import (
    environment,
    open_baseline,
    peak_memory,
    run_cases,
)
from tests.gpu.attention import DTYPES, is_built, make_qkv

Contender = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A self-attention shape."""

    batch: int
    seqlen: int
    nheads: int
    head_dim: int
    causal: bool
    dtype: str

    @property
    def name(self) -> str:
        """Returns e.g. "B8 L4096 H32 D64 causal bf16"."""
        sizes = f"B{self.batch} L{self.seqlen} H{self.nheads} D{self.head_dim}"
        return f"{sizes}{' causal' if self.causal else ''} {self.dtype}"

    @property
    def flops(self) -> int:
        """Returns the floating-point operations of both matrix products on visible keys."""
        pairs = self.seqlen * (self.seqlen + 1) // 2 if self.causal else self.seqlen**2
        return 4 * self.batch * self.nheads * self.head_dim * pairs


SHAPES = (
    (8, 4096, 32, 64, False),
    (8, 4096, 32, 64, True),
    (8, 4096, 32, 128, False),
    (8, 4096, 32, 128, True),
    (4, 2048, 32, 64, False),
    (4, 2048, 32, 64, True),
    (16, 8192, 32, 64, False),
    (16, 8192, 32, 64, True),
    (2, 16_384, 16, 128, True),
)
CASES = tuple(Case(*shape, dtype) for dtype in DTYPES for shape in SHAPES)


def measure(
    case: Case, baseline: Baseline | None, repeats: int, splits: Sequence[int] = ()
) -> dict[str, Any]:
    """Times one case.

    Args:
        case: The shape.
        baseline: Upstream's own kernels, if there.
        repeats: timed calls of each side.
        splits: split sizes to time besides the mode's.

    Returns:
        Milliseconds and memory per side, and ratios of medians; those of `splits` apart.
    """
    shape = (case.batch, case.seqlen, case.nheads, case.head_dim)
    q, k, v = make_qkv(shape, dtype=DTYPES[case.dtype])
    # Views: the same memory, in the order of dimensions that torch takes.
    q_t, k_t, v_t = (t.transpose(1, 2) for t in (q, k, v))

    def ours(split_size: int | None = None) -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=case.causal, split_size=split_size)

    def sdpa() -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                q_t, k_t, v_t, is_causal=case.causal
            )
        return out.transpose(1, 2)

    sides: dict[str, Contender] = {"ours": ours, "sdpa": sdpa}
    if baseline is not None:
        sides["fa2"] = lambda: baseline.forward(q, k, v, causal=case.causal)[0]
    for size in splits:
        sides[f"ours_{size}"] = lambda size=size: ours(size)  # type: ignore[misc]
    expected = sdpa().float()
    differences = {
        name: float((run().float() - expected).abs().max()) for name, run in sides.items()
    }
    if max(differences.values()) > 0.1 or any(d != d for d in differences.values()):
        raise RuntimeError(f"the sides disagree: {differences}")
    del expected
    memory = {name: peak_memory(run) for name, run in sides.items()}
    times = {n: summary(ms) for n, ms in interleaved(sides, repeats=repeats).items()}
    named = [name for name in sides if not name.startswith("ours_")]
    result: dict[str, Any] = {
        "name": case.name,
        **asdict(case),
        "ms": {name: times[name] for name in named},
        "tflops": round(case.flops / times["ours"]["median"] / 1e9, 1),
        "peak_bytes_with_results": {name: memory[name] for name in named},
        "largest_difference_to_sdpa": differences,
        "splits": {},
    }
    others = [name for name in named if name != "ours"]
    for other in others:
        ratio = times["ours"]["median"] / times[other]["median"]
        result[f"ratio_to_{other}"] = round(ratio, 4)
    for size in splits:
        own = times[f"ours_{size}"]
        result["splits"][str(size)] = {
            "ms": own,
            "peak_bytes_with_results": memory[f"ours_{size}"],
            **{f"ratio_to_{o}": round(own["median"] / times[o]["median"], 4) for o in others},
        }
    return result


def main() -> int:
    """Command line; the exit status is 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--baseline", type=Path, help="libfa2_baseline.so")
    parser.add_argument("--wheel", type=Path, help="the installed wheel's file, for its sha256")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument(
        "--splits", type=int, nargs="*", default=[1024, 4096, 0], help="besides the mode's"
    )
    options = parser.parse_args()

    record: dict[str, Any] = {
        **environment(options.wheel, sys.argv),
        "repeats": options.repeats,
        "split_size": get_deterministic_mode().split_size,
        "baseline": None,
        "cases": [],
        "failed": [],
    }
    baseline = open_baseline(options.baseline, record)
    return run_cases(
        options.out,
        record,
        CASES,
        built=lambda case: is_built(case.head_dim, case.dtype),
        measure=lambda case: measure(case, baseline, options.repeats, options.splits),
        only=options.only,
    )


if __name__ == "__main__":
    sys.exit(main())
