"""Takes every measurement of a wheel again, on this machine's GPUs, for docs/results.

    python -m tests.benchmarks.evidence run --wheel dist/*.whl --out evidence --baseline LIBRARY
    python -m tests.benchmarks.evidence install evidence

On two GPUs and 32 cores all but the studies of deviation takes some 20 minutes.
`run` needs the wheel and the lab installed. With two GPUs, times are taken on one while tests and
the studies of deviation run on the other, and then what needs both. A step that fails or takes too
long is recorded as such, its processes are killed, and the next one runs. `install` refuses results
of other kernels than the source tree holds, copies the rest, and fills the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
RECORD = "gpu-tests.json"
Given = Mapping[str, str | None]
# A variable in the environment of a step, which every process that it starts inherits.
_MARK = "FLASH_ATTN_EVIDENCE_STEP"
_COUNTS = re.compile(r"\b(\d+) (passed|failed|skipped|deselected|errors?)\b")


@dataclass(frozen=True)
class Step:
    """One command."""

    name: str  # of its log
    # "times" (alone on its GPU), "tests", "studies" and "numbers" (side by side on the other:
    # equality, not time) or "together" (all GPUs)
    lane: str
    limit: int  # seconds after which it is killed
    # Python's arguments. {wheel}, {out} (the folder of all results), {fa3}, {fa4}, {flashmla} and
    # {baseline} stand for options of the command line, {sha256} for the wheel's; without one, the
    # word and the option before it are left out.
    command: str
    results: tuple[str, ...] = ()  # what of {out} belongs into docs/results
    needs: str = ""  # a module without which it is left out


_OURS = "-m flash_attn_deterministic"
_PEERS = ("fa3", "fa4", "flashmla", "baseline")  # options of `bench`


def _bench(study: str, limit: int, more: str) -> Step:
    words = f"{_OURS} bench --study {study} --wheel {{wheel}} --out {{out}} "
    words += "--fa3 {fa3} --fa4 {fa4} --flashmla {flashmla} --baseline {baseline} "
    words += f"--seconds {limit - 20} {more}"
    return Step(study, "times", limit, words, (f"{study}.json",))


def _ahead(study: str, limit: int, attention: str, processes: int = 12) -> Step:
    """FlashAttention-4 and FlashInfer compile a kernel at its first call: ahead, and on several
    cores, so that the study's time is for timing."""
    words = f"{_OURS} bench --study {study} --attentions {attention} --fa4 {{fa4}} "
    words += f"--ahead {processes} "
    return Step(f"{study}-ahead", "studies", limit, words + f"--seconds {limit - 50}")


def _deviation(name: str, limit: int, command: str, results: tuple[str, ...] = ()) -> Step:
    words = f"{_OURS} deviation {command} --out {{out}}/study/{name}"
    return Step(f"deviation-{name}", "studies", limit, words, results)


def _training(name: str, limit: int, workload: str, more: str) -> Step:
    """Those that a claim can't do without come first: a run that has too little time ends there."""
    runs = "nudge-1,nudge-2,nudge-3,ours,sdpa-flash,ours-atomics,sdpa-cudnn,repeat,init,data,fp16,"
    words = f"training --workload {workload} --device cuda --jobs 8 --seconds {limit - 30} {more} "
    return _deviation(name, limit, words + f"--runs {runs}fp16-ours,fp16-sdpa-flash")


