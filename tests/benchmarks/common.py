"""What the benchmark scripts share: facts about the machine, timing, results on disk."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_FLUSH_BYTES = 256 * 2**20  # several times the largest L2 cache


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
    from flash_attn_deterministic._build_info import build_info

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


def summary(values: Sequence[float]) -> dict[str, float]:
    """Returns median, 10th and 90th percentile of at least two values."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {
        "median": round(statistics.median(values), 5),
        "p10": round(deciles[0], 5),
        "p90": round(deciles[-1], 5),
    }


def time_interleaved(
    contenders: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 3
) -> dict[str, list[float]]:
    """Times calls in turns, so that a drifting clock meets all of them alike.

    The L2 cache is overwritten before each call; that also gives the GPU work to do while the host
    prepares the launch.

    Args:
        contenders: a call per name, on the current stream.
        repeats: timed rounds; each round runs every contender once, in rotated order.
        warmup: rounds before them.

    Returns:
        Milliseconds of each timed call, per name.
    """
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    names = list(contenders)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in names}
    for turn in range(warmup + repeats):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            begin, end = _event(), _event()
            flush.fill_(turn)
            begin.record()
            contenders[name]()
            end.record()
            if turn >= warmup:
                events[name].append((begin, end))
        torch.cuda.synchronize()
    return {name: [b.elapsed_time(e) for b, e in pairs] for name, pairs in events.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]


def peak_memory(call: Callable[[], object]) -> int:
    """Returns the most bytes that a call had allocated at once, its results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def fail(error: Exception) -> str:
    """Prints and returns one line about an exception, for a result that could not be had."""
    line = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    print(line, file=sys.stderr, flush=True)
    return line
