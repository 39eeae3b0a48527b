"""The command `flash-attn-deterministic verify --attention`."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from typing import Any


def run(arguments: argparse.Namespace) -> int:
    """Runs all rows on the named attention and on ours, prints the table, and writes the files.

    Returns:
        0; Exit.CONTRACT if ours breaks a row.

    Raises:
        ArgumentError: there is no such attention, or the number of seconds is negative or NaN.
        ReportError: the files cannot be written.
    """
    import torch

    from ...errors import ArgumentError
    from ..outcome import Exit
    from ..report import write_files
    from .attention import UnavailableError, find, ours
    from .drawing import markdown, svg, title
    from .rows import CPU, CUDA, QUICK_CUDA, ROWS
    from .times import measure
    from .trial import BROKEN, RAISED, try_rows

    if not arguments.seconds >= 0:
        raise ArgumentError(f"--seconds: expected 0 or more, got {arguments.seconds}")
    device = arguments.device
    cuda = device == "cuda"
    sizes = CPU if device == "cpu" else QUICK_CUDA if arguments.quick else CUDA
    attentions, unavailable = [ours()], {}
    for name in dict.fromkeys(part.strip() for part in arguments.attention.split(",")):
        try:
            attentions += find(name, device)
        except UnavailableError as error:
            unavailable[name] = str(error)
    tried: list[dict[str, Any]] = []
    for attention in attentions:
        one = {name: getattr(attention, name) for name in ("name", "setting", "version")}

        def show(row: str, one: dict[str, Any] = one) -> None:
            print(f"{title(one)}: {row}", file=sys.stderr)

        rows = try_rows(attention, attentions[0].attend, sizes, arguments.seconds, show)
        tried.append({**one, "rows": rows})
    record = {
        "schema_version": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": device,
        "device_name": torch.cuda.get_device_name() if cuda else "CPU, the reference path",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "quick": arguments.quick,
        "rows": [{"id": r.id, "promise": r.promise, "source": r.source} for r in ROWS],
        "attentions": tried,
        "unavailable": unavailable,
        # The CPU runs the reference, whose times mean nothing.
        "times": measure(attentions) if cuda else {},
    }
    texts = {
        "scoreboard.json": json.dumps(record, indent=2) + "\n",
        "scoreboard.md": markdown(record),
        "scoreboard.svg": svg(record),
    }
    write_files(arguments.out, texts)
    print(texts["scoreboard.md"])
    print(f"written: {arguments.out / 'scoreboard.svg'}, .md, .json")
    broken = [r for r in tried[0]["rows"].values() if r["status"] in (BROKEN, RAISED)]
    return int(Exit.CONTRACT if broken else Exit.PASSED)
