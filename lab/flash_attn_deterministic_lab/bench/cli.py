"""The command `bench`: times attentions in turns."""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from typing import Any

from ..cli import STATUSES, add_paths, check_device, ended, option, use_paths
from ..shared.commands import INTERRUPTED, add_options


def add_command(commands: Any) -> None:
    """Adds the command to a program's subparsers."""
    parser = commands.add_parser(
        "bench",
        help="time attention implementations on this machine",
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, "bench", "STUDY.json and .md", "the installed wheel, to name it")
    option(parser, "--study", "", "which shapes, the usual if none; list: names", metavar="NAME")
    option(parser, "--only", None, "parts of names of shapes, such as forward or D128, or groups",
           type=str, nargs="+", metavar="WORDS")  # fmt: skip
    option(parser, "--attentions", None,
           "which to time besides ours, also MODULE:FUNCTION; those of the study if none",
           type=str, nargs="+", metavar="NAME")  # fmt: skip
    option(parser, "--repeats", 20, "timed calls, 2 or more", metavar="N")
    option(parser, "--budget-ms", math.inf, "GPU time of one shape, which may cost repeats",
           metavar="MS")  # fmt: skip
    option(parser, "--seconds", math.inf, "no shape starts later", metavar="S")
    option(parser, "--ahead", 0,
           "time nothing: N processes call the others once, which fills caches of compilers",
           metavar="N")  # fmt: skip
    add_paths(parser)
    parser.set_defaults(run=functools.partial(ended, _bench))


def _bench(arguments: argparse.Namespace) -> int:
    from ..errors import ArgumentError
    from .cases import STUDIES

    if arguments.study == "list":
        for name, study in STUDIES.items():
            print(f"{name}: {study.words}, {len(study.cases)} shapes")
        return 0
    # The command line is checked first: the rest takes time, or needs a GPU.
    if arguments.repeats < 2:
        raise ArgumentError(f"--repeats: expected 2 or more, got {arguments.repeats}")
    name = arguments.study or ("usual" if arguments.device == "cuda" else "cpu")
    if name not in STUDIES:
        raise ArgumentError(f"--study: expected one of {', '.join(STUDIES)}, got {name!r}")
    study = STUDIES[name]
    use_paths(arguments)
    attentions, floor = _attentions(arguments, study)
    check_device(arguments.device)
    chosen = [
        case for case in study.cases
        if any(words in case.shape.name or words == case.group for words in arguments.only or [""])
    ]  # fmt: skip
    if arguments.ahead:
        from .ahead import call_each

        # Ours comes first, and is compiled.
        names = [one.name for one in attentions[1:] or attentions]
        shapes = [case.shape for case in chosen]
        return call_each(shapes, arguments.device, names, arguments.ahead, arguments.seconds)

    from ..shared.provenance import provenance
    from .measure import measure, summarise
    from .report import write

    versions = {one.name: one.version for one in attentions}
    command = ["flash-attn-deterministic", *sys.argv[1:]]
    record: dict[str, Any] = {
        "schema": "bench/2",
        "study": name,
        "complete": False,
        **provenance(command, arguments.device, arguments.wheel, **versions),
        "titles": {one.name: one.title for one in attentions},
        "summary": {},
        "left_out": [],
        "cases": [],
    }
    end, status = time.monotonic() + arguments.seconds, 0
    write(arguments.out, record)
    try:
        for case in chosen:
            shape, group = case.shape, case.group
            if time.monotonic() > end:
                record["left_out"].append(shape.name)
                continue
            print(shape.name, file=sys.stderr, flush=True)
            found = measure(
                shape, arguments.device, attentions, arguments.repeats, arguments.budget_ms, floor
            )
            record["cases"].append({"group": group, **found})
            record["summary"] = summarise(record["cases"], study)
            write(arguments.out, record)
        record["complete"] = not record["left_out"]
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    print(write(arguments.out, record))
    first = attentions[0].name
    return status or int(any(first in case["failed"] for case in record["cases"]))


def _attentions(arguments: argparse.Namespace, study: Any) -> tuple[list[Any], bool]:
    """Returns ours, then those of --attentions, of the study, or all; and whether to time a floor.

    Where ours is not installed, the first of the others takes its place.
    """
    from ..attentions import ATTENTIONS, find_attention
    from ..errors import UnavailableError
    from .measure import READ

    names = list(arguments.attentions or study.attentions)
    if not names:
        names = [
            n for n, one in ATTENTIONS.items() if one.bench and arguments.device in one.devices
        ]
    found = [find_attention(name, "--attentions") for name in ("ours", *names) if name != READ]
    found = list({one.name: one for one in found}.values())
    try:
        _ = found[0].function
    except UnavailableError as error:
        print(f"{error}; times are over those of {found[1].name}", file=sys.stderr)
        found = found[1:]
    return found, READ in names
