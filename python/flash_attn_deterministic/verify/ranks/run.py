"""What torchrun starts for `verify --ranks`: one rank."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...errors import FlashAttnError
from .. import installed
from ..outcome import FAILED, INCOMPLETE, PASSED, Exit
from ..shared.document import table
from ..shared.files import write_files
from ..tasks import holds
from .cases import Case, cases_of, counts_of, scale_of
from .trial import TIMEOUT, group_of, try_case

PROMISE = "One device, or sequences and heads cut over P ranks: forward and backward"


def main(device: str, quick: bool, out: Path, wheel: installed.Wheel | None) -> int:
    """Runs all cases as one of torchrun's ranks; returns a status of `Exit`, the same on all."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"timeout": TIMEOUT}
    if device == "cuda":
        own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(own)
        options["device_id"] = own
    dist.init_process_group("gloo" if device == "cpu" else "nccl", **options)
    status = run(device, quick, out, wheel)
    # Not after an error: NCCL would wait here for the other ranks, and the error would be printed
    # only after their timeout.
    dist.destroy_process_group()
    return status


def run(device: str, quick: bool, out: Path, wheel: installed.Wheel | None = None) -> int:
    """Runs all cases on the ranks of the world; rank 0 prints, and writes ranks.json and ranks.md.

    Both are written before the first case and after each number of ranks, so that a run that ends
    early leaves "incomplete", and not the result of another run. Returns the exit status, on every
    rank the same.
    """
    begin, size, first = time.monotonic(), dist.get_world_size(), dist.get_rank() == 0
    rows: list[dict[str, Any]] = []
    record: dict[str, Any] = {
        "schema_version": 1,
        "id": "ranks",
        "promise": PROMISE,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "wheel": None if wheel is None else wheel.record(),
        "quick": quick,
        "status": INCOMPLETE,
        "seconds": 0.0,
        "counts": counts_of(size),
        "rows": rows,
    }

    def write() -> None:
        record["seconds"] = round(time.monotonic() - begin, 1)
        texts = {"ranks.json": json.dumps(record, indent=2) + "\n", "ranks.md": _table(record)}
        write_files(out, texts)

    if first:
        write()
    for ranks in record["counts"]:
        row: dict[str, Any] = {"ranks": ranks, "cases": 0, "failed": 0, "counter_example": None}
        began = time.monotonic()
        for case in cases_of(ranks, scale_of(device, quick), holds(device)):
            if first and sys.stderr.isatty():
                print(f"\r{case.name:<100.100}", end="", file=sys.stderr, flush=True)
            found = outcome_of(case, device)
            row["cases"] += 1
            row["failed"] += bool(found)
            if found and row["counter_example"] is None:
                row["counter_example"] = {"case": case.name, "seed": case.seed, "ranks": found}
        row["seconds"] = round(time.monotonic() - began, 1)
        rows.append(row)
        if first:
            verdict = "passed" if not row["failed"] else f"{row['failed']} failed"
            print(f"\rranks: {ranks} against one device: {row['cases']} cases, {verdict}")
            write()
    failed = any(row["failed"] or not row["cases"] for row in rows)
    if first:
        record["status"] = FAILED if failed else PASSED
        write()
        print(f"{record['status']}: {out / 'ranks.json'}")
    return int(Exit.CONTRACT if failed else Exit.PASSED)


def outcome_of(case: Case, device: str) -> dict[str, Any]:
    """Runs a case; returns, on every rank, the differences or errors of each rank that has any."""
    # All ranks must take part in making groups, so this comes before anything that may fail.
    group_of(case.ranks)
    try:
        own: Any = try_case(case, device)
    except FlashAttnError as error:
        own = {"error": f"{type(error).__name__}: {error}"[:1000]}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {str(rank): found for rank, found in enumerate(every) if found}


def _table(record: dict[str, Any]) -> str:
    title = f"{PROMISE}: {record['status']} ({record['device']}, torch {record['torch']})."
    header = ("ranks", "cases", "failed", "seconds")
    rows = [tuple(str(row[name]) for name in header) for row in record["rows"]]
    rows += [(str(count), "not run", "", "") for count in record["counts"][len(rows) :]]
    return f"{title}\n\n{table(header, rows)}\n"
