"""The command flash-attn-deterministic deviation."""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cli import ended, option

_Parser = argparse.ArgumentParser
_Parsers = Any  # argparse's action has no public name
_MODEL = "language-small"
_STUDIES = ("forward", "kernels", "training", "language", "gradients", "sinks")
_Run = Callable[[argparse.Namespace], object]  # what it returns is false where all went well


def add_command(commands: _Parsers) -> None:
    """Adds `deviation` with its subcommands; imports nothing heavy."""
    parser = commands.add_parser(
        "deviation", help="how far low-precision attention is from exact: studies and report"
    )
    studies = parser.add_subparsers(dest="study", required=True)

    gradients = _add(studies, "gradients", _gradients,
                     "gradients of a model, each attention against exact attention")  # fmt: skip
    _add_model(gradients, "ours,ours-atomics,sdpa-flash,sdpa-cudnn,explicit")
    option(gradients, "--no-plots", False, "results only, no matplotlib")

    tokens = _add(studies, "tokens", _tokens,
                  "token log-probabilities of two attentions on one language model")  # fmt: skip
    _add_model(tokens, "ours,sdpa-flash")

    weights = _add(studies, "weights", _weights, "distances between checkpoints of two runs")
    weights.add_argument("run_a", type=Path, help="folder of checkpoints")
    weights.add_argument("run_b", type=Path, help="folder of checkpoints of the same names")
    weights.add_argument(
        "--reference", action="append", default=[], metavar="NAME=FOLDER",
        help="a run whose difference from A is known: repeat, data, init, precision; repeatable",
    )  # fmt: skip

    training = _add(studies, "training", _training,
                    "what one difference does to trained weights, over paired seeds")  # fmt: skip
    option(training, "--workload", "drawings-small",
            "drawings-SIZE, language-SIZE (25m, 100m), or MODULE:FUNCTION")  # fmt: skip
    _device(training, "cpu")
    option(training, "--steps", 100, "optimizer steps")
    option(training, "--seeds", "0-15", "paired seeds: numbers, or FIRST-LAST",
            type=_numbers)  # fmt: skip
    option(training, "--runs", (), "controls and attentions, with commas", type=_names)
    option(training, "--base", "explicit", "attention of the base run")
    option(training, "--jobs", 1, "processes, which train a seed each")
    option(training, "--seconds", None, "start no run that would end later", type=float)

    forward = _add(studies, "forward", _forward, "emulated attention: formats, blocks, steps")
    option(forward, "--seeds", 8, "draws per point")
    option(forward, "--quick", False, "fewer points: less than a minute")

    kernels = _add(studies, "kernels", _kernels, "real kernels: this wheel's and torch's")
    _device(kernels, "cuda")
    option(kernels, "--quick", False, "fewer and smaller points")
    option(kernels, "--seeds", 4, "draws per point")

    report = _add(studies, "report", _report, "one page of all claims, numbers and verdicts")
    report.set_defaults(out=Path("deviation"))
    report.add_argument(
        "results", nargs="*", type=Path,
        help=f"folders of studies; none: those of {', '.join(_STUDIES)} in that of the report",
    )  # fmt: skip
    option(report, "--quick", False, "run quick studies first, in the folder of the report")

    repeat = _add(studies, "repeat", _repeat,
                  "trains several times and names the first operation that differs")  # fmt: skip
    option(repeat, "--workload", "language-tiny", "as of training")
    option(repeat, "--attention", "ours", "what is trained with")
    _device(repeat, "cpu")
    option(repeat, "--steps", 6, "optimizer steps")
    option(repeat, "--times", 3, "repeats")


def _add(studies: _Parsers, name: str, run: _Run, text: str) -> _Parser:
    def finished(arguments: argparse.Namespace) -> int:
        if "out" in arguments:
            from .study.files import check_writable

            check_writable(arguments.out)
        failed = run(arguments)
        if "out" in arguments:
            print(f"results in {arguments.out}", file=sys.stderr)
        return int(bool(failed))

    parser: _Parser = studies.add_parser(name, help=text, description=text)
    parser.set_defaults(run=functools.partial(ended, finished))
    if name != "repeat":  # its result is a line of text
        option(parser, "--out", Path("deviation") / name, "folder of results")
    return parser


def _device(parser: _Parser, default: str) -> None:
    option(parser, "--device", default, "where to run", choices=("cuda", "cpu"))


