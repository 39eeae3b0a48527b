"""The command flash-attn-deterministic deviation."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

_Parsers = Any  # argparse's action has no public name
_Run = Callable[[argparse.Namespace], int]


def add_command(commands: _Parsers) -> None:
    """Adds `deviation` with its subcommands; imports nothing heavy."""
    parser = commands.add_parser(
        "deviation", help="how far low-precision attention is from exact: studies and report"
    )
    studies = parser.add_subparsers(dest="study", required=True)
    for add in (_add_gradients, _add_tokens, _add_weights, _add_training, _add_forward,
                _add_kernels, _add_report, _add_repeat, _add_all):  # fmt: skip
        add(studies)


def _add(
    studies: _Parsers, name: str, run: _Run, text: str, device: str = "", out: str | None = ""
) -> Any:
    """Adds a subcommand; with a device that it runs on, and a folder unless `out` is None."""
    parser = studies.add_parser(
        name, help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.set_defaults(run=run)
    if device:
        parser.add_argument("--device", choices=("cuda", "cpu"), default=device, help="to run on")
    if out is not None:
        folder = Path("deviation") / (out or name)
        parser.add_argument("--out", type=Path, default=folder, help="folder of results")
    return parser


def _add_model(studies: _Parsers, name: str, run: _Run, text: str, attention: str) -> Any:
    """Adds a subcommand that looks into a model."""
    parser = _add(studies, name, run, text, "cpu")
    parser.add_argument(
        "--model", default="language-small",
        help="MODULE:FACTORY of a torch.nn.Module or workload, or a workload of ours",
    )  # fmt: skip
    parser.add_argument("--checkpoint", type=Path, help="weights, safetensors or torch")
    parser.add_argument("--batches", help="MODULE:FUNCTION or a .pt file; none: the workload's own")
    parser.add_argument("--count", type=int, default=8, help="batches that are used")
    parser.add_argument("--attention", type=_names, default=attention, help="names, with commas")
    parser.add_argument(
        "--precision", choices=("bf16", "fp16", "fp32"), default="bf16", help="of q, k and v"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model of ours, 3 batches")
    parser.add_argument("--seconds", type=float, help="start no batch later, after the second")
    return parser


def _add_gradients(studies: _Parsers) -> None:
    text = "gradients of a model with each attention, against exact attention"
    default = "ours,ours-atomics,sdpa-flash,sdpa-cudnn,explicit"
    parser = _add_model(studies, "gradients", _gradients, text, default)
    parser.add_argument("--force", action="store_true", help="replace another comparison there")
    parser.add_argument("--no-plots", action="store_true", help="results only, no matplotlib")


def _add_tokens(studies: _Parsers) -> None:
    text = "token log-probabilities of two attentions on one language model"
    _add_model(studies, "tokens", _tokens, text, "ours,sdpa-flash")


def _add_weights(studies: _Parsers) -> None:
    parser = _add(studies, "weights", _weights, "distances between checkpoints of two runs")
    parser.add_argument("run_a", type=Path, help="folder of checkpoints")
    parser.add_argument("run_b", type=Path, help="folder of checkpoints of the same names")
    parser.add_argument(
        "--reference", action="append", default=[], metavar="NAME=FOLDER",
        help="a run whose difference from A is known: repeat, data, init, precision; repeatable",
    )  # fmt: skip


def _add_forward(studies: _Parsers) -> None:
    parser = _add(studies, "forward", _forward, "emulated attention: formats, blocks, steps")
    parser.add_argument(
        "--preset", type=_names, default="paper,kernel,tree",
        help="paper, lines, kernel, tree, fa4 or fp8, or several with commas",
    )  # fmt: skip
    parser.add_argument(
        "--figures", type=_names, default="all",
        help="3, 4, 5, 6a, 6b, 6c, ablation, stochastic, bias, backward, with commas; or all",
    )  # fmt: skip
    parser.add_argument(
        "--inputs", type=_names, default=(), help="distributions, or one .pt file of captured calls"
    )
    parser.add_argument(
        "--formats", type=_names, default=(), help="formats of figure 3, such as bf16,fp16:sr,p9"
    )
    parser.add_argument("--seeds", type=int, default=8, help="draws per point")
    parser.add_argument("--head-dim", type=int, default=64, help="of the inputs")
    parser.add_argument(
        "--sram", type=int, default=16384, help="on-chip memory in elements, for block sizes"
    )
    parser.add_argument("--quick", action="store_true", help="fewer points: less than a minute")


def _add_kernels(studies: _Parsers) -> None:
    text = "real kernels: this wheel's and torch's"
    parser = _add(studies, "kernels", _kernels, text, "cuda")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller points")
    parser.add_argument("--seeds", type=int, default=4, help="draws per point")


def _add_training(studies: _Parsers) -> None:
    text = "what one difference does to trained weights, over paired seeds"
    parser = _add(studies, "training", _training, text, "cpu")
    parser.add_argument(
        "--workload", default="drawings-small",
        help="drawings-SIZE, language-SIZE (25m, 100m), or MODULE:FUNCTION",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=0, help="optimizer steps; 0: as many as fit into --seconds"
    )
    parser.add_argument("--seeds", type=_names, default="0,1,2,3,4", help="paired seeds")
    parser.add_argument("--runs", type=_names, default=(), help="controls and attentions")
    parser.add_argument("--noise", action="store_true", help="also explicit attention in 5-24 bits")
    parser.add_argument("--base", default="", help="attention of the base run")
    parser.add_argument(
        "--seconds", type=float, help="start no run that would end later; the next call goes on"
    )
    parser.add_argument("--force", action="store_true", help="replace another study there")


def _add_repeat(studies: _Parsers) -> None:
    text = "trains several times and names the first operation whose result has other bits"
    parser = _add(studies, "repeat", _repeat, text, "cpu", out=None)
    parser.add_argument("--workload", default="language-tiny", help="as of training")
    parser.add_argument("--attention", default="ours", help="what is trained with")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps")
    parser.add_argument("--times", type=int, default=3, help="repeats")


def _add_report(studies: _Parsers) -> None:
    text = "one page of all claims, numbers and verdicts"
    parser = _add(studies, "report", _report, text, out=".")
    parser.add_argument(
        "results", nargs="*", type=Path,
        help="folders of studies; none: forward, kernels, training and sinks in that of the report",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="run quick studies first, in the folder of the report"
    )


def _add_all(studies: _Parsers) -> None:
    text = "every study on a GPU, each in a process of its own, within a total time"
    parser = _add(studies, "all", _all, text, out="gpu")
    parser.add_argument("--seconds", type=float, default=330.0, help="in which all of them end")


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _target(arguments: argparse.Namespace) -> Any:
    from .instrument.target import load_target
    from .study.environment import check_device

    check_device(arguments.device)
    if arguments.quick:
        arguments.model, arguments.count = "language-tiny", 3
    return load_target(
        arguments.model, arguments.batches, arguments.count, arguments.device, arguments.checkpoint
    )


def _intervals(found: Mapping[str, Iterable[float | None] | None]) -> str:
    """Numbers with their intervals, as results have them: [low, middle, high]."""
    texts = []
    for name, interval in found.items():
        if interval is not None:
            low, middle, high = (math.nan if x is None else x for x in interval)
            texts.append(f"{name} {middle:.2g} [{low:.2g}, {high:.2g}]")
    return ", ".join(texts)


def _gradients(arguments: argparse.Namespace) -> int:
    from .instrument.gradients import GradientPlan, run_gradients

    if not arguments.no_plots:
        _need_plots()
    target = _target(arguments)
    plan = GradientPlan(
        arguments.model, arguments.attention, arguments.precision, arguments.device,
        str(arguments.checkpoint or ""),
    )  # fmt: skip
    value = run_gradients(plan, target, arguments.out, arguments.force, arguments.seconds)
    if value["done"] < len(target.batches):
        print(f"{value['done']} of {len(target.batches)} batches; the same command goes on")
    for name, found in value["whole"].items():
        print(f"{name}: {_intervals(found)}")
    for name, reason in value["missing"].items():
        print(f"{name}: not run: {reason}")
    if not arguments.no_plots:
        from .report.page import write_gradients_page

        print(write_gradients_page(arguments.out))
    return _done(arguments.out)


def _tokens(arguments: argparse.Namespace) -> int:
    from .instrument.tokens import run_tokens

    value = run_tokens(
        _target(arguments), arguments.attention, arguments.precision, arguments.device,
        arguments.out, arguments.seconds,
    )  # fmt: skip
    print(f"{_intervals({'KL': value['kl']})} nats a token, {value['tokens']} tokens")
    numbers = ", ".join(f"{name} {found:.2g}" for name, found in value["difference"].items())
    print(f"|difference of log p|: {numbers}; same bits {value['same']:.2%}")
    print(f"batch invariant: {value['batch_invariant']}")
    return _done(arguments.out)


def _weights(arguments: argparse.Namespace) -> int:
    from .instrument.weights import compare_runs, parse_references

    references = parse_references(arguments.reference)
    value = compare_runs(arguments.run_a, arguments.run_b, references, arguments.out)
    for checkpoint, found in value["checkpoints"].items():
        for name, measures in found.items():
            print(f"{checkpoint} {name}: {_intervals(measures)}")
        for name, ratios in value["over"][checkpoint].items():
            text = _intervals(ratios) or "the reference is equal to A"
            print(f"{checkpoint} B over {name}: {text}")
    return _done(arguments.out)


def _forward(arguments: argparse.Namespace) -> int:
    from .forward.inputs import DISTRIBUTIONS
    from .forward.plan import FIGURES, Plan, quick_plan, run_forward

    plan = Plan(
        presets=arguments.preset,
        figures=tuple(FIGURES) if arguments.figures == ("all",) else arguments.figures,
        inputs=arguments.inputs or DISTRIBUTIONS,
        seeds=arguments.seeds,
        head_dim=arguments.head_dim,
        sram=arguments.sram,
        formats=arguments.formats,
    )
    run_forward(quick_plan(plan) if arguments.quick else plan, arguments.out)
    return _done(arguments.out)


def _kernels(arguments: argparse.Namespace) -> int:
    from .kernels.kernel_study import run_kernels
    from .kernels.plan import KernelPlan

    plan = KernelPlan(arguments.device, arguments.quick, arguments.seeds)
    value = run_kernels(plan, arguments.out)
    for name, message in value["failed"].items():
        print(f"failed: {name}: {message}", file=sys.stderr)
    return _done(arguments.out) or int(bool(value["failed"]))


def _training(arguments: argparse.Namespace) -> int:
    from .training.training_study import NOISE, plan_of, printed, run_training

    plan = plan_of(
        arguments.workload, arguments.device, arguments.steps, arguments.runs, arguments.seeds,
        arguments.base, NOISE if arguments.noise else (),
    )  # fmt: skip
    value = run_training(plan, arguments.out, arguments.seconds, arguments.force)
    print(printed(value))
    return _done(arguments.out)


def _repeat(arguments: argparse.Namespace) -> int:
    from .study.environment import check_device
    from .training.first_difference import first_difference
    from .training.runs import Setup

    check_device(arguments.device)
    setup = Setup(arguments.workload, arguments.attention, arguments.steps, arguments.device)
    found = first_difference(setup, arguments.times)
    print(f"{arguments.times} repeats of {arguments.steps} steps: equal bits" if found is None
          else found)  # fmt: skip
    return int(found is not None)


def _report(arguments: argparse.Namespace) -> int:
    from .report.page import write_report

    _need_plots()
    folders = list(arguments.results)
    if arguments.quick:
        from .study.quick import quick_studies

        folders = quick_studies(arguments.out)
    elif not folders:
        folders = [arguments.out / name for name in ("forward", "kernels", "training", "sinks")]
        folders = [folder for folder in folders if folder.exists()]
    for path in write_report(folders, arguments.out):
        print(path)
    return 0


def _all(arguments: argparse.Namespace) -> int:
    from .study.all_studies import run_all
    from .study.environment import check_device

    check_device("cuda")
    return _done(arguments.out) or int(bool(run_all(arguments.out, arguments.seconds)))


def _need_plots() -> None:
    """Fails before anything is computed where the plots could not be drawn."""
    from .report.plots import load_pyplot

    load_pyplot()


def _done(folder: Path) -> int:
    print(f"results in {folder}", file=sys.stderr)
    return 0
