"""The command `flash-attn-deterministic bench`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .peers import Peer

KINDS = ("forward", "decode", "backward")
_EPILOG = """\
exit status: 0 done (a peer that cannot run is listed with its reason); 1 ours failed; 2 wrong
usage; 6 no such device, or a source tree; 7 the results cannot be written; 130 interrupted (what
was measured is written)
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
        "--repeats", type=int, default=20, metavar="N", help="timed calls, 2 or more (default: 20)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench"),
        metavar="DIR",
        help="folder of bench.json, .md and .svg (default: bench)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        Exit status; see the command's help.
    """
    from ..errors import ArgumentError, BuildInfoError
    from ..verify.ending import ended
    from ..verify.outcome import Exit

    statuses: dict[type[Exception], Exit] = {
        ArgumentError: Exit.USAGE,
        BuildInfoError: Exit.ENVIRONMENT,
    }
    return ended(lambda: _bench(arguments), statuses)


def _bench(arguments: argparse.Namespace) -> int:
    from ..errors import ArgumentError
    from ..verify.environment import check_device
    from .peers import OURS

    # The command line is checked first: the rest takes time, or needs a GPU.
    if arguments.repeats < 2:
        raise ArgumentError(f"--repeats: expected 2 or more, got {arguments.repeats}")
    peers = _peers(arguments)
    check_device(arguments.device)
    record = _begin(arguments)

    from ..verify.outcome import Exit
    from .measure import measure
    from .problem import shapes
    from .report import text

    status = Exit.PASSED
    _write(arguments.out, record)
    try:
        for shape in shapes(arguments.device, tuple(dict.fromkeys(arguments.kinds))):
            print(shape.name, file=sys.stderr, flush=True)
            case = measure(shape, arguments.device, peers, arguments.repeats)
            record["cases"].append(case)
            _write(arguments.out, record)
        record["complete"] = True
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = Exit.INTERRUPTED
    _write(arguments.out, record)
    print(text(record))
    if status == Exit.PASSED and any(OURS.name in case["failed"] for case in record["cases"]):
        return 1
    return status


def _peers(arguments: argparse.Namespace) -> list[Peer]:
    """Returns ours, then the peers of --peers; without it, all that run on the device.

    Raises:
        ArgumentError: there is no such peer.
    """
    from ..errors import ArgumentError
    from .peers import OURS, PEERS, VARIANTS

    known = {peer.name: peer for peer in (*PEERS, *VARIANTS)}
    unknown = [name for name in arguments.peers or () if name not in known]
    if unknown:
        raise ArgumentError(f"--peers: no {', '.join(unknown)}; known: {', '.join(known)}")
    if arguments.peers:
        # One that does not run on the device will be listed with that as its reason.
        chosen = [known[name] for name in dict.fromkeys(arguments.peers)]
    else:
        chosen = [peer for peer in PEERS if arguments.device in peer.devices]
    return [OURS, *(peer for peer in chosen if peer is not OURS)]


def _begin(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the record of a run that has measured nothing yet.

    Raises:
        BuildInfoError: this is a source tree.
        NotInstalledError: nothing tells the version.
    """
    from importlib.metadata import PackageNotFoundError, version

    from .. import get_deterministic_mode
    from ..info.build_info import build_info
    from ..verify.environment import collect
    from ..verify.installed import NAME, NotInstalledError

    info = build_info()
    try:
        found = version(NAME)
    except PackageNotFoundError as error:
        raise NotInstalledError(f"{NAME} is not installed; install the wheel") from error
    mode = get_deterministic_mode()
    return {
        "schema_version": 1,
        "complete": False,
        "version": found,
        "bits_version": info.bits_version,
        # What the kernels were compiled from: digests by part of the source tree.
        "sources": dict(info.sources),
        "environment": collect(arguments.device),
        "split_size": mode.split_size if mode.enabled else None,
        "repeats": arguments.repeats,
        "cases": [],
    }


def _write(folder: Path, record: dict[str, Any]) -> None:
    from ..verify.report import json_text, write_files
    from ..verify.report.record import finite
    from .report import markdown, plot

    record = finite(record)
    write_files(
        folder,
        {"bench.json": json_text(record), "bench.md": markdown(record), "bench.svg": plot(record)},
    )
