"""The command flash-attn-deterministic-lab, and how its commands end."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import ArgumentError, LabError, UnavailableError

_COMMANDS = ("bench.cli", "scoreboard.cli", "deviation.cli")  # they import quickly
STATUSES = """\
exit status: 0 done; 1 failed; 2 wrong usage; 6 no such device or attention; 7 the results cannot be
written; 130 interrupted (what was measured is written)
"""
USAGE, UNAVAILABLE = 2, 6


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand, and returns its exit status."""
    parser = argparse.ArgumentParser(prog="flash-attn-deterministic-lab")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in _COMMANDS:
        importlib.import_module(f".{name}", __package__).add_command(commands)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


def ended(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Runs a command; an error that is no bug becomes one line and an exit status."""
    from .shared import commands

    statuses: dict[type[Exception], int] = {
        ArgumentError: USAGE,
        UnavailableError: UNAVAILABLE,
        LabError: 1,
    }
    with commands.sigterm_interrupts():
        return commands.ended(lambda: command(arguments), statuses)


def option(
    parser: argparse.ArgumentParser, flag: str, default: Any, text: str, **more: Any
) -> None:
    """Adds an option of its default's type; a flag where that is False."""
    kind: dict[str, Any]
    kind = {"action": "store_true"} if default is False else {"type": type(default), **more}
    shown = f"{text} (%(default)s)" if default else text
    parser.add_argument(flag, default=default, help=shown, **kind)


def check_device(device: str) -> None:
    """Raises UnavailableError where a CUDA device is asked for and there is none."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(
            "--device: expected a CUDA device for cuda, got a machine without one; --device cpu "
            "runs here"
        )


_PATHS = {
    "fa3": "fa3.so, FlashAttention-3's library",
    "fa4": "the package flash-attn-4 and what it needs",
    "flashmla": "_flashmla_C.abi3.so, FlashMLA's library in vLLM",
    "baseline": "libfa2_baseline.so, FlashAttention-2's kernels",
}


def add_paths(parser: argparse.ArgumentParser) -> None:
    """Adds --fa3, --fa4, --flashmla and --baseline."""
    for name, words in _PATHS.items():
        words = f"folder or file of {words}"
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=words)


def use_paths(arguments: argparse.Namespace) -> None:
    """Puts them where their attentions are looked for, also by processes that are started."""
    from .attentions import fa3, flashmla, others

    for name in _PATHS:
        path: Path | None = getattr(arguments, name)
        if path is None:
            continue
        if not path.exists():
            raise ArgumentError(f"--{name}: expected a file or folder, got {path}")
        path = path.resolve()
        if name == "fa4":
            sys.path[:0] = [str(path), str(path / "nvidia_cutlass_dsl" / "dsl_packages")]
            # The package reads them when it is imported.
            os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
            os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(path / "cache"))
            continue
        variable, file = {
            "fa3": (fa3.VARIABLE, "fa3.so"),
            "flashmla": (flashmla.VARIABLE, "_flashmla_C.abi3.so"),
            "baseline": (others.BASELINE, ""),
        }[name]
        os.environ[variable] = str(path / file if path.is_dir() else path)


if __name__ == "__main__":
    sys.exit(main())
