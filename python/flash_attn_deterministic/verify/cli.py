"""The command `flash-attn-deterministic verify`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

_EPILOG = """\
exit status: 0 passed; 2 wrong usage, or a file that is no wheel of this package; 3 contract;
4 accuracy; 5 performance or memory; 6 environment (no GPU, a wheel that is not the installed one,
missing kernels); 7 the report cannot be written; 130 interrupted; 1 anything else
"""


def add_command(commands: Any) -> None:
    """Adds the command to the program's subparsers."""
    from .shared.commands import add_options

    parser = commands.add_parser(
        "verify",
        help="check the installed wheel: contract, accuracy, memory, speed; write a report",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = "the wheel that the installation must be of"
    add_options(parser, "verification", "verification.json, .md and .html", words)
    parser.add_argument(
        "--quick", action="store_true", help="fewer head dims and shapes; not enough to publish"
    )
    parser.add_argument(
        "--allow-source",
        action="store_true",
        help="for developers: run on a source tree; such a report cannot be published",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="instead of all that: attention cut over up to N ranks against one device, bit for "
        "bit; starts the ranks itself, or runs as one of them under torchrun; writes ranks.json "
        "and .md",
    )
    instead.add_argument(
        "--vllm",
        metavar="MODEL",
        help="instead of all that: whether the installed vLLM answers with the same bits alone and "
        "in a batch, whole and in steps, with cached prefixes, in decode and prefill; names the "
        "first module that does not; writes vllm.json",
    )
    parser.add_argument(
        "--vllm-options",
        metavar="JSON",
        help="with --vllm: arguments of vllm.LLM, such as "
        '\'{"attention_backend": "FLASH_ATTN_DETERMINISTIC"}\'',
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        Exit status, one of `outcome.Exit`.
    """
    from ..errors import ArgumentError
    from .installed import FileError, NotInstalledError
    from .outcome import Exit
    from .shared.commands import ended

    statuses: dict[type[Exception], int] = {
        NotInstalledError: Exit.ENVIRONMENT,
        FileError: Exit.USAGE,
        ArgumentError: Exit.USAGE,
    }
    return ended(lambda: _run(arguments), statuses)


def _run(arguments: argparse.Namespace) -> int:
    from . import environment, installed

    _check_options(arguments)
    if arguments.vllm is not None:
        from .vllm import run as run_vllm

        return run_vllm(arguments)
    wheel = None if arguments.wheel is None else installed.read_wheel(arguments.wheel)
    if arguments.ranks is None:
        return _verify(arguments, wheel)
    if wheel is not None:
        installed.check(installed.inspect(wheel), wheel, arguments.allow_source)
    environment.check_device(arguments.device)
    from .ranks.cli import run as run_ranks

    return run_ranks(arguments, wheel)


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuses options that the chosen kind of run would ignore."""
    from ..errors import ArgumentError

    if arguments.allow_source and arguments.wheel is None and arguments.ranks is not None:
        raise ArgumentError("--allow-source: expected together with --wheel")
    if arguments.vllm is not None and arguments.wheel is not None:
        raise ArgumentError("--wheel: cannot be combined with --vllm")
    if arguments.vllm_options is not None and arguments.vllm is None:
        raise ArgumentError("--vllm-options: expected together with --vllm only")


def _verify(arguments: argparse.Namespace, wheel: Any) -> int:
    from . import environment, installed, outcome, tasks
    from .run import Run
    from .shared.commands import sigterm_interrupts
    from .shared.provenance import machine
    from .supervisor import Supervisor

    found = installed.inspect(wheel)
    installed.check(found, wheel, arguments.allow_source)
    environment.check_device(arguments.device)
    options = tasks.Options(arguments.device, arguments.quick)
    listed = tasks.list_tasks(options, tasks.holds(options.device))
    run = Run(options, arguments.out, wheel, found, machine(options.device), listed)
    with sigterm_interrupts():
        try:
            with Supervisor(options) as supervisor:
                run.execute(supervisor)
        except KeyboardInterrupt:
            run.write()
            print("\ninterrupted", file=sys.stderr)
    record = run.record()
    for section in record["sections"]:
        reason = f": {section['reason']}" if section["reason"] else ""
        print(f"{section['status']:<15} {section['title']}{reason}")
    print(f"{record['status']}: {arguments.out / 'verification.html'}")
    status = outcome.exit_status(record["sections"], run.complete)
    if run.unrendered:
        print(
            f"error: verification.md and .html could not be made ({run.unrendered}); "
            f"{arguments.out / 'verification.json'} has the results",
            file=sys.stderr,
        )
        status = status or outcome.Exit.REPORT
    return int(status)
