"""The command `bench`: times attentions in turns."""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from ..cli import STATUSES, check_device, ended
from ..shared.commands import INTERRUPTED, add_options

KINDS = ("forward", "decode", "backward", "step")


def add_command(commands: Any) -> None:
    """Adds the command to a program's subparsers."""
    parser = commands.add_parser(
        "bench",
        help="time attention implementations on this machine",
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, "bench", "STUDY.json, .md and .svg", "the installed wheel, to name it")
    parser.add_argument(
        "--study", default="", metavar="NAME", help="which shapes (default: the usual); list: names"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="what to time (default: all)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="WORDS",
        help="parts of names or groups of shapes",
    )
    parser.add_argument(
        "--attentions", "--peers", nargs="+", metavar="NAME", default=[],
        help="which to time besides ours, also MODULE:FUNCTION (default: those of the study)",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=int, default=20, metavar="N", help="timed calls, 2 or more (default: 20)"
    )
    parser.add_argument(
        "--budget-ms", type=float, default=math.inf, metavar="MS",
        help="GPU time of one shape, which may cost repeats (default: no limit)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=math.inf, metavar="S", help="no shape starts later"
    )
    paths = {
        "fa3": "fa3.so, FlashAttention-3's library",
        "fa4": "the package flash-attn-4 and what it needs",
        "baseline": "libfa2_baseline.so, FlashAttention-2's kernels",
    }
    for name, words in paths.items():
        words = f"folder or file of {words}"
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=words)
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
    for path in ("fa3", "fa4", "baseline"):
        _find(path, getattr(arguments, path))
    attentions, floor = _attentions(arguments, study)
    check_device(arguments.device)

    from ..shared.provenance import provenance
    from .measure import measure, summarise
    from .report import text, write

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
        for case in study.cases:
            shape, group = case.shape, case.group
            if shape.kind not in arguments.kinds or not any(
                words in shape.name or words == group for words in arguments.only
            ):
                continue
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
    write(arguments.out, record)
    print(text(record))
    first = attentions[0].name
    return status or int(any(first in case["failed"] for case in record["cases"]))


def _find(name: str, path: Path | None) -> None:
    """Puts a path of the command line where its attention is looked for."""
    from ..attentions import fa3, others
    from ..errors import ArgumentError

    if path is None:
        return
    if not path.exists():
        raise ArgumentError(f"--{name}: expected a file or folder, got {path}")
    path = path.resolve()
    if name == "fa4":
        sys.path[:0] = [str(path), str(path / "nvidia_cutlass_dsl" / "dsl_packages")]
        # The package reads them when it is imported.
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(path / "cache"))
        return
    variable = fa3.VARIABLE if name == "fa3" else others.BASELINE
    os.environ[variable] = str(path / "fa3.so" if name == "fa3" and path.is_dir() else path)


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
