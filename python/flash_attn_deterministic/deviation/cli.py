"""The command flash-attn-deterministic deviation."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_Parsers = Any  # argparse's action has no public name


def add_command(commands: _Parsers) -> None:
    """Adds `deviation` with its subcommands; imports nothing heavy."""
    parser = commands.add_parser(
        "deviation", help="how far low-precision attention is from exact: studies and report"
    )
    studies = parser.add_subparsers(dest="study", required=True)
    _add_forward(studies)
    _add_kernels(studies)
    _add_training(studies)
    _add_report(studies)


def _add(studies: _Parsers, name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
    parser = studies.add_parser(name, help=text, description=text)
    parser.set_defaults(run=functools.partial(_interruptible, run))
    return parser


def _add_folder(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("deviation") / name,
        help="folder of the study; a run that was interrupted goes on there (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--force", action="store_true", help="delete another study's results in that folder"
    )


def _add_forward(studies: _Parsers) -> None:
    parser = _add(studies, "forward", _forward, "microbenchmark of the forward pass, on the CPU")
    parser.add_argument(
        "--preset", default="paper,kernel,tree",
        help="paper, kernel or tree, or several with commas (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--figures", default="all",
        help="3, 4, 5, 6a, 6b, 6c, rows, ablation, stochastic, bias, with commas; or all",
    )  # fmt: skip
    parser.add_argument("--inputs", help="distributions, or one .pt file of captured tensors")
    parser.add_argument("--formats", help="formats of figure 3, such as bf16,fp16:sr,p9")
    parser.add_argument("--seeds", type=int, default=8, help="draws per point (%(default)s)")
    parser.add_argument("--head-dim", type=int, default=64, help="of the inputs (%(default)s)")
    parser.add_argument("--sram", type=int, help="on-chip memory in elements, for block sizes")
    parser.add_argument("--block-r", type=int, help="rows of a tile, in the place of --sram's")
    parser.add_argument("--block-c", type=int, help="keys of a block, in the place of --sram's")
    parser.add_argument("--quick", action="store_true", help="fewer points: less than a minute")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--no-plots", action="store_true", help="results only, no matplotlib")
    _add_folder(parser, "forward")


def _add_kernels(studies: _Parsers) -> None:
    parser = _add(studies, "kernels", _kernels, "real kernels: this wheel's and torch's")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="where to run (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller points")
    parser.add_argument("--seeds", type=int, default=4, help="draws per point (%(default)s)")
    _add_folder(parser, "kernels")


def _add_training(studies: _Parsers) -> None:
    parser = _add(studies, "training", _training, "what one difference does to trained weights")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cpu", help="where to run (%(default)s)"
    )
    parser.add_argument(
        "--size", choices=("tiny", "small", "medium", "large"), default="small",
        help="of the model (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--runs", help="names of runs with commas; base is always there")
    parser.add_argument(
        "--workload", default="", metavar="MODULE:FUNCTION",
        help="a model and data of your own (docs/deviation.md)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="the tiny size for a few steps")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--no-plots", action="store_true", help="results only, no matplotlib")
    _add_folder(parser, "training")


def _add_report(studies: _Parsers) -> None:
    parser = _add(studies, "report", _report, "one page of all claims, numbers and verdicts")
    parser.add_argument(
        "results", nargs="*", type=Path,
        help="folders of studies; none: forward, kernels and training in ./deviation",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("deviation"), help="folder of the report")
    parser.add_argument(
        "--quick", action="store_true", help="run quick studies first, in the folder of the report"
    )


def _interruptible(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    try:
        return run(arguments)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _forward(arguments: argparse.Namespace) -> int:
    from .forward import DEFAULT_SRAM, FIGURES, Plan, quick_plan, run_forward
    from .inputs import DISTRIBUTIONS

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
    if arguments.quick:
        plan = quick_plan(plan)
    if not arguments.no_plots:
        _need_plots()
    run_forward(plan, arguments.out, arguments.jobs, arguments.force)
    if not arguments.no_plots:
        from .plots import plot_folder

        plot_folder(arguments.out)
    return _done(arguments.out)


def _kernels(arguments: argparse.Namespace) -> int:
    from .kernels import KernelPlan, run_kernels

    plan = KernelPlan(arguments.device, arguments.quick, arguments.seeds)
    run_kernels(plan, arguments.out, arguments.force)
    return _done(arguments.out)


def _training(arguments: argparse.Namespace) -> int:
    from .training.study import plan_of, run_training

    plan = plan_of(
        arguments.size, arguments.device, arguments.steps,
        _names(arguments.runs) if arguments.runs else None,
        arguments.workload, arguments.quick,
    )  # fmt: skip
    if not arguments.no_plots:
        _need_plots()
    run_training(plan, arguments.out, arguments.force, arguments.jobs)
    if not arguments.no_plots:
        from .plots import plot_folder

        plot_folder(arguments.out)
    return _done(arguments.out)


def _report(arguments: argparse.Namespace) -> int:
    from .report import write_report

    _need_plots()
    folders = list(arguments.results)
    if arguments.quick:
        from .quick import quick_studies

        folders = quick_studies(arguments.out)
    elif not folders:
        folders = [arguments.out / name for name in ("forward", "kernels", "training")]
        folders = [folder for folder in folders if folder.exists()]
    for path in write_report(folders, arguments.out):
        print(path)
    return 0


def _need_plots() -> None:
    """Fails before anything is computed where the plots could not be drawn."""
    from .plots import load_pyplot

    load_pyplot()


def _done(folder: Path) -> int:
    print(f"results in {folder}", file=sys.stderr)
    return 0