_PYTEST = "-m pytest -q -p no:cacheprovider -p no:benchmark tests/gpu"
# In the order of what matters: a run with little time leaves out the last of each lane.
STEPS = (
    Step("verification", "times", 300, f"{_OURS} verify --wheel {{wheel}} --out {{out}}",
         ("verification.json",)),
    _bench("decode", 50, "--budget-ms 150"),
    _bench("paths", 70, "--budget-ms 60"),
    _bench("latent", 90, "--budget-ms 40"),
    _bench("peers-forward", 130, "--budget-ms 100"),
    _bench("servers", 120, "--budget-ms 150"),
    _bench("peers-backward", 300, "--budget-ms 100"),
    Step("host", "times", 50, "-m tests.benchmarks.host --wheel {wheel} --out {out}/host.json",
         ("host.json",)),
    Step("scoreboard", "times", 240, f"{_OURS} scoreboard --wheel {{wheel}} --seconds 20 --jobs 12 "
         "--attention sdpa-flash,sdpa-cudnn,flex,fa3,fa3-one-split,fa3-one-split-served,fa4,"
         "flashinfer-fixed-split-served --fa3 {fa3} --fa4 {fa4} --out {out}",
         ("scoreboard.json", "scoreboard.svg")),
    # The driver compiles every kernel at its first call.
    Step("ptx", "numbers", 480, "-m tests.gpu.ptx --wheel {wheel} --out {out}",
         ("verification-compute_80.json",), needs="elftools"),
    Step("policy-gradient", "tests", 75,
         "examples/policy_gradient.py --json {out}/policy-gradient.json",
         ("policy-gradient.json",)),
    Step("whole-model", "tests", 75, "examples/whole_model.py --json {out}/whole-model.json",
         ("whole-model.json",)),
    Step("planted-faults", "tests", 110, "-m tests.gpu.planted --out {out}/planted.json"),
    Step("conformance", "tests", 70,
         "-m tests.conformance --seconds 45 --seed 1 --json {out}/conformance.json",
         ("conformance.json",)),
    Step("sanitizers-memory", "tests", 250, "-m tests.gpu.sanitizers --tools memcheck initcheck "
         "--limit 120 --out {out}/sanitizers-memory"),
    Step("sanitizers-order", "tests", 250, "-m tests.gpu.sanitizers --tools racecheck synccheck "
         "--limit 120 --out {out}/sanitizers-order"),
    # With the options of `nox -s verify`, so that the gate takes the results. One test wants 70 GB:
    # by now what compiles ahead on the same GPU has ended.
    Step("tests", "tests", 480, f"{_PYTEST} tests/unit/interface/test_mistakes.py -n 8 "
         "-o junit_suite_name=sha256:{sha256} --junit-xml {out}/gpu-tests.xml"),
    # It takes times: last in its lane, when nothing else is left on this GPU.
    Step("vllm", "tests", 400, "-m tests.benchmarks.vllm --wheel {wheel} --seconds 390 "
         "--start-seconds 250 --out {out}/vllm.json", ("vllm.json",), needs="vllm"),
    _ahead("peers-forward", 110, "fa4"),
    _ahead("servers", 280, "flashinfer-fixed-split", 3),
    _ahead("peers-backward", 150, "fa4-deterministic"),
    # Fills the caches of those that compile; what it finds is thrown away.
    Step("scoreboard-ahead", "studies", 150, f"{_OURS} scoreboard --jobs 12 "
         "--attention flex,fa4,flashinfer-fixed-split-served "
         "--seconds 60 --fa4 {fa4} --out {out}/ahead"),
    _training("training", 180, "drawings-small", "--seeds 0-15"),
    _training("language", 180, "language-small", "--seeds 0-15 --steps 200"),
    _deviation("sinks", 60, "gradients --model sinks-small --count 128 --device cuda --no-plots "
               "--attention ours,ours+residual,sdpa-flash,sdpa-cudnn,explicit,torch-lines,"
               "torch-lines-shifted"),
    _deviation("model", 70, "training --workload language-100m --base ours --runs base --seeds 0 "
               "--steps 200 --device cuda"),
    _deviation("gradients", 260, "gradients --model language-100m --count 128 --device cuda "
               "--checkpoint {out}/study/model/base.pt --seconds 150 --no-plots --attention "
               "ours,ours-atomics,ours+residual,sdpa-flash,sdpa-cudnn,explicit"),
    # A core for each, and little of the GPU: beside the other studies.
    replace(_deviation("kernels", 200, "kernels"), lane="numbers"),
    replace(_deviation("forward", 420, "forward"), lane="numbers"),
    # Of the studies that are there by then; `report` makes it again, anywhere.
    Step("deviation", "studies", 90, f"{_OURS} deviation report --out {{out}}/study",
         ("study/deviation.json",)),
    Step("ranks", "together", 140, "-m torch.distributed.run --standalone --nproc-per-node 2 "
         "-m tests.benchmarks.ranks --wheel {wheel} --out {out}/ranks.json", ("ranks.json",)),
    # "tests" has ranks that are threads. The others start processes, and mostly wait.
    Step("tests-of-ranks", "together", 200, f'{_PYTEST}/ranks -vv -n 3 -k "not threads"'),
)  # fmt: skip


