"""Where and how long a study ran."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import time
from collections.abc import Iterator
from typing import Any

import torch

from ...errors import ArgumentError

SCHEMA = 2


def check_device(device: str) -> None:
    """Raises ArgumentError where a CUDA device is asked for and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            "device: expected a CUDA device for cuda, got a machine without one; "
            "--device cpu runs what a CPU has"
        )


def environment(device: str = "cpu") -> dict[str, Any]:
    """Returns what a reader wants to know of the machine."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return found


@contextlib.contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Gives a list that holds the seconds taken, once the block is left."""
    taken: list[float] = []
    start = time.monotonic()
    yield taken
    taken.append(time.monotonic() - start)


@contextlib.contextmanager
def one_thread(device: str = "cpu") -> Iterator[None]:
    """Gives torch one thread on a CPU: repeats are exact, and small tensors take no longer."""
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
