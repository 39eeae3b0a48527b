"""Where a study runs, how far it is, and what torch is asked for."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ...attentions.torchs import deterministic_algorithms


class Progress:
    """Counts to `total`, and says on standard error, every few seconds, how far a study is."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.done = name, total, 0
        self.start = self.shown = time.monotonic()

    def advance(self, label: str) -> None:
        self.done += 1
        now = time.monotonic()
        if now - self.shown < 10 and self.done < self.total:
            return
        self.shown, taken = now, now - self.start
        left = taken / self.done * (self.total - self.done)
        text = f"{self.name} {self.done}/{self.total} {label}, {taken:.0f} s, {left:.0f} s left"
        print(text, file=sys.stderr, flush=True)


def autocast(device: str, precision: str) -> torch.autocast:
    """Returns autocast to "bf16" or "fp16"; with another precision it does nothing."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device, dtype=dtype, enabled=precision in ("bf16", "fp16"))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Gives torch one thread on the CPU: repeats are exact, and small tensors take no longer.

    Also where a model is on a GPU: batches are drawn on the CPU, and beside other processes every
    thread more waits for its core. A batch took 32 ms instead of 1 with two threads on two cores
    that were busy.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def repeatable(device: str = "cpu", fill: bool = False) -> Iterator[list[str]]:
    """Asks torch for algorithms that repeat, so that what differs is what a study changes.

    An example of what it changes: the gradient of an embedding in which few tokens occur often, as
    bytes do, is added up atomically since torch 2.11 (pytorch pull request 172454), unless asked.
    "Warn only" is meant: the attentions under test keep what they do by default (torch's flash
    backward adds atomically then), and an operation that can't repeat is named and not refused.
    cuBLAS reads its workspace from the environment at the first product of the process.

    Args:
        device: cpu or cuda.
        fill: whether memory that is not initialised holds NaN, so that reading it shows.

    Yields:
        A list that holds, once the block is left, torch's warnings: each names an operation.
    """
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught, deterministic_algorithms():
        warnings.simplefilter("default")
        memory.fill_uninitialized_memory = fill
        try:
            yield found
        finally:
            memory.fill_uninitialized_memory = filled
    for warning in caught:
        text = str(warning.message).splitlines()[0]
        if "deterministic" not in text:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        elif text not in found:
            found.append(text)