def words_of(command: str, given: Given) -> list[str]:
    """Splits a command, and fills in the options of the command line; None: not given."""
    words: list[str] = []
    for word in shlex.split(command):
        if any(value is None and f"{{{name}}}" in word for name, value in given.items()):
            words.pop()
        else:
            words.append(word.format(**given) if "{" in word else word)
    return words


def run_step(step: Step, given: Given, gpu: int | None, stop: threading.Event) -> dict[str, Any]:
    """Runs a step; its output goes to a log. None of its processes is left afterwards.

    Args:
        step: what to run.
        given: see `words_of`.
        gpu: the only one that it may see, counted among those that this process sees; None: all.
        stop: once it is set, the step is killed.

    Returns:
        `name`; `command`, folders left out; exit `status`, None where it was killed; `seconds`;
        `counts` of pytest's summary; the `last` line that it printed.
    """
    words, out = words_of(step.command, given), Path(str(given["out"]))
    mark = uuid.uuid4().hex
    environ = {**os.environ, "FLASH_ATTN_WHEEL": str(given["wheel"]), _MARK: mark}
    if gpu is not None:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[gpu] if seen else str(gpu)
    log = out / "logs" / f"{step.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    for name in step.results:  # of an earlier run
        (out / name).unlink(missing_ok=True)
    begin = time.monotonic()
    status: int | None = None
    with log.open("wb") as file:
        # In a session of its own, Ctrl-C does not reach it: this command kills and records it.
        process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            cwd=ROOT, env=environ, start_new_session=True,
        )  # fmt: skip
        try:
            while status is None and time.monotonic() < begin + step.limit and not stop.is_set():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(timeout=0.2)
        finally:
            process.kill()
            process.wait()
            _kill_marked(f"{_MARK}={mark}".encode())
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    last = re.sub(r"(?<![\w.<])/(?:[\w.@+-]+/)+", "", lines[-1].strip()) if lines else ""
    return {
        "name": step.name,
        "command": " ".join(Path(w).name if w.startswith("/") else w for w in words),
        "status": status,
        "seconds": round(time.monotonic() - begin, 1),
        "counts": {kind: int(number) for number, kind in _COUNTS.findall(last)},
        "last": last[:200],
    }


def _kill_marked(mark: bytes) -> None:
    """Kills the processes that a step started, also those in sessions of their own."""
    for _ in range(50):
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        for number in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.1)
    print(f"still there after SIGKILL: processes {found}", file=sys.stderr, flush=True)


def run_all(
    steps: Sequence[Step], given: Given, gpus: int, record: dict[str, Any], seconds: float
) -> None:
    """Runs steps, lane beside lane where there is a GPU for each; the record is written after each.

    No step starts whose limit is later than `seconds`; lanes side by side leave the first step that
    needs all GPUs its time. After Ctrl-C running ones are killed.
    """
    lock, stop = threading.Lock(), threading.Event()
    out = Path(str(given["out"]))
    last = time.monotonic() + seconds
    reserved = next((step.limit for step in steps if step.lane == "together"), 0) * (gpus > 1)

    def lane(name: str, gpu: int | None) -> None:
        end = last if name == "together" else last - reserved
        for step in steps:
            if step.lane != name or stop.is_set():
                continue
            if step.needs and importlib.util.find_spec(step.needs) is None:
                print(f"left out, as {step.needs} is not installed: {step.name}", flush=True)
                continue
            if time.monotonic() + step.limit > end:
                print(f"left out, as it may take {step.limit} s: {step.name}", flush=True)
                continue
            outcome = run_step(step, given, gpu, stop)
            _name_origin(out, step.results, record)
            with lock:
                others = [one for one in record["steps"] if one["name"] != step.name]
                record["steps"] = [*others, outcome]
                _write_json(out / RECORD, record)
                print(f"{step.name}: status {outcome['status']}, {outcome['seconds']:.0f} s: "
                      f"{outcome['last']}", flush=True)  # fmt: skip

    beside: dict[str, int | None] = {"tests": None, "studies": None, "numbers": None}
    one_gpu: list[dict[str, int | None]] = [{"times": None}, beside]
    several: list[dict[str, int | None]] = [
        {"times": 1, **dict.fromkeys(beside, 0)}, {"together": None}
    ]  # fmt: skip
    # Lanes are threads of their own: Ctrl-C interrupts this thread, which then stops them.
    with ThreadPoolExecutor() as pool:
        try:
            for side_by_side in several if gpus > 1 else one_gpu:
                for running in [pool.submit(lane, *each) for each in side_by_side.items()]:
                    running.result()
        except BaseException:
            stop.set()
            raise


