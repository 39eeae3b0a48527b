"""Runs tests/gpu/sanitizers/calls.py under the tools of compute-sanitizer, one after another.

A tool runs on every head dim at once, each in a process of its own with a log of its own. It has
passed if every process made all of its calls within the tool's limit and found nothing but what
`expected` lists. Prints a line for each tool, and writes them to sanitizers.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flash_attn_deterministic.verify.shared.commands import sigterm_interrupts

from tests.gpu.sanitizers.calls import HEAD_DIMS
from tests.gpu.sanitizers.expected import EXCLUDED, Findings, findings

CALLS = Path(__file__).with_name("calls.py")
# Seconds that a tool may take on all head dims.
LIMITS = {"memcheck": 90, "initcheck": 90, "racecheck": 300, "synccheck": 90}
# These look at allocations, which torch's caching would hide.
_EACH_ALLOCATION = ("memcheck", "initcheck")
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_PRINTED = 10_000  # reports of a process: one that is not shown can't be judged


@dataclass
class Result:
    """What one tool found.

    Args:
        tool: of compute-sanitizer.
        passed: whether every head dim came to its end, and nothing else than expected was found.
        seconds: that all took, side by side.
        limit: seconds that they were given.
        excluded: kernels that the tool was told to leave alone, and why.
        found: errors or hazards by head dim; None: it did not come to its end.
        expected: how often each listed finding was made, by its reason.
        unexpected: the first line of each other finding.
    """

    tool: str
    passed: bool
    seconds: float
    limit: float
    excluded: dict[str, str] = field(default_factory=dict)
    found: dict[int, int | None] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Returns the result in one line."""
        unfinished = [dim for dim, count in self.found.items() if count is None]
        errors = {dim: count for dim, count in self.found.items() if count}
        words = [f"{'passed' if self.passed else 'FAILED'}: head dims"]
        words.append(", ".join(map(str, self.found)))
        if errors:
            words.append("; found " + ", ".join(f"{n} at {dim}" for dim, n in errors.items()))
        if self.unexpected:
            words.append(f"; {len(self.unexpected)} not expected: {self.unexpected[0]}")
        if unfinished:
            words.append(f"; not finished: {', '.join(map(str, unfinished))}")
        text = " ".join(words).replace(" ;", ";")
        return f"{self.tool:<10} {text}; {self.seconds:.0f} s of {self.limit:.0f} s"


def found_in(log: str, head_dim: int) -> int | None:
    """Reads how many errors a tool reports; None if it or the calls did not come to their end."""
    counts = [int(error or hazard) for error, hazard in _SUMMARY.findall(log)]
    return counts[-1] if counts and f"head dim {head_dim}: all calls made" in log else None


def run_tool(
    tool: str, head_dims: Sequence[int], out: Path, sanitizer: str, limit: float
) -> Result:
    """Runs one tool on every head dim at once.

    Args:
        tool: of compute-sanitizer.
        head_dims: one process each.
        out: folder of the logs.
        sanitizer: the program.
        limit: seconds after which what still runs is ended.
    """
    environment = dict(os.environ)
    if tool in _EACH_ALLOCATION:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    own = [one for one in EXCLUDED if one.tool == tool and set(one.head_dims) & set(head_dims)]
    excluded = {one.what: one.reason for one in own}
    begin = time.monotonic()
    processes: dict[int, subprocess.Popen[bytes]] = {}
    statuses: dict[int, int] = {}
    for head_dim in head_dims:
        names = [one.what for one in own if head_dim in one.head_dims]
        exclude = [word for name in names for word in ("--kernel-name-exclude", f"kns={name}")]
        with _log(out, tool, head_dim).open("wb") as log:
            processes[head_dim] = subprocess.Popen(
                [sanitizer, "--tool", tool, "--print-limit", str(_PRINTED), *exclude,
                 sys.executable, str(CALLS), str(head_dim)],
                stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            )  # fmt: skip
    try:
        for head_dim, process in processes.items():
            left = max(0.1, begin + limit - time.monotonic())
            with contextlib.suppress(subprocess.TimeoutExpired):
                statuses[head_dim] = process.wait(timeout=left)
    finally:
        for process in processes.values():
            _kill(process)
    found: dict[int, int | None] = {}
    seen = Findings()
    for head_dim in head_dims:
        text = _log(out, tool, head_dim).read_text(encoding="utf-8", errors="replace")
        found[head_dim] = found_in(text, head_dim) if head_dim in statuses else None
        read = findings(tool, head_dim, text)
        seen.add(read)
        if (found[head_dim] or 0) > read.count:
            missing = (found[head_dim] or 0) - read.count
            seen.unexpected.append(f"{missing} reports at head dim {head_dim} could not be read")
    finished = all(found[dim] is not None and statuses.get(dim) == 0 for dim in head_dims)
    passed = finished and not seen.unexpected
    seconds = round(time.monotonic() - begin, 1)
    return Result(tool, passed, seconds, limit, excluded, found, seen.expected, seen.unexpected)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a sanitizer and the program under it, which would stay on the GPU without it."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _log(out: Path, tool: str, head_dim: int) -> Path:
    return out / f"{tool}-d{head_dim}.log"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 1 if a tool found something or did not finish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("sanitizers"), help="folder of the logs")
    parser.add_argument("--tools", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--limit", type=float, help="seconds for each tool")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
    options = parser.parse_args(arguments)
    sanitizer = shutil.which(options.sanitizer)
    if sanitizer is None:
        parser.error(f"--sanitizer: {options.sanitizer} is not a program that can be run")
    options.out.mkdir(parents=True, exist_ok=True)
    # `timeout` ends this program alone: what it started is in sessions of its own.
    with sigterm_interrupts():
        return _run(options, sanitizer)


def _run(options: argparse.Namespace, sanitizer: str) -> int:
    results = []
    for tool in options.tools:
        limit = LIMITS[tool] if options.limit is None else options.limit
        results.append(run_tool(tool, options.head_dims, options.out, sanitizer, limit))
        print(results[-1].line(), flush=True)
        text = json.dumps([asdict(result) for result in results], indent=1)
        (options.out / "sanitizers.json").write_text(text + "\n", encoding="utf-8")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
