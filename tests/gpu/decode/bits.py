"""Runs drawn calls of a few queries through every path that can take them, and compares bits.

    python -m tests.gpu.decode.bits --count 10000 --out new.json
    python -m tests.gpu.decode.bits --count 10000 --out old.json     # with another wheel
    python -m tests.gpu.decode.bits --compare old.json new.json

A file holds a hash of each call's out and softmax_lse: two wheels, or two GPUs, agree where their
files do. The exit status is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
from pathlib import Path

import torch

from tests.gpu.attention import bits, is_built, same_bits
from tests.gpu.drawn_calls import DrawnCall, draw_call

HEAD_DIMS = (32, 40, 64, 80, 96, 128, 160, 192, 256)
_VARIABLE = "FLASH_ATTENTION_TEST_DEVICE"
_PATHS = ("few_rows", "scores_first", "parts", "one_cta")


def _hash(tensors: tuple[torch.Tensor, ...]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(bits(tensor).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def unequal_paths(call: DrawnCall, paths: tuple[str, ...] = _PATHS) -> list[str]:
    """Returns the paths whose bits differ from those of the path that the plan takes.

    Paths that both families have run in both.
    """
    expected = call()
    different = []
    for path, family in itertools.product(paths, ("sm80", "sm90")):
        os.environ[_VARIABLE] = f"path={path},family={family}"
        try:
            plan = call.plan
            ran = (plan.family, plan.path) == (family, path.replace("_", "-"))
            result = call()
        finally:
            del os.environ[_VARIABLE]
        if ran and not all(map(same_bits, result, expected)):
            different.append(f"{path} of {family}")
    return different


def _compare(left: Path, right: Path) -> int:
    one, other = (json.loads(path.read_text(encoding="utf-8")) for path in (left, right))
    common = one.keys() & other.keys()
    different = sorted((seed for seed in common if one[seed] != other[seed]), key=int)
    print(f"{len(different)} of {len(common)} calls differ", *different[:20])
    return 1 if different or not common else 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--paths", nargs="+", default=_PATHS, choices=_PATHS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    options = parser.parse_args()
    if options.compare:
        return _compare(*options.compare)
    built = tuple(
        d for d in HEAD_DIMS if all(is_built(d, dtype, "fwd") for dtype in ("bf16", "fp16"))
    )
    if not built:
        parser.error("this wheel holds no head dim with both dtypes")
    hashes: dict[str, str] = {}
    paths: dict[str, int] = {}
    failed = 0
    for seed in range(options.first, options.first + options.count):
        call = draw_call(seed, built, few=True)
        hashes[str(seed)] = _hash(call())
        path = call.plan.path
        paths[path] = paths.get(path, 0) + 1
        different = unequal_paths(call, tuple(options.paths))
        if different:
            failed += 1
            print(different, call.words, flush=True)
    print(f"{options.count} calls, {failed} unequal; paths of the plans: {paths}")
    if options.out:
        options.out.write_text(json.dumps(hashes), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
