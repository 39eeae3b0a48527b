"""What the benchmark scripts share: facts about the machine, timing, results on disk."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from tests.benchmarks.baseline import Baseline, BaselineError


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Case = TypeVar("_Case", bound=_Named)


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a JSON file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def geometric_mean(values: Sequence[float]) -> float:
    """Returns the geometric mean of at least one positive number."""
    return math.exp(sum(map(math.log, values)) / len(values))


def sha256(path: Path) -> str:
    """Returns the sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def environment(wheel: Path | None, arguments: Sequence[str]) -> dict[str, Any]:
    """Describes what a result was measured on and with.

    Args:
        wheel: the installed wheel's file; None leaves its name and hash out.
        arguments: the script's command line.
    """
    import flash_attn_deterministic
    from flash_attn_deterministic.info.build_info import build_info

    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "command": _command(arguments),
        "versions": {
            "flash_attn_deterministic": flash_attn_deterministic.__version__,
            "torch": torch.__version__,
            "cuda_of_torch": torch.version.cuda,
            "cuda_of_wheel": build_info().cuda_toolkit,
            "upstream": build_info().upstream.version,
            "python": platform.python_version(),
            "driver": _driver(),
        },
        # What the kernels that ran were compiled from: digests by part of the source tree.
        "bits_version": build_info().bits_version,
        "sources": dict(build_info().sources),
        "wheel": None if wheel is None else {"name": wheel.name, "sha256": sha256(wheel)},
    }
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        record["hardware"] = {
            "gpu": device.name,
            "compute_capability": f"{device.major}.{device.minor}",
            "sms": device.multi_processor_count,
            "memory_gib": round(device.total_memory / 2**30, 1),
        }
    return record


def _command(arguments: Sequence[str]) -> str:
    # Folders of the machine that measured say nothing to a reader.
    words = [Path(word).name if "/" in word else word for word in arguments[1:]]
    return f"python -m tests.benchmarks.{Path(arguments[0]).stem} {shlex.join(words)}".strip()


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.stdout.strip() else None


def peak_memory(call: Callable[[], object]) -> int:
    """Returns the most bytes that a call held at once, its results included.

    Those that it asked for: the allocator may hand out blocks that are larger.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
    del result
    return peak


def fail(error: Exception) -> str:
    """Prints and returns one line about an exception, for a result that could not be had."""
    line = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    print(line, file=sys.stderr, flush=True)
    return line


def open_baseline(path: Path | None, record: dict[str, Any]) -> Baseline | None:
    """Opens upstream's own kernels, and says in a record which they are or why there are none.

    Args:
        path: libfa2_baseline.so; None: none asked for.
        record: gets the library's hash, or a failure.
    """
    if path is None:
        return None
    try:
        baseline = Baseline(path)
        record["baseline"] = {"sha256": sha256(path)}
    except (OSError, BaselineError) as error:
        record["failed"].append({"name": "baseline", "error": fail(error)})
        return None
    return baseline


def run_cases(
    out: Path,
    record: dict[str, Any],
    cases: Iterable[_Case],
    *,
    built: Callable[[_Case], bool],
    measure: Callable[[_Case], dict[str, Any]],
    only: str = "",
    summarise: Callable[[], None] = lambda: None,
    seconds: float = math.inf,
) -> int:
    """Measures cases one after another, and writes JSON after each: a cut leaves what there was.

    Args:
        out: the file to write.
        record: gets each result, or its failure; the names of those that time did not allow, or a
            GPU that a case before broke, go to "left_out".
        cases: shapes, each with a name.
        built: whether the installed wheel holds what a case needs.
        measure: returns the result of a case, with times by side under "ms".
        only: part of the names of the cases to run.
        summarise: called after each result, to bring the record up to date.
        seconds: no further case starts after them.

    Returns:
        Exit status: 1 if anything failed.
    """
    end, broken = time.monotonic() + seconds, ""
    record["left_out"] = []
    for case in cases:
        if only not in case.name:
            continue
        if time.monotonic() > end or broken:
            record["left_out"].append(case.name)
            continue
        if not built(case):
            record["failed"].append({"name": case.name, "error": "not in this wheel"})
            continue
        try:
            result = measure(case)
        except Exception as error:
            traceback.print_exc()
            record["failed"].append({"name": case.name, "error": fail(error)})
            broken = _broken_device()
        else:
            record["cases"].append(result)
            summarise()
            medians = {name: ms["median"] for name, ms in result["ms"].items()}
            print(f"{case.name:36} {medians}", flush=True)
        write_json(out, record)
        if not broken:
            torch.cuda.empty_cache()
    if record["left_out"]:
        reason = broken or f"after {seconds:.0f} seconds"
        print(f"left out, {reason}: {len(record['left_out'])} cases", flush=True)
        write_json(out, record)
    return 1 if record["failed"] else 0


def _broken_device() -> str:
    """Returns why the GPU takes no more work from this process, as after an illegal access."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def print_means(means: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Prints the means that a record ends with, a line for each side and group."""
    for other, groups in means.items():
        for group, one in groups.items():
            words = f"mean {one['mean']:.3f}, worst {one['worst']:.3f} of {one['cases']}"
            print(f"to {other:18} {group:8} {words}")
