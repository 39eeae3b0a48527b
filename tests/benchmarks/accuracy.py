"""Errors against float64, ours and torch's flash backend's, for every head dim, dtype and mask."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from tests.benchmarks.shared.record import environment, write_json
from tests.benchmarks.shared.run import fail, file_parser
from tests.gpu.attention import (
    ACCURACY_CASES,
    DTYPES,
    HEAD_DIMS,
    Errors,
    Measured,
    is_built,
    measure_accuracy,
)


def worst(measured: list[Measured], key: Callable[[Errors], float], floor: float) -> float:
    """Returns the largest ratio of our error to torch's, errors below floor taken as floor."""
    ratios = (max(key(m.ours), floor) / max(key(m.torch), floor) for m in measured)
    return round(max(ratios), 3)


def measure(head_dim: int, dtype: str, causal: bool) -> dict[str, Any]:
    """Measures all cases of one head dim, dtype and mask."""
    cases = {case.name: measure_accuracy(case, head_dim, dtype, causal) for case in ACCURACY_CASES}
    broken = [name for name, one in cases.items() if not (one.ours.finite and one.torch.finite)]
    if broken:
        raise ValueError(f"not finite: {', '.join(broken)}")
    floor = torch.finfo(DTYPES[dtype]).eps / 64
    measured = list(cases.values())
    return {
        "head_dim": head_dim,
        "dtype": dtype,
        "causal": causal,
        "worst_ratio": {
            "largest": worst(measured, lambda e: e.largest, floor),
            "rmse": worst(measured, lambda e: e.rmse, floor),
            "lse": worst(measured, lambda e: e.lse, 1e-5),
        },
        "cases": {name: asdict(one) for name, one in cases.items()},
    }


def main() -> int:
    """Command line; the exit status is 1 if a measurement failed."""
    options = file_parser(__doc__).parse_args()
    record: dict[str, Any] = {**environment(options.wheel, sys.argv), "rows": [], "failed": []}
    for head_dim, dtype, causal in itertools.product(HEAD_DIMS, DTYPES, (False, True)):
        name = f"D{head_dim} {dtype}{' causal' if causal else ''}"
        if not is_built(head_dim, dtype):
            record["failed"].append({"name": name, "error": "not in this wheel"})
            continue
        try:
            row = measure(head_dim, dtype, causal)
        except Exception as error:
            record["failed"].append({"name": name, "error": fail(error)})
        else:
            record["rows"].append(row)
            print(f"{name:20} {row['worst_ratio']}", flush=True)
        write_json(options.out, record)
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
