"""What this wheel holds, and whether this machine can run it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..build_info import BuildInfo, Upstream, build_info, installed_version
from ..checks import kernels
from ..checks.tensors import MAX_HEAD_DIM
from ..errors import FlashAttnError
from ..mode import Mode, get_deterministic_mode
from ..ops import library

# Lowest Linux driver that runs machine code of any toolkit of a CUDA major version. Source: NVIDIA,
# CUDA compatibility, "Minor Version Compatibility", table 1.
_DRIVER_FLOORS = {11: 450, 12: 525, 13: 580}


@dataclass(frozen=True)
class Device:
    """A CUDA device of this machine; `reason` is why it can't run the wheel, or empty."""

    index: int
    name: str
    capability: str
    runs: bool
    reason: str


@dataclass(frozen=True)
class Info:
    """The wheel, the torch it is installed with, and this machine.

    Args:
        version: of this package; empty: it is not installed, as in a source tree.
        upstream: the pinned release that the kernels come from, and the patches on it.
        deterministic: False for a build with schedule-dependent results.
        bits_version: wheels of equal numbers give equal bits on one compute capability.
        cuda_toolkit: version of the compiler that built the kernels.
        driver_floor: lowest Linux driver (its major version) for the toolkit; None: not known.
        architectures: GPU code in the wheel, as CMAKE_CUDA_ARCHITECTURES.
        instances: kernels in the wheel: direction (and family, unless it is "sm80": "fwd sm90"),
            then dtype, to head dims.
        torch_floor: lowest torch that the wheel runs with.
        torch_version: the torch found.
        torch_cuda: CUDA version of the torch found; None: built without CUDA.
        mode: of calls; None: the environment variables are wrong.
        mode_problem: what is wrong with them; or empty.
        kernels_missing: why no kernels are loaded; or empty.
        devices: CUDA devices of this machine.
    """

    version: str
    upstream: Upstream
    deterministic: bool
    bits_version: int
    cuda_toolkit: str
    driver_floor: int | None
    architectures: tuple[str, ...]
    instances: dict[str, dict[str, list[int]]]
    torch_floor: str
    torch_version: str
    torch_cuda: str | None
    mode: Mode | None
    mode_problem: str
    kernels_missing: str
    devices: tuple[Device, ...]

    def json(self) -> str:
        """Returns everything as one JSON object."""
        # JSON has named tuples as lists.
        mode = None if self.mode is None else self.mode._asdict()
        upstream = self.upstream._asdict()
        upstream["patches"] = [patch._asdict() for patch in self.upstream.patches]
        devices = [vars(device) for device in self.devices]
        record = {**vars(self), "upstream": upstream, "mode": mode, "devices": devices}
        return json.dumps(record, indent=2)

    def text(self) -> str:
        """Returns everything as lines for a terminal."""
        upstream = self.upstream
        floor = "unknown" if self.driver_floor is None else f">= {self.driver_floor}"
        lines = [
            f"flash-attn-deterministic  {self.version or 'not installed; this is a source tree'}",
            f"upstream       {upstream.name} {upstream.version} (sha256 {upstream.sha256})",
            *(f"patch          {p.name} (sha256 {p.sha256})" for p in upstream.patches),
            f"deterministic  {'yes' if self.deterministic else 'no (schedule-dependent build)'}",
            f"bits version   {self.bits_version}",
            f"CUDA toolkit   {self.cuda_toolkit}; Linux driver {floor}",
            f"architectures  {', '.join(self.architectures)}",
            *(
                f"kernels        {direction} {dtype}, {head_dims_of(dims)}"
                for direction, dtypes in self.instances.items()
                for dtype, dims in dtypes.items()
            ),
            f"torch          {self.torch_version} "
            f"({f'CUDA {self.torch_cuda}' if self.torch_cuda else 'without CUDA'}); "
            f"needs >= {self.torch_floor}",
        ]
        lines.append(f"mode           {_shown_mode(self.mode, self.mode_problem)}")
        if any(name.endswith("virtual") for name in self.architectures):
            lines.append(
                "note           virtual architectures are PTX, which newer GPUs compile at load; "
                "that needs a driver at least as new as the toolkit"
            )
        hopper = [d for d in self.devices if d.capability == "9.0"]
        if hopper and not any(name.startswith("90a") for name in self.architectures):
            lines.append(
                "note           this wheel holds no 90a-real: a Hopper GPU runs the kernels for "
                "every GPU, whose forward takes 1.5 to 2 times as long"
            )
        if self.kernels_missing:
            lines.append(f"CUDA kernels   not loaded: {self.kernels_missing}")
        lines += [
            f"device         cuda:{d.index} {d.name}, compute capability {d.capability}: "
            f"{'can run' if d.runs else f'cannot run: {d.reason}'}"
            for d in self.devices
        ]
        if not self.devices:
            lines.append("device         no CUDA device; CPU tensors run the reference")
        return "\n".join(lines)


def _shown_mode(mode: Mode | None, problem: str) -> str:
    if mode is None:
        return f"{problem}; calls raise this"
    if not mode.enabled:
        return "not enabled: results depend on the schedule"
    split = f"splits of {mode.split_size} tokens" if mode.split_size else "one split"
    return f"enabled, {split}"


def driver_floor(cuda_toolkit: str) -> int | None:
    """Returns the lowest Linux driver (major version) for a toolkit such as "13.0.88", or None.

    It is the floor for machine code. PTX needs a driver at least as new as the toolkit itself.
    """
    major = cuda_toolkit.partition(".")[0]
    return _DRIVER_FLOORS.get(int(major)) if major.isdecimal() else None


def collect() -> Info:
    """Inspects the installed wheel and this machine.

    Raises:
        BuildInfoError: the wheel's own record is missing (a source tree) or unreadable.
    """
    built = build_info()
    mode, mode_problem = _mode()
    return Info(
        version=installed_version(),
        upstream=built.upstream,
        deterministic=built.deterministic,
        bits_version=built.bits_version,
        cuda_toolkit=built.cuda_toolkit,
        driver_floor=driver_floor(built.cuda_toolkit),
        architectures=built.architectures,
        instances=_instances(built),
        torch_floor=built.torch_target,
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        mode=mode,
        mode_problem=mode_problem,
        kernels_missing=library.kernels_missing,
        devices=_devices(),
    )


def _mode() -> tuple[Mode | None, str]:
    try:
        return get_deterministic_mode(), ""
    except FlashAttnError as error:
        return None, str(error)


def head_dims_of(kernels: Sequence[int]) -> str:
    """Says which head dims kernels take, given the largest of each; beyond 256 only that one."""
    up_to = ", ".join(str(dim) for dim in kernels if dim <= MAX_HEAD_DIM)
    words = [f"up to: {up_to}"] if up_to else []
    words += [f"{dim} alone" for dim in kernels if dim > MAX_HEAD_DIM]
    return f"head_dim {'; '.join(words)}"


def _instances(built: BuildInfo) -> dict[str, dict[str, list[int]]]:
    table: dict[str, dict[str, list[int]]] = {}
    for instance in built.instances:
        other = "" if instance.family == "sm80" else f" {instance.family}"
        dtypes = table.setdefault(f"{instance.direction}{other}", {})
        dtypes.setdefault(instance.dtype, []).append(instance.head_dim)
    return table


def _devices() -> tuple[Device, ...]:
    if not torch.cuda.is_available():
        return ()
    devices = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        reason = library.kernels_missing or kernels.device_problem(index)
        name = torch.cuda.get_device_name(index)
        devices.append(Device(index, name, f"{major}.{minor}", not reason, reason))
    return tuple(devices)
