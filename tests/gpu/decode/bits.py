"""Runs drawn calls of a few queries through every path that can take them, and compares bits.

    python -m tests.gpu.decode.bits --count 10000

The exit status is 1 where anything differs. Two wheels, or two GPUs, are compared by the row
"golden" of the contract.
"""

from __future__ import annotations

import argparse
import itertools
import sys

from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.gpu.attention import is_built, same_bits
from tests.gpu.drawn_calls import DrawnCall, draw_call

HEAD_DIMS = (32, 40, 64, 80, 96, 128, 160, 192, 256)
_PATHS = ("few_rows", "scores_first", "parts", "one_cta")


def unequal_paths(call: DrawnCall, paths: tuple[str, ...] = _PATHS) -> list[str]:
    """Returns the paths whose bits differ from those of the path that the plan takes.

    Paths that both families have run in both.
    """
    expected = call()
    different = []
    for path, family in itertools.product(paths, ("sm80", "sm90")):
        with device_override(f"path={path},family={family}"):
            plan = call.plan
            ran = (plan.family, plan.path) == (family, path.replace("_", "-"))
            result = call()
        if ran and not all(map(same_bits, result, expected)):
            different.append(f"{path} of {family}")
    return different


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--paths", nargs="+", default=_PATHS, choices=_PATHS)
    options = parser.parse_args()
    built = tuple(
        d for d in HEAD_DIMS if all(is_built(d, dtype, "fwd") for dtype in ("bf16", "fp16"))
    )
    if not built:
        parser.error("this wheel holds no head dim with both dtypes")
    paths: dict[str, int] = {}
    failed = 0
    for seed in range(options.first, options.first + options.count):
        call = draw_call(seed, built, few=True)
        path = call.plan.path
        paths[path] = paths.get(path, 0) + 1
        different = unequal_paths(call, tuple(options.paths))
        if different:
            failed += 1
            print(different, call.words, flush=True)
    print(f"{options.count} calls, {failed} unequal; paths of the plans: {paths}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
