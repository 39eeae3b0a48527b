"""The machine that a run is made on, and what of the wheel runs there."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from typing import Any

# Head dims and dtypes without which the sections can't run as they are meant to.
NEEDED = ((64, "fp16"), (64, "bf16"), (128, "fp16"), (128, "bf16"))
_NAME = re.compile(r"(\d+)(\d)([a-z]?)(?:-(real|virtual))?")


def collect(device: str) -> dict[str, Any]:
    """Describes the machine, in the worker.

    Args:
        device: "cpu" or "cuda"; of which the first counts.
    """
    import torch

    record: dict[str, Any] = {
        "gpu": None,
        "compute_capability": None,
        "sms": None,
        "memory_gib": None,
        "driver": None,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "glibc": " ".join(platform.libc_ver()).strip() or None,
        "cpus": os.cpu_count(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        record |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "sms": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "driver": _driver(),
        }
    return record


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.split()
    return lines[0] if lines else None


def architectures(
    names: Iterable[str], capability: str | None, force_ptx: bool = False
) -> dict[str, list[str]]:
    """Tells which GPU code of a wheel a run has exercised.

    The driver takes machine code of the GPU's own major version, the highest minor one that is not
    above it; without any it compiles the highest PTX not above the GPU.

    Args:
        names: of the wheel, as CMAKE_CUDA_ARCHITECTURES.
        capability: of the GPU, such as "9.0"; None: the CPU ran.
        force_ptx: whether the driver was told (CUDA_FORCE_PTX_JIT=1) to pass over machine code.

    Returns:
        `ran`: machine code that ran, such as "sm_90"; `ran_as_ptx`: PTX that the driver compiled;
        `unverified`: machine code that did not run.
    """
    real: dict[str, tuple[int, int]] = {}
    virtual: dict[str, tuple[int, int]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        number = (int(match[1]), int(match[2]))
        if match[4] != "virtual":
            real[f"sm_{match[1]}{match[2]}{match[3]}"] = number
        if match[4] != "real":
            virtual[f"compute_{match[1]}{match[2]}{match[3]}"] = number
    ran: list[str] = []
    ptx: list[str] = []
    if capability is not None:
        major, minor = map(int, capability.split("."))
        ours = {n: v for n, v in real.items() if v[0] == major and v[1] <= minor and not force_ptx}
        below = {n: v for n, v in virtual.items() if v <= (major, minor)}
        if ours:
            ran = [max(ours, key=lambda n: ours[n])]
        elif below:
            ptx = [max(below, key=lambda n: below[n])]
    return {"ran": ran, "ran_as_ptx": ptx, "unverified": [n for n in real if n not in ran]}


def problems(device: str, record: dict[str, Any], deterministic: bool) -> list[str]:
    """Says what of the machine or the wheel keeps a run from saying what it should.

    Args:
        device: "cpu" or "cuda".
        record: from `collect`.
        deterministic: whether the wheel holds deterministic kernels.
    """
    from .._build_info import build_info
    from ..info import driver_floor
    from .tasks import holds

    found = []
    if not deterministic:
        found.append("the wheel was built with FLASH_ATTENTION_DETERMINISTIC=OFF")
    if device == "cuda":
        held = holds(device)
        missing = [f"{dtype} head_dim {head_dim}" for head_dim, dtype in NEEDED
                   if not held((head_dim, dtype))]  # fmt: skip
        if missing:
            found.append(
                f"the wheel holds no kernel for {', '.join(missing)}; install the release wheel"
            )
        floor, driver = driver_floor(build_info().cuda_toolkit), record.get("driver")
        if floor is not None and driver is not None and int(driver.split(".")[0]) < floor:
            found.append(f"driver {driver} is older than {floor}, which the wheel's toolkit needs")
    return found
