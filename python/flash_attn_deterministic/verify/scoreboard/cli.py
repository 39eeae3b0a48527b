"""The command `flash-attn-deterministic verify --attention`."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from typing import Any


def run(arguments: argparse.Namespace) -> int:
    """Runs all rows on the named attention and on ours, and prints the table.

    The files are written after each attention and each problem that is timed, so that a run that is
    cut off leaves what it had found.

    Returns:
        0; Exit.CONTRACT if ours breaks a row; Exit.INTERRUPTED after Ctrl-C or SIGTERM.

    Raises:
        ArgumentError: there is no such attention, or the number of seconds is negative or NaN.
        ReportError: the files cannot be written.
    """
    import torch

    from ...errors import ArgumentError
    from ..ending import sigterm_interrupts
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
    record: dict[str, Any] = {
        "schema_version": 1,
        "complete": False,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": device,
        "device_name": torch.cuda.get_device_name() if cuda else "CPU, the reference path",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "quick": arguments.quick,
        "rows": [{"id": r.id, "promise": r.promise, "source": r.source} for r in ROWS],
        "attentions": [],
        "unavailable": unavailable,
        "times": {},
    }

    def write() -> None:
        texts = {
            "scoreboard.json": json.dumps(record, indent=2) + "\n",
            "scoreboard.md": markdown(record),
            "scoreboard.svg": svg(record),
        }
        write_files(arguments.out, texts)

    write()  # a folder that cannot be written ends the command before the rows run
    with sigterm_interrupts():
        try:
            for attention in attentions:
                one = {name: getattr(attention, name) for name in ("name", "setting", "version")}

                def show(row: str, one: dict[str, Any] = one) -> None:
                    print(f"{title(one)}: {row}", file=sys.stderr)

                rows = try_rows(attention, attentions[0].attend, sizes, arguments.seconds, show)
                record["attentions"].append({**one, "rows": rows})
                write()
            # The CPU runs the reference, whose times mean nothing.
            for name, times in measure(attentions) if cuda else ():
                record["times"][name] = times
                write()
            record["complete"] = True
            write()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
    print(markdown(record))
    print(f"written: {arguments.out / 'scoreboard.svg'}, .md, .json")
    if not record["complete"]:
        return int(Exit.INTERRUPTED)
    own = record["attentions"][0]["rows"].values()
    return int(Exit.CONTRACT if any(r["status"] in (BROKEN, RAISED) for r in own) else Exit.PASSED)
