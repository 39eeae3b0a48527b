"""Times what a process pays once: the import, and the first call of a kernel.

Each repeat is a fresh process. The first call is timed with torch's CUDA context made and a torch
kernel run; a second call with the same arguments says how much of it comes back.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from flash_attn_deterministic.verify.speed.measure import summary

from tests.benchmarks.shared.record import environment, write_json
from tests.benchmarks.shared.run import fail, file_parser

_PROCESS = """
import json, sys, time
import torch

begin = time.perf_counter()
import flash_attn_deterministic

times = {"import_ms": (time.perf_counter() - begin) * 1e3}
if torch.cuda.is_available():
    head_dim, dtype, causal = int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3] == "causal"
    q, k, v = torch.randn(3, 1, 512, 8, head_dim, device="cuda", dtype=dtype)
    (q.sum() + k.sum()).item()
    for name in ("first_call_ms", "second_call_ms"):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        flash_attn_deterministic.flash_attn_func(q, k, v, causal=causal)
        torch.cuda.synchronize()
        times[name] = (time.perf_counter() - begin) * 1e3
print(json.dumps(times))
"""


def main() -> int:
    """Command line; the exit status is 1 if a process failed."""
    parser = file_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--causal", action="store_true")
    options = parser.parse_args()

    record: dict[str, Any] = {
        **environment(options.wheel, sys.argv),
        "repeats": options.repeats,
        "call": {name: getattr(options, name) for name in ("head_dim", "dtype", "causal")},
        "times": {},
        "failed": [],
    }
    call = [str(options.head_dim), options.dtype, "causal" if options.causal else "full"]
    times: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        try:
            command = [sys.executable, "-c", _PROCESS, *call]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                times.setdefault(name, []).append(value)
        except subprocess.CalledProcessError as error:
            print(error.stderr, file=sys.stderr)
            record["failed"].append(fail(error))
        except (subprocess.TimeoutExpired, OSError) as error:
            record["failed"].append(fail(error))
        record["times"] = {name: summary(own) for name, own in times.items() if len(own) > 1}
        write_json(options.out, record)
    print(record["times"])
    return 1 if record["failed"] or not record["times"] else 0


if __name__ == "__main__":
    sys.exit(main())
