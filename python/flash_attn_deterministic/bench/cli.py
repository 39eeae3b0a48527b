"""The command `flash-attn-deterministic bench`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

KINDS = ("forward", "decode", "backward")
_EPILOG = """\
exit status: 0 done (a peer that cannot run is listed with its reason); 1 ours failed; 2 wrong
usage; 6 no such device; 7 the results cannot be written; 130 interrupted (what was measured is
written)
"""


def add_command(commands: Any) -> None:
    """Adds the command to the program's subparsers."""
    parser = commands.add_parser(
        "bench",
        help="time this package beside other attention implementations on this machine",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="where to run (default: cuda)"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what to time (default: all)"
    )
    parser.add_argument(
        "--peers", nargs="+", metavar="NAME", help="which to time besides ours (default: all)"
    )
    parser.add_argument(
        "--repeats", type=_positive, default=20, metavar="N", help="timed calls (default: 20)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench"),
        metavar="DIR",
        help="folder of bench.json, .md and .svg (default: bench)",
    )
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"expected 2 or more, got {number}")
    return number


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        Exit status; see the command's help.
    """
    import torch

    from .. import __version__, get_deterministic_mode
    from ..verify.environment import collect
    from ..verify.outcome import Exit
    from ..verify.report import ReportError
    from .measure import measure
    from .peers import OURS, PEERS
    from .problem import shapes

    known = {peer.name: peer for peer in PEERS}
    unknown = [name for name in arguments.peers or () if name not in known]
    if unknown:
        print(
            f"error: --peers: no {', '.join(unknown)}; known: {', '.join(known)}", file=sys.stderr
        )
        return Exit.USAGE
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            f"error: --device cuda: torch {torch.__version__} finds no CUDA device; use a machine "
            "with an NVIDIA GPU, or --device cpu",
            file=sys.stderr,
        )
        return Exit.ENVIRONMENT
    chosen = [known[name] for name in arguments.peers] if arguments.peers else list(PEERS)
    peers = [peer for peer in chosen if arguments.device in peer.devices]
    if OURS not in peers:
        peers = [OURS, *peers]
    record: dict[str, Any] = {
        "schema_version": 1,
        "complete": False,
        "version": __version__,
        "environment": collect(arguments.device),
        "split_size": get_deterministic_mode().split_size,
        "repeats": arguments.repeats,
        "cases": [],
    }
    status = Exit.PASSED
    try:
        _write(arguments.out, record)
        try:
            for shape in shapes(arguments.device, tuple(arguments.kinds)):
                print(shape.name, file=sys.stderr, flush=True)
                case = measure(shape, arguments.device, peers, arguments.repeats)
                record["cases"].append(case)
                _write(arguments.out, record)
            record["complete"] = True
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            status = Exit.INTERRUPTED
        _write(arguments.out, record)
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return Exit.REPORT
    from .report import text

    print(text(record))
    if any(OURS.name in case["failed"] for case in record["cases"]):
        return 1
    return status


def _write(folder: Path, record: dict[str, Any]) -> None:
    from ..verify.report import json_text, write_files
    from .report import markdown, plot

    write_files(
        folder,
        {"bench.json": json_text(record), "bench.md": markdown(record), "bench.svg": plot(record)},
    )
