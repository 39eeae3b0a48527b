"""The command `flash-attn-deterministic verify --attention`."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from ..ending import sigterm_interrupts
from ..installed import Wheel

SECONDS = 60.0  # for the rows of one attention, unless --seconds says otherwise


def run(arguments: argparse.Namespace, wheel: Wheel | None = None) -> int:
    """Runs all rows on the named attention and on ours, prints the table, and writes the files.

    The files are written before the first row and after each: a run that is interrupted leaves what
    it has found, and is marked as incomplete.

    Args:
        arguments: `attention`, `device`, `out`, `quick`, `seconds`.
        wheel: that of the installed files, to be named in the files.

    Returns:
        0; Exit.CONTRACT if ours breaks a row; Exit.INTERRUPTED.

    Raises:
        ArgumentError: there is no such attention, or the number of seconds is negative or NaN.
        ReportError: the files cannot be written.
    """
    import torch

    from ... import deterministic_mode
    from ...errors import ArgumentError
    from ...mode.current import DEFAULT_SPLIT_SIZE
    from ..outcome import Exit
    from .attention import UnavailableError, find, ours
    from .drawing import markdown
    from .rows import CPU, CUDA, QUICK_CUDA, ROWS
    from .trial import BROKEN, RAISED, not_run

    seconds = SECONDS if arguments.seconds is None else arguments.seconds
    if not seconds >= 0:
        raise ArgumentError(f"--seconds: expected 0 or more, got {seconds}")
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
        "wheel": None if wheel is None else wheel.record(),
        "quick": arguments.quick,
        "rows": [{"id": r.id, "promise": r.promise, "source": r.source} for r in ROWS],
        "attentions": [
            {"name": a.name, "setting": a.setting, "version": a.version, "rows": not_run()}
            for a in attentions
        ],
        "unavailable": unavailable,
        "times": {},
    }
    _write(arguments.out, record)
    status = Exit.PASSED
    # Ours has its default mode, whatever the environment variables say.
    mode = deterministic_mode(True, DEFAULT_SPLIT_SIZE, keep_residual=False)
    with sigterm_interrupts(), mode:
        try:
            _fill(record, attentions, sizes, seconds, arguments.out)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            status = Exit.INTERRUPTED
    _write(arguments.out, record)
    print(markdown(record))
    print(f"written: {arguments.out / 'scoreboard.svg'}, .md, .json")
    own = record["attentions"][0]["rows"].values()
    if any(row["status"] in (BROKEN, RAISED) for row in own):
        status = status or Exit.CONTRACT
    return int(status)


def _fill(record: dict[str, Any], attentions: Any, sizes: Any, seconds: float, out: Path) -> None:
    """Runs all rows and times, and writes the files after each."""
    from .drawing import title
    from .times import measure
    from .trial import try_rows

    for attention, one in zip(attentions, record["attentions"], strict=True):

        def show(row: str, one: dict[str, Any] = one) -> None:
            print(f"{title(one)}: {row}", file=sys.stderr)

        for row, result in try_rows(attention, attentions[0].attend, sizes, seconds, show):
            one["rows"][row] = result
            _write(out, record)
    # The CPU runs the reference, whose times mean nothing.
    for problem, times in measure(attentions) if record["device"] == "cuda" else ():
        record["times"][problem] = times
        _write(out, record)
    record["complete"] = True


def _write(out: Path, record: dict[str, Any]) -> None:
    from ..report import write_files
    from .drawing import markdown, svg

    texts = {
        "scoreboard.json": json.dumps(record, indent=2) + "\n",
        "scoreboard.md": markdown(record),
        "scoreboard.svg": svg(record),
    }
    write_files(out, texts)
