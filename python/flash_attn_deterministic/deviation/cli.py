"""The command flash-attn-deterministic deviation."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_Parsers = Any  # argparse's action has no public name
_DEVICES = ("cuda", "cpu")
_PRECISIONS = ("bf16", "fp16", "fp32")


def add_command(commands: _Parsers) -> None:
    """Adds `deviation` with its subcommands; imports nothing heavy."""
    parser = commands.add_parser(
        "deviation", help="how far low-precision attention is from exact: studies and report"
    )
    studies = parser.add_subparsers(dest="study", required=True)
    for add in (_add_gradients, _add_tokens, _add_weights, _add_training, _add_forward,
                _add_kernels, _add_report, _add_repeat):  # fmt: skip
        add(studies)


def _add(studies: _Parsers, name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
    parser = studies.add_parser(name, help=text, description=text)
    parser.set_defaults(run=functools.partial(_interruptible, run))
    parser.add_argument(
        "--out", type=Path, default=Path("deviation") / name, help="folder of results (%(default)s)"
    )
    return parser


def _add_model(parser: argparse.ArgumentParser, attention: str) -> None:
    parser.add_argument(
        "--model", default="language-small",
        help="MODULE:FACTORY of a torch.nn.Module or workload, or a workload of ours (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--checkpoint", type=Path, help="weights, safetensors or torch")
    parser.add_argument(
        "--batches", default="", help="MODULE:FUNCTION or a .pt file; none: the workload's own"
    )
    parser.add_argument("--count", type=int, default=8, help="batches that are used (%(default)s)")
    parser.add_argument("--attention", default=attention, help="names, with commas (%(default)s)")
    parser.add_argument(
        "--precision", choices=_PRECISIONS, default="bf16", help="of q, k and v (%(default)s)"
    )
    parser.add_argument(
        "--device", choices=_DEVICES, default="cpu", help="where to run (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model of ours, 3 batches")
    parser.add_argument("--seconds", type=float, help="start no batch later, after the second")


def _add_gradients(studies: _Parsers) -> None:
    parser = _add(studies, "gradients", _gradients,
                  "gradients of a model with each attention, against exact attention")  # fmt: skip
    _add_model(parser, "ours,ours-atomics,sdpa-flash,sdpa-cudnn,explicit")
    parser.add_argument("--force", action="store_true", help="replace another comparison there")
    parser.add_argument("--no-plots", action="store_true", help="results only, no matplotlib")


def _add_tokens(studies: _Parsers) -> None:
    parser = _add(studies, "tokens", _tokens,
                  "token log-probabilities of two attentions on one language model")  # fmt: skip
    _add_model(parser, "ours,sdpa-flash")


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
        "--preset", default="paper,kernel,tree",
        help="paper, lines, kernel, tree, fa4 or fp8, or several with commas (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--figures", default="all",
        help="3, 4, 5, 6a, 6b, 6c, rows, ablation, stochastic, bias, backward, with commas; or all",
    )  # fmt: skip
    parser.add_argument("--inputs", help="distributions, or one .pt file of captured calls")
    parser.add_argument("--formats", help="formats of figure 3, such as bf16,fp16:sr,p9")
    parser.add_argument("--seeds", type=int, default=8, help="draws per point (%(default)s)")
    parser.add_argument("--head-dim", type=int, default=64, help="of the inputs (%(default)s)")
    parser.add_argument("--sram", type=int, help="on-chip memory in elements, for block sizes")
    parser.add_argument("--block-r", type=int, help="rows of a tile, in the place of --sram's")
    parser.add_argument("--block-c", type=int, help="keys of a block, in the place of --sram's")
    parser.add_argument("--quick", action="store_true", help="fewer points: less than a minute")


def _add_kernels(studies: _Parsers) -> None:
    parser = _add(studies, "kernels", _kernels, "real kernels: this wheel's and torch's")
    parser.add_argument(
        "--device", choices=_DEVICES, default="cuda", help="where to run (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller points")
    parser.add_argument("--seeds", type=int, default=4, help="draws per point (%(default)s)")


def _add_training(studies: _Parsers) -> None:
    parser = _add(studies, "training", _training,
                  "what one difference does to trained weights, over paired seeds")  # fmt: skip
    parser.add_argument(
        "--workload", default="drawings-small",
        help="drawings-SIZE, language-SIZE (25m, 100m), or MODULE:FUNCTION (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=_DEVICES, default="cpu", help="where to run (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="optimizer steps; 0: as many as fit into the budget"
    )
    parser.add_argument("--seeds", default="0,1,2,3,4", help="paired seeds (%(default)s)")
    parser.add_argument("--runs", default="", help="controls and attentions, with commas")
    parser.add_argument("--noise", action="store_true", help="also explicit attention in 5-24 bits")
    parser.add_argument("--base", default="", help="attention of the base run")
    parser.add_argument(
        "--seconds", type=float, help="start no run that would end later; the next call goes on"
    )
    parser.add_argument(
        "--budget", type=float, help="seconds of all calls together, for --steps 0 (--seconds)"
    )
    parser.add_argument("--force", action="store_true", help="replace another study there")


def _add_repeat(studies: _Parsers) -> None:
    text = "trains several times and names the first operation whose result has other bits"
    parser = studies.add_parser("repeat", help=text, description=text)
    parser.set_defaults(run=functools.partial(_interruptible, _repeat))
    parser.add_argument("--workload", default="language-tiny", help="as of training (%(default)s)")
    parser.add_argument("--attention", default="ours", help="what is trained with (%(default)s)")
    parser.add_argument(
        "--device", choices=_DEVICES, default="cpu", help="where to run (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps (%(default)s)")
    parser.add_argument("--times", type=int, default=3, help="repeats (%(default)s)")


def _add_report(studies: _Parsers) -> None:
    parser = _add(studies, "report", _report, "one page of all claims, numbers and verdicts")
    parser.set_defaults(out=Path("deviation"))
    parser.add_argument(
        "results", nargs="*", type=Path,
        help="folders of studies; none: forward, kernels, training and sinks in that of the report",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="run quick studies first, in the folder of the report"
    )


def _interruptible(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    try:
        return run(arguments)
    except KeyboardInterrupt:
        print("interrupted; training and gradients go on from here", file=sys.stderr)
        return 130


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


def _gradients(arguments: argparse.Namespace) -> int:
    from .instrument.gradients import GradientPlan, run_gradients

    if not arguments.no_plots:
        _need_plots()
    target = _target(arguments)
    plan = GradientPlan(
        arguments.model, _names(arguments.attention), arguments.precision, arguments.device,
        str(arguments.checkpoint or ""),
    )  # fmt: skip
    value = run_gradients(plan, target, arguments.out, arguments.force, arguments.seconds)
    if value["done"] < len(target.batches):
        print(f"{value['done']} of {len(target.batches)} batches; the same command goes on")
    for name, found in value["whole"].items():
        numbers = (f"{measure} {middle:.2g} [{low:.2g}, {high:.2g}]"
                   for measure, (low, middle, high) in found.items())  # fmt: skip
        print(f"{name}: {', '.join(numbers)}")
    for name, reason in value["missing"].items():
        print(f"{name}: not run: {reason}")
    if not arguments.no_plots:
        from .report.instrument_page import write_gradients_page

        print(write_gradients_page(arguments.out))
    return _done(arguments.out)


def _tokens(arguments: argparse.Namespace) -> int:
    from .instrument.tokens import run_tokens

    names = _names(arguments.attention)
    value = run_tokens(
        _target(arguments),
        names,
        arguments.precision,
        arguments.device,
        arguments.out,
        arguments.seconds,
    )
    low, middle, high = value["kl"]
    print(f"KL {middle:.2g} [{low:.2g}, {high:.2g}] nats a token, {value['tokens']} tokens")
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
            numbers = (f"{m} {middle:.2g} [{low:.2g}, {high:.2g}]"
                       for m, (low, middle, high) in measures.items())  # fmt: skip
            print(f"{checkpoint} {name}: {', '.join(numbers)}")
        for name, ratios in value["over"][checkpoint].items():
            known = {m: r for m, r in ratios.items() if r is not None}
            text = ", ".join(f"{m} {r[1]:.2g} [{r[0]:.2g}, {r[2]:.2g}]" for m, r in known.items())
            print(f"{checkpoint} B over {name}: {text or 'the reference is equal to A'}")
    return _done(arguments.out)


def _forward(arguments: argparse.Namespace) -> int:
    from .forward.inputs import DISTRIBUTIONS
    from .forward.plan import DEFAULT_SRAM, FIGURES, Plan, quick_plan, run_forward

    plan = Plan(
        presets=_names(arguments.preset),
        figures=tuple(FIGURES) if arguments.figures == "all" else _names(arguments.figures),
        inputs=_names(arguments.inputs) if arguments.inputs else DISTRIBUTIONS,
        seeds=arguments.seeds,
        head_dim=arguments.head_dim,
        sram=DEFAULT_SRAM if arguments.sram is None else arguments.sram,
        block_r=arguments.block_r,
        block_c=arguments.block_c,
        formats=_names(arguments.formats) if arguments.formats else (),
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
        arguments.workload, arguments.device, arguments.steps, _names(arguments.runs),
        _names(arguments.seeds), arguments.base, NOISE if arguments.noise else (),
    )  # fmt: skip
    value = run_training(plan, arguments.out, arguments.seconds, arguments.budget, arguments.force)
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


def _need_plots() -> None:
    """Fails before anything is computed where the plots could not be drawn."""
    from .report.plots import load_pyplot

    load_pyplot()


def _done(folder: Path) -> int:
    print(f"results in {folder}", file=sys.stderr)
    return 0
