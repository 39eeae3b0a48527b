"""Writes golden hashes: those of the installed wheel on this GPU.

They are taken only with evidence from elsewhere: both families of kernels have the same bits, and
every result is as close to float64 as roundings explain.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ....build_info import build_info
from ....errors import FlashAttnError
from ...tasks import holds
from .. import families
from ..call import Attention
from ..check import Mismatch, expect_numbers, expect_same
from ..sizes import size_of
from . import compute_capability, golden_cases, record
from .calls import CALLS


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status is 1 if the hashes must not be written over."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_deterministic.verify.contract.golden", description=__doc__
    )
    words = "the file to add them to (default: that of the installed package)"
    parser.add_argument("--out", type=Path, default=record.PATH, help=words)
    words = "write over other hashes of the same bits_version"
    parser.add_argument("--force", action="store_true", help=words)
    options = parser.parse_args(arguments)
    try:
        golden, words = _added(options.out, options.force)
        record.write(golden, options.out)
    except (FlashAttnError, Mismatch) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {words}")
    return 0


def _added(out: Path, force: bool) -> tuple[record.Golden, str]:
    if not torch.cuda.is_available():
        raise record.GoldenError("no CUDA device: golden hashes are those of kernels on a GPU")
    attention, size = Attention.installed(), size_of("cuda", quick=False, held=holds("cuda"))
    two_families = not families.unavailable(size)
    evidence = record.Evidence({"agreeing": 0, "differing": []} if two_families else None)
    inputs: dict[str, str] = {}
    hashes: dict[str, str] = {}
    for case in golden_cases(size):
        call = CALLS[case["call"]]
        drawn, inputs[case.name] = call.inputs((case.head_dim, case.dtype), attention, "cuda")
        parts, results = call.run(drawn)
        expect_numbers(drawn, case.name, results)
        expect_same(drawn, f"{case.name}, once more", call.run(drawn)[1], results)
        hashes[case.name] = record.hashes_of(results)
        evidence.add(case.name, call, drawn, parts, hashes[case.name])
    info, capability = build_info(), compute_capability("cuda")
    origin = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": str(torch.__version__),
        "cuda_toolkit": info.cuda_toolkit,
        "sources": dict(info.sources),
    }
    entry = record.Entry(origin, asdict(evidence), hashes)
    words = f"{len(hashes)} cases of bits_version {info.bits_version} on {capability}; {evidence}"
    return record.read(info.bits_version, out).added(inputs, capability, entry, force), words


if __name__ == "__main__":
    sys.exit(main())
