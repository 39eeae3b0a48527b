"""Kernels run on the CPU, thread by thread: bits, order of memory accesses, and planted faults.

They need g++, and what the build of the small wheel leaves in build/dev: upstream's sources and
the CUDA toolkit that was found.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.emulator import run
from tests.emulator.faults import FAULTS, Fault
from tests.emulator.run import ROOT

BUILD = ROOT / "build" / "dev"


def _cuda() -> Path | None:
    """Returns the folder of the toolkit's include and lib; None: not there."""
    cache = BUILD / "CMakeCache.txt"
    found = re.search(
        r"^CMAKE_CUDA_COMPILER:\w+=(.+)$", cache.read_text() if cache.exists() else "", re.MULTILINE
    )
    if found is None:
        return None
    root = Path(found[1]).resolve().parents[1]
    folders = (root / "targets" / "x86_64-linux", root)
    return next((folder for folder in folders if list(folder.glob("lib/libcudart_static.a"))), None)


CUDA = _cuda()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CUDA is None or not (BUILD / "upstream").is_dir() or shutil.which("g++") is None,
        reason="no g++, or no build/dev with sources and a toolkit; `nox -s build_dev` makes it",
    ),
]
WHERE = ["--upstream", str(BUILD / "upstream"), "--cuda", str(CUDA)]


@pytest.mark.parametrize("head_dim", run.head_dims(ROOT, "forward"))
def test_hopper_forward_equals_few_rows(head_dim: int) -> None:
    """Planted faults are told from this: a fault that changes nothing is not found."""
    assert CUDA is not None
    nothing = Fault("nothing", head_dim, "plan.h", "#pragma once\n", "#pragma once\n")
    assert run.find(nothing, ROOT, BUILD / "upstream", CUDA, 1, 10) == ""


def test_hopper_forward_in_fp16() -> None:
    assert run.main([*WHERE, "--head-dims", "128", "--dtypes", "fp16", "--count", "3"]) == 0


@pytest.mark.parametrize("head_dim", run.head_dims(ROOT, "backward"))
def test_hopper_backward_equals_plain_loops(head_dim: int) -> None:
    assert run.main(["backward", *WHERE, "--head-dims", str(head_dim), "--count", "4"]) == 0


@pytest.mark.parametrize("head_dim", run.head_dims(ROOT, "forward"))
def test_plans_of_drawn_calls_are_right(head_dim: int) -> None:
    assert run.main(["plans", *WHERE, "--head-dims", str(head_dim), "--count", "300"]) == 0


def test_plans_fail_if_none_is_checked() -> None:
    assert run.main(["plans", *WHERE, "--head-dims", "64", "--count", "0"]) == 1


def test_paths_for_few_queries_are_equal() -> None:
    assert run.main(["few", *WHERE, "--head-dims", "64", "--count", "16"]) == 0


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.what.replace(" ", "-") for fault in FAULTS])
def test_planted_fault_is_found(fault: Fault) -> None:
    assert CUDA is not None
    assert run.find(fault, ROOT, BUILD / "upstream", CUDA, 1, 40)
