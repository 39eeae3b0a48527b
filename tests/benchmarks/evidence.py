"""Takes every measurement of a wheel again, on this machine's GPUs, for docs/results.

    python -m tests.benchmarks.evidence run --wheel dist/*.whl --out evidence --baseline LIBRARY
    python -m tests.benchmarks.evidence install evidence

`run` wants the wheel installed. With two GPUs, times are taken on one while tests run on the other,
and then what needs both; with one, everything else comes one after another. A step that fails or
takes too long costs no other, and leaves no process behind. A second `run` of the same wheel into
the folder replaces the steps that it runs, and keeps the others. `install` wants results of the
kernels that the source tree holds, copies them, and fills the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests import conftest as _finds_flash_attn_build  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
RECORD = "gpu-tests.json"
LANES = ("times", "tests", "together")
# Results in a folder that differ in one of these do not belong together.
_SAME = ("sources", "wheel", "hardware", "versions")
# In the environment of a step, and of all that it starts, wherever that goes.
_MARK = "FLASH_ATTN_EVIDENCE_STEP"
_COUNTS = re.compile(r"\b(\d+) (passed|failed|skipped|deselected|errors?)\b")


@dataclass(frozen=True)
class Step:
    """One command.

    Args:
        name: of its log, and of its JSON file or folder of results, if it has one.
        lane: "times" (alone on its GPU), "tests" (equality, not time) or "together" (all GPUs).
        limit: seconds after which it is ended.
        command: Python's arguments. {wheel}, {out} (the folder of all results), {fa3}, {fa4} and
            {baseline} stand for what the command line gives; without it, the word and the option
            before it are left out.
        result: what of {out} belongs into docs/results, if anything.
    """

    name: str
    lane: str
    limit: int
    command: str
    result: str = ""


def _benchmark(
    name: str, limit: int, more: str = "", module: str = "", lane: str = "times"
) -> Step:
    words = (
        f"-m tests.benchmarks.{module or name} --wheel {{wheel}} --out {{out}}/{name}.json {more}"
    )
    return Step(name, lane, limit, words, f"{name}.json")


_OURS = "-m flash_attn_deterministic"
_PYTEST = "-m pytest -q -p no:cacheprovider -p no:benchmark tests/gpu"
_BESIDE = "--baseline {baseline}"
_PEERS = "--fa3 {fa3} --fa4 {fa4} --kind"
STEPS = (
    Step("verification", "times", 200,
         f"{_OURS} verify --wheel {{wheel}} --out {{out}}/verification", "verification"),
    _benchmark("forward", 60, f"{_BESIDE} --budget-ms 120"),
    _benchmark("backward", 90, f"{_BESIDE} --budget-ms 150"),
    _benchmark("varlen", 40, f"{_BESIDE} --budget-ms 200"),
    _benchmark("decode", 40, f"{_BESIDE} --splits 512 2048 --repeats 10"),
    _benchmark("decode_peers", 60, "--fa3 {fa3} --seconds 45"),
    _benchmark("host_time", 40, "--fa3 {fa3}"),
    _benchmark("peers_forward", 120, f"{_PEERS} forward --seconds 90 --budget-ms 40", "peers"),
    _benchmark("peers_backward", 120, f"{_PEERS} backward --seconds 90 --budget-ms 60", "peers"),
    _benchmark("startup", 40, "--repeats 5"),
    Step("bench", "times", 90, f"{_OURS} bench --out {{out}}/bench", "bench"),
    Step("scoreboard", "times", 240, f"{_OURS} verify --attention sdpa-flash,sdpa-cudnn,flex,fa3 "
         "--seconds 15 --out {out}/scoreboard", "scoreboard"),
    Step("tests", "tests", 300, f'{_PYTEST} -n 12 -m "not slow"'),
    Step("slow-tests", "tests", 240, f"{_PYTEST} -m slow"),
    _benchmark("accuracy", 40, lane="tests"),
    Step("sanitizers", "tests", 420, "-m tests.gpu.sanitizers --limit 100 --out {out}/sanitizers"),
    Step("whole-model", "tests", 90, "examples/whole_model.py"),
    Step("conformance", "tests", 200,
         "-m tests.conformance --seconds 150 --seed 1 --json {out}/conformance.json",
         "conformance.json"),
    Step("tests-of-ranks", "together", 400, f"{_PYTEST}/test_ranks.py"),
    Step("ranks", "together", 90, "-m torch.distributed.run --standalone --nproc-per-node 2 "
         "-m tests.benchmarks.ranks --wheel {wheel} --out {out}/ranks.json", "ranks.json"),
)  # fmt: skip


@dataclass
class Outcome:
    """How a step ended.

    Args:
        name: of the step.
        command: as it was run, folders left out.
        status: exit status; None: it was ended, at its limit or by Ctrl-C.
        seconds: that it took.
        counts: of pytest's summary, if it has one.
        last: the last line that it printed.
    """

    name: str
    command: str
    status: int | None
    seconds: float
    counts: dict[str, int]
    last: str


def words_of(command: str, given: Mapping[str, str | None]) -> list[str]:
    """Splits a command and fills in what was given.

    Args:
        command: as Step has it.
        given: by name, without braces; None: not given.
    """
    words: list[str] = []
    for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', command):
        word = quoted or plain
        missing = [name for name, value in given.items() if value is None and f"{{{name}}}" in word]
        if missing:
            words.pop()
            continue
        words.append(word.format(**given) if "{" in word else word)
    return words


def _variables(given: Mapping[str, str | None]) -> dict[str, str]:
    # Where tests look for the wheel, scoreboard and bench for FlashAttention-3.
    found = {"FLASH_ATTN_WHEEL": given["wheel"]}
    if given.get("fa3") is not None:
        found["FA3_LIBRARY"] = f"{given['fa3']}/fa3.so"
    return {name: value for name, value in found.items() if value is not None}


def run_step(
    step: Step,
    given: Mapping[str, str | None],
    gpu: int | None,
    out: Path,
    stop: threading.Event | None = None,
) -> Outcome:
    """Runs a step; its output goes to a log. Nothing of it runs on afterwards.

    Args:
        step: what to run.
        given: see `words_of`.
        gpu: the only one that it may see, counted among those that this process sees; None: all.
        out: folder of the results; what an earlier run of the step left there is removed.
        stop: set to end it.
    """
    words = words_of(step.command, given)
    mark = uuid.uuid4().hex
    environ = {**os.environ, **_variables(given), _MARK: mark}
    if gpu is not None:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[gpu] if seen else str(gpu)
    log = out / "logs" / f"{step.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if step.result:
        _remove(out / step.result)
    begin = time.monotonic()
    status: int | None = None
    with log.open("wb") as file:
        # A session of its own: Ctrl-C reaches this command alone, which then knows what it cut off.
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
            if process.poll() is None:
                process.kill()
                process.wait()
            _end_marked(f"{_MARK}={mark}".encode())
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    last = _without_folders(lines[-1].strip()) if lines else ""
    counts = {kind: int(number) for number, kind in _COUNTS.findall(last)}
    shown = " ".join(Path(word).name if word.startswith("/") else word for word in words)
    return Outcome(step.name, shown, status, round(time.monotonic() - begin, 1), counts, last[:200])


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _without_folders(line: str) -> str:
    return re.sub(r"(?<![\w.<])/(?:[\w.@+-]+/)+", "", line)


def _end_marked(mark: bytes, seconds: float = 10.0) -> None:
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
            with contextlib.suppress(OSError):  # ended meanwhile, or of somebody else
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def run_all(
    steps: Iterable[Step],
    given: Mapping[str, str | None],
    gpus: int,
    out: Path,
    record: Mapping[str, Any],
) -> list[Outcome]:
    """Runs steps, lane beside lane where there is a GPU for each.

    Args:
        steps: in their order.
        given: see `words_of`.
        gpus: of this machine.
        out: folder of the results; the record there is brought up to date after each step.
        record: what the record begins with; steps of an earlier run stay unless they run again.

    Returns:
        How each ended; those for several GPUs are left out where there is one.

    Raises:
        KeyboardInterrupt: after what ran has been ended and recorded.
    """
    steps = list(steps)
    outcomes: list[Outcome] = []
    lock, stop = threading.Lock(), threading.Event()

    def lane(name: str, gpu: int | None) -> None:
        for step in steps:
            if step.lane == name and not stop.is_set():
                outcome = run_step(step, given, gpu, out, stop)
                with lock:
                    outcomes.append(outcome)
                    print(f"{outcome.name}: status {outcome.status}, {outcome.seconds:.0f} s: "
                          f"{outcome.last}", flush=True)  # fmt: skip
                    _write(out / RECORD, _with_steps(record, map(asdict, outcomes)))

    one_gpu: list[list[tuple[str, int | None]]] = [[("times", None)], [("tests", None)]]
    several: list[list[tuple[str, int | None]]] = [
        [("times", 1), ("tests", 0)], [("together", None)]
    ]  # fmt: skip
    # In threads of their own, so that Ctrl-C, which comes to this one, ends the lanes in order.
    with ThreadPoolExecutor() as pool:
        try:
            for side_by_side in several if gpus > 1 else one_gpu:
                for running in [pool.submit(lane, *each) for each in side_by_side]:
                    running.result()
        except BaseException:
            stop.set()
            raise
    return outcomes


def _with_steps(record: Mapping[str, Any], steps: Iterable[dict[str, Any]]) -> dict[str, Any]:
    new = {step["name"]: step for step in steps}
    kept = [step for step in record.get("steps", ()) if step["name"] not in new]
    return {**record, "steps": [*kept, *new.values()]}


def _write(path: Path, record: Mapping[str, Any]) -> None:
    # Found since conftest was imported; the folder that it lies in is not on the path, as the
    # package's sources lie there too.
    from flash_attn_build.files import write_json

    write_json(path, record)


def read_record(out: Path) -> dict[str, Any]:
    """Reads the record that `run` wrote into a folder.

    Raises:
        OSError: there is none.
        ValueError: it is something else.
    """
    path = out / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if (
        not isinstance(record, dict)
        or not isinstance(record.get("sources"), dict)
        or not isinstance(record.get("steps"), list)
        or not all(
            isinstance(one, dict) and {"name", "status"} <= set(one) for one in record["steps"]
        )
    ):
        raise ValueError(f"{path}: not what `run` writes; expected sources and steps")
    return record


def begin(out: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Begins the record of a folder, or goes on with that of an earlier run.

    Args:
        out: the folder.
        record: what is installed here, and on what.

    Returns:
        The record, with the steps of the earlier run.

    Raises:
        ValueError: the folder holds results of something else.
    """
    steps: list[dict[str, Any]] = []
    if (out / RECORD).exists():
        earlier = read_record(out)
        differing = [name for name in _SAME if earlier.get(name) != record.get(name)]
        if differing:
            raise ValueError(
                f"--out: {out} holds results of another run, whose {', '.join(differing)} "
                "differ; name another folder"
            )
        steps = earlier["steps"]
    begun = {**record, "steps": steps}
    _write(out / RECORD, begun)
    return begun


