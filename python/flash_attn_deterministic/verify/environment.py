"""The machine of a run, and which parts of the wheel run there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..architectures import Architecture, parse
from ..build_info import BuildInfo, build_info
from ..checks.kernels import DIRECTIONS
from ..checks.tensors import MAX_HEAD_DIM
from ..environment import FAMILY
from ..info import collect
from ..schemas import FAMILIES
from . import tasks
from .contract.call import DTYPES
from .installed import NotInstalledError

# Head dims and dtypes that the sections need.
NEEDED = ((64, "fp16"), (64, "bf16"), (128, "fp16"), (128, "bf16"))

# Variables that set the mode, choose kernels or stand in for another GPU: a report must be of what
# the wheel does without them.
_SETTINGS = ("FA2_", "FLASH_ATTENTION_")


@contextlib.contextmanager
def without_settings() -> Iterator[None]:
    """Within the block, the environment has no variable that the package reads.

    But a wheel of PTX alone, which is made of a release's, has the places of Hopper's kernels and
    nothing in them: it runs the others.
    """
    hopper = any(one.family == FAMILIES[1] for one in build_info().instances)
    needed = {} if hopper else {FAMILY: FAMILIES[0]}
    own = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith(_SETTINGS)}
    os.environ.update(needed)
    try:
        yield
    finally:
        for name in needed:
            del os.environ[name]
        os.environ.update(own)


def architectures(
    names: Iterable[str], capability: str | None, force_ptx: bool = False
) -> dict[str, list[str]]:
    """Returns which GPU code of a wheel ran on a capability such as "9.0" (None: the CPU).

    The driver takes machine code of the GPU's own major version, the highest minor one that is not
    above it; without any, or with CUDA_FORCE_PTX_JIT=1 (`force_ptx`), it compiles the highest PTX
    not above the GPU. It chooses kernel by kernel: code with a letter ("90a") is that of a family
    of kernels of its own, and the other kernels run beside it from code without one.
    """
    parsed: list[Architecture] = []
    for name in names:
        with contextlib.suppress(ValueError):  # a form such as "native" says nothing
            parsed.append(parse(name))
    ran: list[str] = []
    ptx: list[str] = []
    if capability is not None:
        major, minor = map(int, capability.split("."))
        gpu = (major, minor)
        for exact in (False, True):
            family = [one for one in parsed if one.exact == exact]
            ours = [one for one in family if one.real_runs_on(gpu) and not force_ptx]
            below = [one for one in family if one.virtual_runs_on(gpu)]
            if ours:
                ran.append(f"sm_{max(ours, key=lambda one: one.capability).name}")
            elif below:
                ptx.append(f"compute_{max(below, key=lambda one: one.capability).name}")
    real = dict.fromkeys(f"sm_{one.name}" for one in parsed if one.real)
    return {"ran": ran, "ran_as_ptx": ptx, "unverified": [n for n in real if n not in ran]}


def missing_kernels(info: BuildInfo) -> list[dict[str, Any]]:
    """Lists the kernels that the package could run and the wheel does not hold.

    Returns:
        `direction`, `dtype` and `head_dim`, the largest that the kernel would take.
    """
    held = {(one.direction, one.dtype, one.head_dim) for one in info.instances}
    return [
        {"direction": direction, "dtype": dtype, "head_dim": head_dim}
        for direction in DIRECTIONS
        for dtype in DTYPES
        for head_dim in info.tiles
        if (direction, dtype, head_dim) not in held
        and (direction == "fwd" or head_dim <= MAX_HEAD_DIM)
    ]


def problems(device: str, record: Mapping[str, Any], deterministic: bool) -> list[str]:
    """Returns why a report on this machine and wheel cannot mean what it should."""
    found = []
    if not deterministic:
        found.append("the wheel was built with FLASH_ATTENTION_DETERMINISTIC=OFF")
    if device == "cuda":
        held = tasks.holds(device)
        missing = [f"{dtype} head_dim {head_dim}" for head_dim, dtype in NEEDED
                   if not held((head_dim, dtype))]  # fmt: skip
        if missing:
            found.append(
                f"the wheel holds no kernel for {', '.join(missing)}; install the release wheel"
            )
        floor, driver = collect.driver_floor(build_info().cuda_toolkit), record.get("driver")
        if floor is not None and driver is not None and int(driver.split(".")[0]) < floor:
            found.append(f"driver {driver} is older than {floor}, which the wheel's toolkit needs")
    return found


def check_device(device: str) -> None:
    """Looks for a GPU that the wheel's kernels run on.

    Raises:
        NotInstalledError: there is none, and the device is "cuda".
    """
    if device == "cpu":
        return
    found = collect.collect()
    if found.devices:
        problem = found.devices[0].reason
    else:
        why = found.kernels_missing or f"torch {found.torch_version} finds no CUDA device"
        problem = f"{why}; use a machine with an NVIDIA GPU, or --device cpu"
    if problem:
        raise NotInstalledError(f"--device cuda: {problem}")
