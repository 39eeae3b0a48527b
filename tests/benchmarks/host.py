"""Times what a call takes on the host, and what a process pays once: import and first call.

Eager calls are so small that the GPU waits for the host. Beside the package's functions stands its
bare op (what the functions add to it is Python), and torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import argparse
import compileall
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flash_attn_deterministic
import torch
from flash_attn_deterministic import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn_deterministic.verify.shared.files import json_text, write_files
from flash_attn_deterministic.verify.shared.provenance import provenance
from flash_attn_deterministic.verify.shared.timing import summary
from torch.utils.benchmark import Timer

_CALLS = 100  # of a measurement: few enough that the queue of the GPU never fills
_PROCESS = """
import json, time
import torch
begin = time.perf_counter()
import flash_attn_deterministic
times = {"import_ms": (time.perf_counter() - begin) * 1e3}
q, k, v = torch.randn(3, 1, 512, 8, 64, device="cuda", dtype=torch.bfloat16)
(q.sum() + k.sum()).item()
for name in ("first_call_ms", "second_call_ms"):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    flash_attn_deterministic.flash_attn_func(q, k, v)
    torch.cuda.synchronize()
    times[name] = (time.perf_counter() - begin) * 1e3
print(json.dumps(times))
"""


def calls() -> dict[str, Callable[[], object]]:
    """Returns calls by name: functions, the op and torch's, forward alone and with backward."""
    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v, dout = (torch.randn(1, 64, 4, 64, **bf16) for _ in range(4))
    leaves = (q.clone(), k.clone(), v.clone())
    for leaf in leaves:
        leaf.requires_grad_()
    turned = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    turned_leaves = [t.clone().requires_grad_() for t in turned]
    starts = torch.tensor([0, 64], device="cuda", dtype=torch.int32)
    lengths = torch.tensor([64], device="cuda", dtype=torch.int32)
    one, dout_t = q[:, :1].contiguous(), dout.transpose(1, 2).contiguous()
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    rows = (q[0], k[0], v[0], starts, starts, 64, 64)

    def op() -> object:
        # Without autograd's kernel of the op, a function of Python that the functions go around.
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.flash_attn_deterministic.fwd(
                q, k, v, None, None, 0.0, 0.125, -1, 0, 0.0, 2048, True, True
            )

    return {
        "dense": lambda: flash_attn_func(q, k, v, causal=True),
        "packed": lambda: flash_attn_varlen_func(*rows, causal=True),
        "cache": lambda: flash_attn_with_kvcache(one, k, v, cache_seqlens=lengths, causal=True),
        "op dense": op,
        "forward and backward": lambda: torch.autograd.grad(
            flash_attn_func(*leaves, causal=True), leaves, dout
        ),
        "sdpa": lambda: sdpa(*turned, is_causal=True),
        "sdpa forward and backward": lambda: torch.autograd.grad(
            sdpa(*turned_leaves, is_causal=True), turned_leaves, dout_t
        ),
    }


def microseconds(loops: int) -> dict[str, dict[str, float]]:
    """Returns `summary` of the microseconds of each call, which are timed in turns."""
    timers = {
        name: Timer("call()", globals={"call": call}, setup="call()")
        for name, call in calls().items()
    }
    found: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(loops):
        for name, timer in timers.items():
            found[name].append(timer.timeit(_CALLS).mean * 1e6)
    return {name: summary(values) for name, values in found.items()}


def starts(repeats: int) -> dict[str, dict[str, float]]:
    """Returns `summary` of milliseconds of import, first and second call, in fresh processes."""
    # As installers do: a process that has to compile the sources imports them in twice the time.
    compileall.compile_dir(Path(flash_attn_deterministic.__file__).parent, quiet=2)
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        command = [sys.executable, "-c", _PROCESS]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        for name, value in json.loads(done.stdout.splitlines()[-1]).items():
            found.setdefault(name, []).append(value)
    return {name: summary(values) for name, values in found.items()}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--wheel", type=Path, help="the installed wheel's file")
    parser.add_argument("--loops", type=int, default=40)
    options = parser.parse_args()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        found = microseconds(options.loops)
    for name, one in found.items():
        print(f"{name:28} {one['median']:8.2f} us, p10 {one['p10']:8.2f}", flush=True)
    command = ["python", "-m", "tests.benchmarks.host", *sys.argv[1:]]
    record: dict[str, Any] = {"schema": "host/1", **provenance(command, "cuda", options.wheel)}
    record["us"] = found
    write_files(options.out.parent, {options.out.name: json_text(record)})
    record["start"] = starts(3)  # takes most of the time
    write_files(options.out.parent, {options.out.name: json_text(record)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
