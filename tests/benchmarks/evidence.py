"""Takes every measurement of a wheel again, on this machine's GPUs, for docs/results.

    python -m tests.benchmarks.evidence run --wheel dist/*.whl --out evidence --baseline LIBRARY
    python -m tests.benchmarks.evidence install evidence

`run` needs the wheel installed. With two GPUs, times are taken on one while tests run on the other,
and then what needs both; with one, everything else runs one after another. A step that fails or
takes too long is recorded as such, its processes are killed, and the next one runs. A second `run`
of the same wheel into the folder replaces the steps that it runs, and keeps the others. `install`
refuses results of other kernels than the source tree holds, copies the rest, and fills the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import conftest as _finds_flash_attn_build  # noqa: F401
from tests.benchmarks.shared.results import (
    RESULTS,
    begin,
    install,
    left_behind,
    read_record,
    write_outcomes,
)
from tests.benchmarks.shared.steps import LANES, Step, run_all


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
    _benchmark("residual", 40, "--repeats 15 --budget-ms 120 --seconds 30"),
    _benchmark("startup", 40, "--repeats 5"),
    Step("bench", "times", 90, f"{_OURS} bench --out {{out}}/bench", "bench"),
    Step("scoreboard", "times", 270, f"{_OURS} verify --attention sdpa-flash,sdpa-cudnn,flex,fa3 "
         "--seconds 30 --out {out}/scoreboard", "scoreboard"),
    Step("tests", "tests", 300, f'{_PYTEST} -n 12 -m "not slow"'),
    Step("slow-tests", "tests", 240, f"{_PYTEST} -m slow"),
    _benchmark("accuracy", 40, lane="tests"),
    Step("sanitizers", "tests", 420, "-m tests.gpu.sanitizers --limit 100 --out {out}/sanitizers"),
    Step("whole-model", "tests", 90, "examples/whole_model.py"),
    Step("conformance", "tests", 200,
         "-m tests.conformance --seconds 150 --seed 1 --json {out}/conformance.json",
         "conformance.json"),
    Step("tests-of-ranks", "together", 400, f"{_PYTEST}/ranks"),
    Step("ranks", "together", 90, "-m torch.distributed.run --standalone --nproc-per-node 2 "
         "-m tests.benchmarks.ranks --wheel {wheel} --out {out}/ranks.json", "ranks.json"),
)  # fmt: skip


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
    words = "no step starts that may end later; a second run with --only takes those left out"
    run.add_argument("--seconds", type=float, default=math.inf, metavar="S", help=words)
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
    copied = install(options.folder, RESULTS, sources, STEPS)
    print(f"copied: {', '.join(copied) or 'the record alone'}")
    for step in read_record(options.folder)["steps"]:
        if step["status"] != 0:
            print(f"status {step['status']}: {step['name']}")
    print(f"still of other kernels: {', '.join(left_behind(RESULTS, sources)) or 'none'}")
    return tables.main([])


def _run(options: argparse.Namespace) -> int:
    import torch

    _want_installed(options.wheel)
    from tests.benchmarks.shared.record import environment  # needs the package

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
        begun = begin(out, {**environment(options.wheel, sys.argv), "gpus": gpus})
        write = functools.partial(write_outcomes, out, begun)
        given_paths = {**paths, "out": str(out)}
        outcomes = run_all(steps, given_paths, gpus, out, write, options.seconds)
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
