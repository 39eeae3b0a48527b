"""Backwards that would stop for good if one thread block could wait for another in a circle.

Run by test_backward_schedule.py in a process of its own, which it can end.
"""

from __future__ import annotations

import ctypes
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flash_attn_deterministic import flash_attn_func, flash_attn_varlen_func

from tests.gpu.nvcc import compiled, find_nvcc

Backward = Callable[[], tuple[torch.Tensor, ...]]

ALL = (-1, -1)
CAUSAL = (-1, 0)
OPS = torch.ops.flash_attn_deterministic


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def dense(
    batch: int,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    head_dim: int,
    window: tuple[int, int] = ALL,
) -> Backward:
    """Returns the backward of sequences with the same (seqlen_q, seqlen_k).

    The op is called past autograd, which would run it on the stream of the forward.
    """
    q = draw(batch, lengths[0], heads[0], head_dim)
    k, v = (draw(batch, lengths[1], heads[1], head_dim) for _ in range(2))
    out, lse, _ = flash_attn_func(q, k, v, window_size=window, return_attn_probs=True)
    dout = draw(*q.shape)
    scores = (0.0, head_dim**-0.5, *window, 0.0)
    return lambda: OPS.bwd(dout, q, k, v, out, lse, None, None, *scores, True)


def packed(
    lengths: list[int], heads: tuple[int, int], head_dim: int, window: tuple[int, int] = ALL
) -> Backward:
    """Returns the backward of packed sequences."""
    longest, total = max(lengths), sum(lengths)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda", dtype=torch.int32)
    q = draw(total, heads[0], head_dim)
    k, v = (draw(total, heads[1], head_dim) for _ in range(2))
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, starts, starts, longest, longest, window_size=window, return_attn_probs=True
    )
    dout = draw(*q.shape)
    scores = (0.0, head_dim**-0.5, *window, 0.0)
    fixed = (starts, starts, None, None, longest, longest, *scores, True)
    return lambda: OPS.varlen_bwd(dout, q, k, v, out, lse, *fixed)


def backwards() -> dict[str, Backward]:
    """Grids far larger than a GPU, row blocks with many turns, keys that few rows see."""
    short = [1 + i * 37 % 70 for i in range(5000)]
    return {
        "batch of 5000": dense(5000, (33, 33), (2, 1), 64, CAUSAL),
        "5000 short sequences": packed(short, (2, 1), 64, CAUSAL),
        "a long one last": packed([*short[:2000], 30_000], (4, 2), 128, CAUSAL),
        "a long one first": packed([30_000, *short[:2000]], (4, 1), 64),
        "one head, causal": dense(1, (40_000, 40_000), (1, 1), 128, CAUSAL),
        "one head": dense(1, (20_000, 20_000), (1, 1), 64),
        "window": dense(1, (60_000, 60_000), (4, 2), 128, (256, 0)),
        "window to the right": dense(2, (20_000, 20_000), (4, 1), 64, (-1, 100)),
        "window to the left": dense(2, (20_000, 20_000), (4, 4), 256, (300, -1)),
        "many rows": dense(2, (30_000, 100), (8, 1), 128),
        "many keys": dense(2, (100, 30_000), (8, 1), 128),
        "one row": dense(64, (1, 10_000), (32, 1), 128),
        "one key": dense(64, (2000, 1), (32, 1), 96),
        "one head of keys": dense(4, (2000, 2000), (64, 1), 192, CAUSAL),
        "rows without keys": dense(2, (20_000, 5000), (4, 2), 64, CAUSAL),
    }


def hold_all_sms_but_two() -> Callable[[], None] | None:
    """Returns a function that starts a kernel which holds them for 20 ms; None: no nvcc is here."""
    nvcc = find_nvcc()
    if nvcc is None:
        return None
    properties: Any = torch.cuda.get_device_properties()
    with tempfile.TemporaryDirectory() as folder:
        code = f"{properties.major}{properties.minor}"
        library = compiled(nvcc, Path(__file__).with_name("hold.cu"), Path(folder), code)
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    shared = properties.shared_memory_per_block_optin - 1024
    sms = properties.multi_processor_count - 2

    def hold() -> None:
        torch.cuda.synchronize()
        status = library.hold(
            sms, shared, ctypes.c_longlong(20_000_000), ctypes.c_void_p(beside.cuda_stream)
        )
        if status != 0:
            raise SystemExit(f"the kernel that holds SMs: CUDA error {status}")

    return hold


def main() -> None:
    """Runs them one by one, on few SMs, and on eight streams at once, and compares the bits."""
    torch.manual_seed(0)
    calls = backwards()
    torch.cuda.synchronize()
    expected = {}
    for name, call in calls.items():
        print(name, flush=True)
        expected[name] = call()
        torch.cuda.synchronize()
    found = []
    hold = hold_all_sms_but_two()
    if hold is not None:
        for name in expected:
            print(f"{name}, on two SMs", flush=True)
            hold()
            found.append((name, calls[name]()))
    torch.cuda.synchronize()
    print("all at once", flush=True)
    streams = [torch.cuda.Stream() for _ in range(8)]  # type: ignore[no-untyped-call, unused-ignore]
    for turn, name in enumerate([*calls, *reversed(calls)]):
        with torch.cuda.stream(streams[turn % len(streams)]):
            found.append((name, calls[name]()))
    torch.cuda.synchronize()
    for name, gradients in found:
        for one, wanted in zip(gradients, expected[name], strict=True):
            if not torch.equal(one.view(torch.int16), wanted.view(torch.int16)):
                raise SystemExit(f"{name}: other bits beside other kernels")
    print("done", flush=True)


if __name__ == "__main__":
    main()