def install(out: Path, results: Path, sources: Mapping[str, str]) -> list[str]:
    """Copies results of steps that ended by themselves, and the record; returns what was copied.

    Raises:
        OSError: the folder has no record.
        ValueError: a result names other sources than these, or none; nothing is copied then.
    """
    record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    ended = {one["name"] for one in record["steps"] if one["status"] is not None}
    ended -= {one["name"] for one in record["steps"] if (one["status"] or 0) < 0}  # by a signal
    names = [name for step in STEPS if step.name in ended for name in step.results]
    names = [name for name in names if (out / name).exists()]
    for name in [RECORD, *(name for name in names if name.endswith(".json"))]:
        found = json.loads((out / name).read_text(encoding="utf-8"))
        own = found.get("provenance", found).get("sources") or {}
        differing = [part for part in sources if own.get(part) != sources[part]]
        if differing:
            raise ValueError(f"{name}: of other kernels, or of none: {', '.join(differing)} differ")
    for name in [*names, RECORD]:
        shutil.copy(out / name, results / Path(name).name)
    return names


def _name_origin(out: Path, names: Sequence[str], record: Mapping[str, Any]) -> None:
    """Adds the provenance of the run to results of examples, which know none."""
    origin = {name: value for name, value in record.items() if name != "steps"}
    for path in (out / name for name in names if name.endswith(".json")):
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if "sources" not in found.get("provenance", found):
                _write_json(path, {**origin, **found})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    from flash_attn_deterministic.verify.shared.files import json_text, write_files

    write_files(path.parent, {path.name: json_text(content)})


def _run(options: argparse.Namespace) -> int:
    import torch
    from flash_attn_deterministic.verify.installed import inspect, read_wheel
    from flash_attn_deterministic.verify.shared.provenance import provenance

    found = inspect(read_wheel(options.wheel))
    if not found.matches_wheel:
        raise ValueError(f"--wheel: the installed package is not {options.wheel.name}")
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise ValueError("no GPU: torch sees none on this machine")
    given = {name: getattr(options, name) for name in ("wheel", "out", *_PEERS)}
    paths = {name: path and str(path.resolve()) for name, path in given.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    command = ["python", "-m", "tests.benchmarks.evidence", *sys.argv[1:]]
    record = {**provenance(command, "cuda", options.wheel), "gpus": gpus, "steps": []}
    paths["sha256"] = record["wheel"]["sha256"]
    before = options.out / RECORD
    if before.exists():
        earlier = json.loads(before.read_text(encoding="utf-8"))
        if any(earlier.get(name) != record[name] for name in ("sources", "wheel", "hardware")):
            raise ValueError(f"--out: {options.out} holds results of another wheel or machine")
        record["steps"] = earlier["steps"]
    done = {one["name"] for one in record["steps"] if one["status"] == 0 and options.rest}
    steps = [step for step in STEPS if step.name in (options.only or (step.name,))]
    steps = [step for step in steps if step.name not in done]
    run_all(steps, paths, gpus, record, options.seconds)
    return int(any(one["status"] != 0 for one in record["steps"]))


def _install(options: argparse.Namespace) -> int:
    from tests.benchmarks import tables
    from tests.results import kernels

    copied = install(options.folder, RESULTS, kernels())
    print(f"copied: {', '.join(copied) or 'the record alone'}")
    return tables.main([])


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 1 if a step failed, 2 if nothing could begin or be copied,
    130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run")
    run.add_argument("--wheel", type=Path, required=True, help="the installed wheel's file")
    run.add_argument("--out", type=Path, required=True, help="folder for everything")
    for name in _PEERS:
        run.add_argument(f"--{name}", type=Path, help="as of `bench`")
    run.add_argument("--rest", action="store_true", help="only what --out lacks, or what failed")
    run.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], metavar="STEP")
    words = "no step starts that may end later; a second run with --only takes those left out"
    run.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help=words)
    commands.add_parser("install").add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        with _ended_by_signals():
            return _install(options) if options.what == "install" else _run(options)
    except KeyboardInterrupt:
        print("interrupted; what had ended is recorded", file=sys.stderr)
        return 130
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
