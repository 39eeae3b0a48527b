"""Writes golden hashes: those of the installed wheel on this GPU, or of the inputs alone.

Hashes of a new bits_version are taken only with evidence from elsewhere: both families of kernels
have the same bits, and every result is as close to float64 as roundings explain.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from ....build_info import build_info
from ....errors import FlashAttnError
from ...tasks import holds
from .. import families
from ..attention import Attention
from ..check import Mismatch, expect_numbers, expect_same
from ..sizes import size_of
from . import compute_capability, draw_case, golden_cases, hashes_of, record
from .evidence import Evidence


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status is 1 if the hashes must not be written over."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_deterministic.verify.contract.golden", description=__doc__
    )
    words = "the file to add them to (default: that of the installed package)"
    parser.add_argument("--out", type=Path, default=record.PATH, help=words)
    words = "hashes of the inputs, on the CPU"
    parser.add_argument("--inputs-only", action="store_true", help=words)
    words = "write over other hashes of the same bits_version"
    parser.add_argument("--force", action="store_true", help=words)
    options = parser.parse_args(arguments)
    try:
        golden, words = _added(options.out, options.inputs_only, options.force)
        record.write(golden, options.out)
    except (FlashAttnError, Mismatch) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {words}")
    return 0


def _added(out: Path, inputs_only: bool, force: bool) -> tuple[record.Golden, str]:
    device = "cpu" if inputs_only else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise record.GoldenError("no CUDA device: golden hashes are those of kernels on a GPU")
    attention = Attention.installed()
    two_families = device == "cuda" and not families.unavailable(size_of("cuda", quick=False))
    evidence = Evidence(two_families)
    inputs: dict[str, str] = {}
    hashes: dict[str, str] = {}
    # The configs of a run on a GPU, in either case.
    size = size_of("cuda", quick=False, held=holds(device))
    for case in golden_cases(size):
        call, drawn, inputs[case.name] = draw_case(case, attention, device)
        if not inputs_only:
            results = call.results(drawn)
            expect_numbers(drawn, case.name, results)
            expect_same(drawn, f"{case.name}, once more", call.results(drawn), results)
            hashes[case.name] = hashes_of(results)
            evidence.add(case.name, call, drawn, results, hashes[case.name])
    known = record.read(out)
    if inputs_only:
        return known.added(inputs, force=force), f"inputs of {len(inputs)} cases"
    info = build_info()
    origin = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": str(torch.__version__),
        "cuda_toolkit": info.cuda_toolkit,
        "sources": dict(info.sources),
    }
    capability = compute_capability(device)
    found = evidence.record()
    entry = record.Entry(info.bits_version, capability, origin, hashes, found)
    words = f"{len(hashes)} cases of bits_version {info.bits_version} on {capability}; {found}"
    return known.added(inputs, entry, force), words


if __name__ == "__main__":
    sys.exit(main())
