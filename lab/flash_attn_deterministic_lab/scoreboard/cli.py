"""The command `scoreboard`."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

from ..cli import STATUSES, add_paths, check_device, ended, option, use_paths
from ..shared.commands import INTERRUPTED, add_options

BROKEN_PROMISE = 3  # the exit status where ours breaks a row
_DEFAULT = "sdpa-flash,sdpa-cudnn,flex,fa3"


def add_command(commands: Any) -> None:
    """Adds the command to a program's subparsers."""
    parser = commands.add_parser(
        "scoreboard",
        help="which promises of equal bits each attention keeps",
        epilog=f"{STATUSES.rstrip()}; {BROKEN_PROMISE} flash-attn-deterministic breaks a row\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    files = "scoreboard.json, .md and .svg, written after each row"
    add_options(parser, "scoreboard", files, "the installed wheel, to name it")
    option(parser, "--attention", _DEFAULT, "names and MODULE:FUNCTION, with commas, besides ours",
           metavar="LIST")  # fmt: skip
    option(parser, "--quick", False, "fewer shapes")
    option(parser, "--seconds", 20.0, "no further case of a row starts later", metavar="S")
    option(parser, "--jobs", 1, "processes that try rows side by side; times are taken alone",
           metavar="N")  # fmt: skip
    add_paths(parser)
    parser.set_defaults(run=functools.partial(ended, _scoreboard))


def _scoreboard(arguments: argparse.Namespace) -> int:
    from ..attentions import settings_of
    from ..attentions.registry import OURS, find_attention
    from ..errors import ArgumentError, UnavailableError
    from ..shared.provenance import provenance
    from .rows import CPU, CUDA, QUICK_CUDA, ROWS
    from .trial import BROKEN, RAISED, not_run

    if not arguments.seconds >= 0:
        raise ArgumentError(f"--seconds: expected 0 or more, got {arguments.seconds}")
    if arguments.jobs < 1:
        raise ArgumentError(f"--jobs: expected at least 1, got {arguments.jobs}")
    use_paths(arguments)
    device = arguments.device
    names = dict.fromkeys(part.strip() for part in arguments.attention.split(","))
    wanted = [OURS, *(one for name in names for one in settings_of(find_attention(name)))]
    check_device(device)
    attentions, unavailable = [], {}
    for one in wanted:
        try:
            if device not in one.devices:
                raise UnavailableError(f"it does not run on {device}")
            _ = one.function
            attentions.append(one)
        except UnavailableError as error:
            unavailable[one.name] = str(error)
    if not attentions:
        raise UnavailableError(f"--attention: none can run here: {unavailable}")
    sizes = CPU if device == "cpu" else QUICK_CUDA if arguments.quick else CUDA
    record: dict[str, Any] = {
        "schema": "scoreboard/2",
        "complete": False,
        **provenance(["flash-attn-deterministic", *sys.argv[1:]], device, arguments.wheel),
        "quick": arguments.quick,
        "rows": [{"id": r.id, "promise": r.promise, "source": r.source} for r in ROWS],
        "attentions": [
            {"name": a.name, "title": a.title, "version": a.version, "rows": not_run()}
            for a in attentions
        ],
        "unavailable": unavailable,
        "times": [],
    }
    _write(arguments.out, record)
    status = 0
    try:
        _fill(record, attentions, sizes, arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    text = _write(arguments.out, record, draw=True)
    print(text)
    print(f"written: {arguments.out / 'scoreboard.svg'}, .md, .json")
    own: dict[str, Any] = next(
        (one["rows"] for one in record["attentions"] if one["name"] == OURS.name), {}
    )
    if any(row["status"] in (BROKEN, RAISED) for row in own.values()):
        status = status or BROKEN_PROMISE
    return status


def _fill(
    record: dict[str, Any], attentions: Any, sizes: Any, arguments: argparse.Namespace
) -> None:
    """Runs all rows and times, and writes the files after each."""
    from ..attentions.served import SUFFIX
    from ..bench.measure import measure
    from ..bench.problem import Shape
    from .trial import try_all

    board = {one["name"]: one for one in record["attentions"]}
    for name, row, result in try_all(attentions, sizes, arguments.seconds, arguments.jobs):
        board[name]["rows"][row] = result
        print(f"{board[name]['title']}: {row}", file=sys.stderr)
        _write(arguments.out, record)
    # The CPU runs the reference, whose times mean nothing. "-served" copies keys into pages first.
    timed = [one for one in attentions if not one.name.endswith(SUFFIX)]
    for shape in (Shape("forward", 4, 4096, 32, 8, 128, True), Shape("decode", 8, 4096, 32, 8, 128),
                  Shape("backward", 4, 4096, 16, 16, 128, True)):  # fmt: skip
        if arguments.device == "cuda":
            record["times"].append(measure(shape, "cuda", timed, 20))
            _write(arguments.out, record)
    record["complete"] = True


def _write(folder: Path, record: dict[str, Any], *, draw: bool = False) -> str:
    from ..shared.document import markdown
    from ..shared.files import finite, json_text, write_files
    from .report import document, picture

    record = finite(record)
    text = markdown(document(record), folder)
    files = {"json": json_text(record), "md": text}
    if draw:
        files["svg"] = picture(record)
    write_files(folder, {f"scoreboard.{kind}": content for kind, content in files.items()})
    return text
