"""Plants each fault of `tests.planted_faults` on a GPU; the live checks must catch all of them.

    python -m tests.gpu.planted [--out planted.json]

Exit status: 1 if one was not caught, or not planted in time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from flash_attn_deterministic.verify.contract.sizes import Config

from tests.planted_faults import FAULTS, caught

CONFIGS: tuple[Config, ...] = ((64, "bf16"), (128, "bf16"), (128, "fp16"))


def main() -> int:
    """Prints a line for each fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON: which cases caught which fault")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, metavar="S", help="no fault is planted later"
    )
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    end = time.monotonic() + arguments.seconds
    found: dict[str, dict[str, dict[str, bool]]] = {}
    missed = 0
    for fault in FAULTS:
        if time.monotonic() > end:
            break
        configs = fault.configs if fault.configs != ((64, "bf16"),) else CONFIGS
        found[fault.name] = rows = {
            f"{head_dim} {dtype}": caught(fault, (head_dim, dtype), arguments.device)
            for head_dim, dtype in configs
        }
        cases = [ok for row in rows.values() for ok in row.values()]
        missed += not (cases and all(cases))
        print(f"{sum(cases)} of {len(cases)}  {fault.name}", flush=True)
        if arguments.out is not None:
            record = {"device": device, "faults": found}
            arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found) - missed} of {len(FAULTS)} faults were caught in every case")
    return int(len(found) - missed < len(FAULTS))


if __name__ == "__main__":
    sys.exit(main())