def install(out: Path, results: Path, sources: Mapping[str, str]) -> list[str]:
    """Copies results that are complete.

    Args:
        out: folder that `run` filled.
        results: docs/results.
        sources: digests of the source tree, by part.

    Returns:
        What was copied.

    Raises:
        OSError: the folder has no record.
        ValueError: it is none that `run` filled, no step ended, or results are of other kernels.
    """
    record = read_record(out)
    _hold_to(sources, record, RECORD)
    # None: ended at its limit; below 0: by a signal.
    statuses = {one["name"]: one["status"] for one in record["steps"]}
    ended = {name for name, status in statuses.items() if status is not None and status >= 0}
    if not ended:
        raise ValueError(f"{out}: no step has come to its end")
    copied = [step.result for step in STEPS if step.result and step.name in ended]
    copied = [name for name in copied if (out / name).exists()]
    for name in copied:
        if name.endswith(".json"):
            try:
                _hold_to(sources, json.loads((out / name).read_text(encoding="utf-8")), name)
            except json.JSONDecodeError as error:
                raise ValueError(f"{out / name}: not JSON ({error})") from error
    for name in copied:
        if (out / name).is_dir():
            shutil.copytree(out / name, results / name, dirs_exist_ok=True)
        else:
            shutil.copy(out / name, results / name)
    # Steps of this wheel that were installed before, and are not in this folder, stay.
    with contextlib.suppress(OSError, ValueError):
        before = read_record(results)
        if all(before.get(name) == record.get(name) for name in _SAME):
            record = _with_steps({**record, "steps": before["steps"]}, record["steps"])
    _write(results / RECORD, record)
    return copied


