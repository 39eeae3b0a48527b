"""The release policy: what a wheel has to show before it is published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Unverified:
    """An architecture whose machine code no GPU at hand could run, and what was run instead."""

    reason: str  # the release notes repeat it
    ptx: str  # such as "compute_80", of a wheel that holds nothing else
    ptx_report: str  # of that run, relative to the source tree


@dataclass(frozen=True)
class Policy:
    """What is demanded of a release."""

    # Whose machine code must have passed, and a pattern of the names of such GPUs.
    required_architectures: Mapping[str, str]
    unverified_architectures: Mapping[str, Unverified]
    # Of a report, and rows of its section "contract".
    required_sections: tuple[str, ...]
    required_checks: tuple[str, ...]
    # Folders and modules of tests/gpu that want two GPUs, an nvcc or a library that is built apart;
    # of every other module a test must have passed.
    other_gpu_tests: tuple[str, ...]
    # Each wheel of a release: machine and local version ("x86_64", "x86_64+cu12"), and its nvcc.
    wheels: Mapping[str, str]
    # Version of nvcc to the hashes (`toolchain.toolkit_sha256`) of the packages in locks/, one for
    # each kind of machine that builds.
    toolkits: Mapping[str, tuple[str, ...]]


_HOPPER = r"NVIDIA (GH200|H100|H200)( [\w.-]+)*"

POLICY = Policy(
    # sm_90a is the code of the kernels that are made for Hopper; the others run as sm_90. That both
    # ran is what the row "family" of the contract asserts.
    required_architectures={"sm_90": _HOPPER, "sm_90a": _HOPPER},
    unverified_architectures={
        "sm_80": Unverified(
            reason="Machine code for compute capability 8.x runs on no GPU this project can test "
            "on. It is compiled from the same sources as sm_90's.",
            ptx="compute_80",
            ptx_report="docs/results/verification-compute_80.json",
        )
    },
    required_sections=("environment", "contract", "accuracy", "forward", "decode", "backward"),
    required_checks=(
        "run-to-run", "batch", "chunk", "decode", "capacity", "paged", "varlen", "latent",
        "heads", "schedule", "family", "split-size", "backward", "dropout",
        "dropout-seeds", "golden",
    ),
    other_gpu_tests=("ranks", "test_benchmark_baseline", "test_wgmma"),
    wheels={"x86_64": "13.0.88"},
    toolkits={
        "13.0.88": (
            "0b432eb0f09073008aa4d790cafe469629a7738626de4a4e14dc4f8587cb9e35",  # x86-64
            "6fb8be77293120b4be116774df9529739520e8a7bed3189c5169fb82d2c9c23a",  # aarch64
        )
    },
)  # fmt: skip
