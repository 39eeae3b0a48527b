"""One of torchrun's ranks: calls on several streams, without waits of the host between them.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.gpu.ranks.streams cuda

Messages of some calls are in flight while others compute, and memory that one call gives back is
taken by the next: a message that is sent or read too early shows as another bit. Prints "same bits"
on rank 0.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from flash_attn_deterministic import distributed, flash_attn_varlen_func

# Lengths of packed sequences, order, KV heads of 8, ulysses_degree. The second sequence of the
# third lies on the last rank alone, so that some messages are empty. Every other call has sinks.
CALLS: tuple[tuple[tuple[int, ...], str, int, int | None], ...] = (
    ((16384,), "zigzag", 2, 1),
    ((16384,), "zigzag", 2, 2),
    ((9000, 7384), "contiguous", 1, 1),
    ((4096, 509, 11776), "zigzag", 4, None),
)
ROUNDS = 6


def main(device: str) -> bool:
    """Returns whether all bits on all ranks are those of one device."""
    rounds, scale = (ROUNDS, 1) if device == "cuda" else (1, 64)
    cuda: Any = torch.cuda
    whole: Any = flash_attn_varlen_func
    over: Any = distributed.flash_attn_varlen_func
    calls = []
    for number, (lengths, order, nheads_k, degree) in enumerate(CALLS):
        starts = [0, *itertools.accumulate(length // scale for length in lengths)]
        cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
        generator = torch.Generator().manual_seed(number)
        tensors = [
            torch.randn((starts[-1], heads, 64), generator=generator).to(device, torch.bfloat16)
            for heads in (8, nheads_k, nheads_k, 8)
        ]
        args = cu_seqlens, cu_seqlens, starts[-1], starts[-1]
        sink = torch.linspace(-1, 2, 8, device=device) if number % 2 else None
        cut: dict[str, Any] = {"order": order, "cu_seqlens": cu_seqlens}
        expected = [
            distributed.shard(one, 0, **cut)
            for one in _both(whole, tensors, args, learnable_sink=sink)
        ]
        parts = [distributed.shard(one, 0, **cut) for one in tensors]
        options = {"order": order, "ulysses_degree": degree, "learnable_sink": sink}
        calls.append((parts, args, options, expected))
    streams: list[Any] = [contextlib.nullcontext()] * 3
    if device == "cuda":
        cuda.synchronize()
        streams = [cuda.stream(cuda.Stream()) for _ in range(3)]
    found = []
    # The streams of a call change from round to round.
    for number, (call, stream) in enumerate(
        zip(itertools.chain(*[calls] * rounds), itertools.cycle(streams))
    ):
        parts, args, options, expected = call
        with stream:
            # On one rank the GPU is late.
            if device == "cuda" and dist.get_rank() == number % dist.get_world_size():
                cuda._sleep(2_000_000)
            results = _both(over, parts, args, **options)
            pairs = zip(results, expected, strict=True)
            found.append(
                torch.stack([(a.view(torch.int16) != b.view(torch.int16)).sum() for a, b in pairs])
            )
            del results
    if device == "cuda":
        cuda.synchronize()
    differing = torch.stack(found).sum()
    dist.all_reduce(differing)
    return int(differing) == 0


def _both(
    function: Any, tensors: list[torch.Tensor], args: tuple[Any, ...], **options: Any
) -> list[torch.Tensor]:
    """Returns out, dq, dk and dv."""
    *leaves, dout = tensors
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = function(*leaves, *args, causal=True, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


if __name__ == "__main__":
    name = sys.argv[1]
    if name == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if name == "cuda" else "gloo")
    good = main(name)
    if dist.get_rank() == 0:
        print("same bits" if good else "other bits")
    dist.destroy_process_group()
    sys.exit(0 if good else 1)
