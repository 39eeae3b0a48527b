"""Takes every measurement of a wheel again, on this machine's GPUs, for docs/results.

    python -m tests.benchmarks.evidence run --wheel dist/*.whl --out evidence --baseline LIBRARY
    python -m tests.benchmarks.evidence install evidence

`run` wants the wheel installed. With two GPUs, times are taken on one while tests run on the other,
and then what needs both; with one, everything comes one after another. A step that fails or takes
too long costs no other. `install` wants results of the kernels that the source tree holds, copies
them, and fills the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests import conftest as _finds_flash_attn_build  # noqa: F401
from tests.benchmarks.common import environment, write_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
RECORD = "gpu-tests.json"
LANES = ("times", "tests", "together")
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
    Step("sanitizers", "tests", 300, "-m tests.gpu.sanitizers --limit 100 --out {out}/sanitizers"),
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
        status: exit status; None: it was ended at its limit.
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


def run_step(step: Step, given: Mapping[str, str | None], gpu: int | None, out: Path) -> Outcome:
    """Runs a step; its output goes to a log.

    Args:
        step: what to run.
        given: see `words_of`.
        gpu: the only one that it may see; None: all.
        out: folder of the results.
    """
    words = words_of(step.command, given)
    environ = dict(os.environ)
    if gpu is not None:
        environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    log = out / "logs" / f"{step.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    status: int | None
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, *words], stdout=file, stderr=file, env=environ)
        try:
            status = process.wait(timeout=step.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""
    counts = {kind: int(number) for number, kind in _COUNTS.findall(last)}
    shown = " ".join(Path(word).name if word.startswith("/") else word for word in words)
    return Outcome(step.name, shown, status, round(time.monotonic() - begin, 1), counts, last[:200])


def run_all(
    steps: Iterable[Step], given: Mapping[str, str | None], gpus: int, out: Path
) -> list[Outcome]:
    """Runs steps, lane beside lane where there is a GPU for each.

    Args:
        steps: in their order.
        given: see `words_of`.
        gpus: of this machine.
        out: folder of the results; the record there is brought up to date after each step.

    Returns:
        How each ended; those for several GPUs are left out where there is one.
    """
    steps = list(steps)
    outcomes: list[Outcome] = []
    lock = threading.Lock()

    def lane(name: str, gpu: int | None) -> None:
        for step in steps:
            if step.lane == name:
                outcome = run_step(step, given, gpu, out)
                with lock:
                    outcomes.append(outcome)
                    print(f"{outcome.name}: status {outcome.status}, {outcome.seconds:.0f} s: "
                          f"{outcome.last}", flush=True)  # fmt: skip
                    _write(out, outcomes)

    if gpus < 2:
        lane("times", None)
        lane("tests", None)
        return outcomes
    beside = threading.Thread(target=lane, args=("tests", 0))
    beside.start()
    lane("times", 1)
    beside.join()
    lane("together", None)
    return outcomes


def _write(out: Path, outcomes: Sequence[Outcome]) -> None:
    path = out / RECORD
    record = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**record, "steps": [asdict(outcome) for outcome in outcomes]})


def install(out: Path, results: Path, sources: Mapping[str, str]) -> list[str]:
    """Copies results that are complete.

    Args:
        out: folder that `run` filled.
        results: docs/results.
        sources: digests of the source tree, by part.

    Returns:
        What was copied.

    Raises:
        ValueError: the results are of other kernels.
    """
    record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    differing = [part for part in sources if record["sources"].get(part) != sources[part]]
    if differing:
        raise ValueError(f"the results are of other kernels: {', '.join(differing)} differ")
    ended = {one["name"] for one in record["steps"] if one["status"] is not None}
    copied = [step.result for step in STEPS if step.result and step.name in ended]
    copied = [name for name in copied if (out / name).exists()]
    for name in [*copied, RECORD]:
        if (out / name).is_dir():
            shutil.copytree(out / name, results / name, dirs_exist_ok=True)
        else:
            shutil.copy(out / name, results / name)
    return copied


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 1 if a step failed, or results are of other kernels."""
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
    if options.what == "install":
        # Found since conftest was imported; the folder that they lie in is not on the path, as the
        # package's sources lie there too.
        from flash_attn_build.compile.sources import digests

        from tests.benchmarks import tables

        try:
            copied = install(options.folder, RESULTS, digests())
        except (OSError, ValueError) as error:
            parser.error(str(error))
        print(f"copied: {', '.join(copied)}")
        return tables.main([])

    import torch

    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    given = {name: getattr(options, name) for name in ("wheel", "fa3", "fa4", "baseline")}
    paths = {name: path and str(path.resolve()) for name, path in given.items()}
    # Steps of the scoreboard and of bench look for FlashAttention-3 there.
    if options.fa3 is not None:
        os.environ["FA3_LIBRARY"] = str(options.fa3.resolve() / "fa3.so")
    os.environ["FLASH_ATTN_WHEEL"] = str(paths["wheel"])
    write_json(out / RECORD, environment(options.wheel, sys.argv))
    steps = [
        step
        for step in STEPS
        if step.lane in options.lanes and step.name in (options.only or (step.name,))
    ]
    outcomes = run_all(steps, {**paths, "out": str(out)}, torch.cuda.device_count(), out)
    return int(any(outcome.status != 0 for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
