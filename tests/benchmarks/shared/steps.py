"""Runs commands one after another, in lanes side by side, and ends all that they started."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LANES = ("times", "tests", "together")
Given = Mapping[str, str | None]
# A variable in the environment of a step, which every process that it starts inherits.
_MARK = "FLASH_ATTN_EVIDENCE_STEP"
_COUNTS = re.compile(r"\b(\d+) (passed|failed|skipped|deselected|errors?)\b")


@dataclass(frozen=True)
class Step:
    """One command."""

    name: str  # of its log, and of its JSON file or folder of results, if it has one
    lane: str  # "times" (alone on its GPU), "tests" (equality, not time) or "together" (all GPUs)
    limit: int  # seconds after which it is killed
    # Python's arguments. {wheel}, {out} (the folder of all results), {fa3}, {fa4} and {baseline}
    # stand for options of the command line; without one, the word and the option before it are left
    # out.
    command: str
    result: str = ""  # what of {out} belongs into docs/results, if anything


@dataclass
class Outcome:
    """How a step ended."""

    name: str  # of the step
    command: str  # as it was run, folders left out
    status: int | None  # exit status; None: it was killed, at its limit or after Ctrl-C
    seconds: float  # that it took
    counts: dict[str, int]  # of pytest's summary, if it has one
    last: str  # the last line that it printed


def words_of(command: str, given: Given) -> list[str]:
    """Splits a command, and fills in the options of the command line; None: not given."""
    words: list[str] = []
    for word in shlex.split(command):
        if any(value is None and f"{{{name}}}" in word for name, value in given.items()):
            words.pop()
        else:
            words.append(word.format(**given) if "{" in word else word)
    return words


def run_step(
    step: Step, given: Given, gpu: int | None, out: Path, stop: threading.Event | None = None
) -> Outcome:
    """Runs a step; its output goes to a log. None of its processes is left afterwards.

    Args:
        step: what to run.
        given: see `words_of`.
        gpu: the only one that it may see, counted among those that this process sees; None: all.
        out: folder of the results; the result of an earlier run of the step is removed.
        stop: once it is set, the step is killed.
    """
    words = words_of(step.command, given)
    environ = _environment(given, gpu)
    log = out / "logs" / f"{step.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if step.result:
        shutil.rmtree(out / step.result, ignore_errors=True)
        with contextlib.suppress(IsADirectoryError):
            (out / step.result).unlink(missing_ok=True)
    begin = time.monotonic()
    status: int | None = None
    with log.open("wb") as file:
        # In a session of its own, Ctrl-C does not reach it: this command kills and records it.
        process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            cwd=ROOT, env=environ, start_new_session=True,
        )  # fmt: skip
        try:
            while status is None and time.monotonic() < begin + step.limit:
                if stop is not None and stop.is_set():
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(timeout=0.2)
        finally:
            process.kill()
            process.wait()
            _kill_marked(f"{_MARK}={environ[_MARK]}".encode())
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    last = re.sub(r"(?<![\w.<])/(?:[\w.@+-]+/)+", "", lines[-1].strip()) if lines else ""
    counts = {kind: int(number) for number, kind in _COUNTS.findall(last)}
    shown = " ".join(Path(word).name if word.startswith("/") else word for word in words)
    return Outcome(step.name, shown, status, round(time.monotonic() - begin, 1), counts, last[:200])


def _environment(given: Given, gpu: int | None) -> dict[str, str]:
    # Where tests look for the wheel, scoreboard and bench for FlashAttention-3.
    environ = {**os.environ, "FLASH_ATTN_WHEEL": str(given["wheel"]), _MARK: uuid.uuid4().hex}
    if given.get("fa3") is not None:
        environ["FA3_LIBRARY"] = f"{given['fa3']}/fa3.so"
    if gpu is not None:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[gpu] if seen else str(gpu)
    return environ


def _kill_marked(mark: bytes, seconds: float = 10.0) -> None:
    """Kills the processes that a step started, also those in sessions of their own, as torchrun's.

    Args:
        mark: a variable of their environment, with its value.
        seconds: to wait for processes that the driver holds.
    """
    end = time.monotonic() + seconds
    while found := list(_marked(mark)):
        for number in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if time.monotonic() > end:
            print(f"still there after SIGKILL: processes {found}", file=sys.stderr, flush=True)
            return
        time.sleep(0.05)


def _marked(mark: bytes) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def run_all(
    steps: Iterable[Step],
    given: Given,
    gpus: int,
    out: Path,
    on_outcomes: Callable[[Sequence[Outcome]], None],
    seconds: float = math.inf,
) -> list[Outcome]:
    """Runs steps, lane beside lane where there is a GPU for each.

    Args:
        steps: in their order.
        given: see `words_of`.
        gpus: of this machine.
        out: folder of the results.
        on_outcomes: called after each step with all outcomes so far, one call at a time.
        seconds: no step starts whose limit is later than that.

    Returns:
        How each ended; those for several GPUs are left out where there is one.

    Raises:
        KeyboardInterrupt: after running steps were killed and recorded.
    """
    steps = list(steps)
    outcomes: list[Outcome] = []
    lock, stop = threading.Lock(), threading.Event()
    end = time.monotonic() + seconds

    def lane(name: str, gpu: int | None) -> None:
        for step in steps:
            if step.lane == name and time.monotonic() + step.limit > end:
                print(f"left out, as it may take {step.limit} s: {step.name}", flush=True)
            elif step.lane == name and not stop.is_set():
                outcome = run_step(step, given, gpu, out, stop)
                with lock:
                    outcomes.append(outcome)
                    print(f"{outcome.name}: status {outcome.status}, {outcome.seconds:.0f} s: "
                          f"{outcome.last}", flush=True)  # fmt: skip
                    on_outcomes(outcomes)

    one_gpu: list[dict[str, int | None]] = [{"times": None}, {"tests": None}]
    several: list[dict[str, int | None]] = [{"times": 1, "tests": 0}, {"together": None}]
    # Lanes are threads of their own: Ctrl-C interrupts this thread, which then stops them.
    with ThreadPoolExecutor() as pool:
        try:
            for side_by_side in several if gpus > 1 else one_gpu:
                for running in [pool.submit(lane, *each) for each in side_by_side.items()]:
                    running.result()
        except BaseException:
            stop.set()
            raise
    return outcomes