def _add_model(parser: _Parser, attention: str) -> None:
    option(parser, "--model", _MODEL,
            "MODULE:FACTORY of a torch.nn.Module or workload, or a workload of ours")  # fmt: skip
    option(parser, "--checkpoint", None, "weights, safetensors or torch", type=Path)
    option(parser, "--batches", "", "MODULE:FUNCTION or a .pt file; none: the workload's own")
    option(parser, "--count", 8, "batches that are used")
    option(parser, "--attention", attention, "names, with commas", type=_names)
    option(parser, "--precision", "bf16", "of q, k and v", choices=("bf16", "fp16", "fp32"))
    _device(parser, "cpu")
    option(parser, "--quick", False, "3 batches, and a tiny model of ours without --model")
    option(parser, "--seconds", None, "start no batch later, after the second", type=float)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str) -> tuple[int, ...]:
    first, _, last = text.partition("-")
    try:
        if last:
            return tuple(range(int(first), int(last) + 1))
        return tuple(int(part) for part in _names(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers with commas, or FIRST-LAST, got {text!r}"
        ) from error


def _plan_and_target(arguments: argparse.Namespace) -> Any:
    from ..cli import check_device
    from .instrument.target import ModelPlan, load_target

    check_device(arguments.device)
    if arguments.quick:
        arguments.count = 3
        if arguments.model == _MODEL:
            arguments.model = "language-tiny"
    target = load_target(
        arguments.model, arguments.batches, arguments.count, arguments.device, arguments.checkpoint
    )
    plan = ModelPlan(
        arguments.model, arguments.attention, arguments.precision, arguments.device,
        str(arguments.checkpoint or ""),
    )  # fmt: skip
    return plan, target


def _intervals(found: Mapping[str, Sequence[float | None] | None]) -> str:
    """Numbers with their intervals, as results have them: [low, middle, high]."""
    from .numbers.intervals import Interval

    there = {name: numbers for name, numbers in found.items() if numbers is not None}
    return ", ".join(f"{name} {Interval.read(numbers)}" for name, numbers in there.items())


def _gradients(arguments: argparse.Namespace) -> None:
    from .instrument.gradients import run_gradients

    if not arguments.no_plots:
        from ..pictures import load_pyplot

        load_pyplot()  # fails before anything is computed
    plan, target = _plan_and_target(arguments)
    value = run_gradients(plan, target, arguments.out, arguments.seconds)
    if value["done"] < len(target.batches):
        print(f"{value['done']} of {len(target.batches)} batches: time was over")
    for name, found in value["whole"].items():
        print(f"{name}: {_intervals(found)}")
    for name, reason in value["missing"].items():
        print(f"{name}: not run: {reason}")
    if not arguments.no_plots:
        from .report.page import write_report

        print(*write_report([arguments.out], arguments.out), sep="\n")


def _tokens(arguments: argparse.Namespace) -> None:
    from .instrument.tokens import run_tokens

    plan, target = _plan_and_target(arguments)
    value = run_tokens(plan, target, arguments.out, arguments.seconds)
    print(f"{_intervals({'KL': value['kl']})} nats a token, {value['tokens']} tokens")
    numbers = ", ".join(f"{name} {found:.2g}" for name, found in value["difference"].items())
    print(f"|difference of log p|: {numbers}; same bits {value['same']:.2%}")
    print(f"batch invariant: {value['batch_invariant']}")


def _weights(arguments: argparse.Namespace) -> None:
    from .instrument.weights import compare_runs, parse_references

    references = parse_references(arguments.reference)
    value = compare_runs(arguments.run_a, arguments.run_b, references, arguments.out)
    for checkpoint, found in value["checkpoints"].items():
        for name, measures in found.items():
            numbers = ", ".join(f"{measure} {number:.2g}" for measure, number in measures.items())
            print(f"{checkpoint} {name}: {numbers}")
    for name, lacking in value["without"].items():
        if lacking:
            print(f"{name} lacks {', '.join(lacking)}")


def _forward(arguments: argparse.Namespace) -> None:
    from .forward.plan import Plan, run_forward

    run_forward(Plan(arguments.seeds, arguments.quick), arguments.out)


def _kernels(arguments: argparse.Namespace) -> object:
    from .kernels.kernel_study import KernelPlan, failures, run_kernels

    plan = KernelPlan(arguments.device, arguments.quick, arguments.seeds)
    failed = failures(run_kernels(plan, arguments.out))
    for words in failed:
        print(f"failed: {words}", file=sys.stderr)
    return failed


def _training(arguments: argparse.Namespace) -> None:
    from .training.training_study import left_out, plan_of, printed, run_training

    plan = plan_of(
        arguments.workload, arguments.device, arguments.steps, arguments.runs, arguments.seeds,
        arguments.base,
    )  # fmt: skip
    value = run_training(plan, arguments.out, arguments.seconds, arguments.jobs)
    print(printed(value))
    if left := left_out(plan, value):
        print(f"left out for want of time: {left} runs; the same command continues")


def _repeat(arguments: argparse.Namespace) -> object:
    from ..cli import check_device
    from .training.first_difference import first_difference
    from .training.runs import Setup

    check_device(arguments.device)
    setup = Setup(arguments.workload, arguments.attention, arguments.steps, arguments.device)
    found = first_difference(setup, arguments.times)
    print(f"{arguments.times} repeats of {arguments.steps} steps: equal bits" if found is None
          else found)  # fmt: skip
    return found is not None


def _report(arguments: argparse.Namespace) -> None:
    from ..pictures import load_pyplot
    from .report.page import write_report

    load_pyplot()  # fails before anything is computed
    folders = list(arguments.results)
    if arguments.quick:
        folders = _quick_studies(arguments.out)
    elif not folders:
        folders = [arguments.out / name for name in _STUDIES]
        folders = [folder for folder in folders if folder.exists()]
    for path in write_report(folders, arguments.out):
        print(path)


def _quick_studies(folder: Path) -> list[Path]:
    """Runs quick studies in folders of `folder`, and returns them."""
    from .forward.plan import Plan, run_forward
    from .kernels.kernel_study import KernelPlan, run_kernels
    from .training.training_study import plan_of, run_training

    folders = [folder / f"quick-{name}" for name in ("forward", "kernels", "training")]
    run_forward(Plan(seeds=3, quick=True), folders[0])
    run_kernels(KernelPlan("cpu", quick=True, seeds=2), folders[1])
    runs = ("repeat", "nudge-1", "paper", "init", "fp16", "fp16-paper", "data")
    plan = plan_of("drawings-tiny", "cpu", 12, runs, seeds=(0, 1, 2))
    shutil.rmtree(folders[2], ignore_errors=True)  # it would go on
    run_training(plan, folders[2])
    return folders