def _hold_to(sources: Mapping[str, str], record: Any, name: str) -> None:
    differing = of_other_kernels(sources, record)
    if differing:
        raise ValueError(f"{name}: the results are of other kernels: {', '.join(differing)} differ")


def of_other_kernels(sources: Mapping[str, str], record: Any) -> list[str]:
    """Returns the parts of the source tree in which a result differs; none if it names none."""
    own = record.get("sources") if isinstance(record, dict) else None
    return [part for part in sources if own.get(part) != sources[part]] if own else []


def left_behind(results: Path, sources: Mapping[str, str]) -> list[str]:
    """Returns the names of results that are of other kernels than the source tree's."""
    return [
        path.name
        for path in sorted(results.glob("*.json"))
        if of_other_kernels(sources, json.loads(path.read_text(encoding="utf-8")))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 1 if a step failed, 2 if nothing could begin or be copied,
    130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run")
    run.add_argument("--wheel", type=Path, required=True, help="the installed wheel's file")
    run.add_argument("--out", type=Path, required=True, help="folder for everything")
    for name in ("fa3", "fa4", "baseline"):
        run.add_argument(f"--{name}", type=Path, help="see tests.benchmarks.peers and forward")
    run.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], metavar="STEP")
    run.add_argument("--lanes", nargs="+", choices=LANES, default=LANES)
    commands.add_parser("install").add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        return _install(options) if options.what == "install" else _run(options)
    except KeyboardInterrupt:
        print("interrupted; what had ended is recorded", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _install(options: argparse.Namespace) -> int:
    from flash_attn_build.compile.sources import digests

    from tests.benchmarks import tables

    sources = digests()
    copied = install(options.folder, RESULTS, sources)
    print(f"copied: {', '.join(copied) or 'the record alone'}")
    for step in read_record(options.folder)["steps"]:
        if step["status"] != 0:
            print(f"status {step['status']}: {step['name']}")
    print(f"still of other kernels: {', '.join(left_behind(RESULTS, sources)) or 'none'}")
    return tables.main([])


def _run(options: argparse.Namespace) -> int:
    import torch

    _want_installed(options.wheel)
    from tests.benchmarks.shared.record import environment  # which wants the package

    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise ValueError("no GPU: torch sees none on this machine")
    steps = [
        step
        for step in STEPS
        if step.lane in options.lanes and step.name in (options.only or (step.name,))
    ]
    apart = [step.name for step in steps if step.lane == "together" and gpus < 2]
    if apart:
        print(f"left out, as they need two GPUs: {', '.join(apart)}", flush=True)
    steps = [step for step in steps if step.name not in apart]
    if not steps:
        raise ValueError("--only, --lanes: no step to run")
    out = options.out.resolve()
    if out == RESULTS or RESULTS in out.parents:
        raise ValueError(f"--out: {out} holds what `install` writes; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    given = {name: getattr(options, name) for name in ("wheel", "fa3", "fa4", "baseline")}
    for name, path in given.items():
        if path is not None and not path.exists():
            raise ValueError(f"--{name}: {path} does not exist")
    paths = {name: path and str(path.resolve()) for name, path in given.items()}
    with _alone(out), _ended_by_signals():
        record = begin(out, {**environment(options.wheel, sys.argv), "gpus": gpus})
        outcomes = run_all(steps, {**paths, "out": str(out)}, gpus, out, record)
    return int(any(outcome.status != 0 for outcome in outcomes))


def _want_installed(wheel: Path) -> None:
    try:
        from flash_attn_deterministic.verify.installed import inspect, read_wheel
    except ImportError as error:
        raise ValueError(f"--wheel: it is not installed here ({error})") from error
    found = inspect(read_wheel(wheel))
    if not found.matches_wheel:
        why = "; ".join(found.problems) or "it runs from a source tree"
        raise ValueError(f"--wheel: the installed package is not {wheel.name}: {why}")


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Holds a folder against a second run."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"--out: another run writes into {out}") from error
        yield


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Makes a terminal that closes, or `timeout`, end the steps as Ctrl-C does."""
    before = {
        one: signal.signal(one, signal.default_int_handler)
        for one in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(one) == signal.SIG_DFL  # nohup stays
    }
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


if __name__ == "__main__":
    sys.exit(main())
