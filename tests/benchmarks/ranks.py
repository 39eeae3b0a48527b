"""Times attention over several GPUs: against one of them, and against torch's context parallel.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        -m tests.benchmarks.ranks --out docs/results/ranks.json

Causal, zigzag order, bfloat16. Every case is timed in one process group, sides in turns: ours over
all ranks, ours on one GPU (where the memory suffices), and F.scaled_dot_product_attention within
torch's context_parallel. A time is the largest over the ranks of each rank's median. Written beside
them: memory at its peak, and what the model of `ranks_model` says.

What has to hold for forward + backward of B1 L65,536 H32/8 D128 on two GPUs: at least 85 % parallel
efficiency ("one_over_ours"), and at most 1.10 times the time of torch's context parallel.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from flash_attn_deterministic import distributed, flash_attn_func
from flash_attn_deterministic.distributed.slices import carries
from torch.distributed.device_mesh import init_device_mesh

from tests.benchmarks import ranks_model
from tests.benchmarks.common import environment, write_json
from tests.benchmarks.ranks_model import NVLINK, Shape

LENGTHS = (65_536, 262_144, 1_048_576)
ONE_GPU_UP_TO = 262_144
Run = Callable[[], None]


def main(argv: list[str] | None = None) -> int:
    """Runs all cases; rank 0 writes after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--wheel", type=Path)
    arguments = parser.parse_args(argv)
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    try:
        record: dict[str, Any] = {
            **environment(arguments.wheel, sys.argv[1:]),
            "ranks": dist.get_world_size(),
            "chain": carries(torch.device("cuda")),
            "cases": [],
        }
        for seqlen in arguments.lengths:
            record["cases"].append(measure(Shape(seqlen), arguments.repeats))
            if dist.get_rank() == 0:
                write_json(arguments.out, record)
                print(record["cases"][-1])
    finally:
        dist.destroy_process_group()
    return 0


def measure(shape: Shape, repeats: int) -> dict[str, Any]:
    """Measures a case, in seconds and bytes."""
    ranks = dist.get_world_size()
    sides = {"ours": over_ranks(shape), "context_parallel": in_context_parallel(shape)}
    if shape.seqlen <= ONE_GPU_UP_TO:
        sides["one"] = on_one(shape)
    found: dict[str, Any] = {"shape": vars(shape) | {}, "times": {}, "peak": {}}
    for name, side in sides.items():
        try:
            found["times"][name], found["peak"][name] = timed(side, repeats)
        except torch.cuda.OutOfMemoryError as error:
            found["times"][name] = str(error).splitlines()[0]
    found["model"] = {
        "forward": ranks_model.forward_seconds(shape, ranks, NVLINK),
        "gathered": ranks_model.gathered_seconds(shape, ranks, NVLINK),
        "chain": ranks_model.chain_seconds(shape, ranks, NVLINK),
        "memory": {c: ranks_model.memory(shape, ranks, 1, c == "chain") for c in CHAINS},
    }
    times = found["times"]
    if isinstance(times["ours"], dict):
        for name, factor in (("one", ranks), ("context_parallel", 1)):
            other = times.get(name)
            if isinstance(other, dict):
                found[f"{name}_over_ours"] = {
                    part: other[part] / factor / times["ours"][part] for part in other
                }
    return found


CHAINS = ("gathered", "chain")


def timed(side: Callable[[], tuple[Run, Run]], repeats: int) -> tuple[dict[str, float], int]:
    """Returns seconds of forward, and of both directions, and the bytes at the peak."""
    torch.cuda.reset_peak_memory_stats()
    forward, both = side()
    before = torch.cuda.memory_allocated()
    result = {name: _median(run, repeats) for name, run in (("forward", forward), ("both", both))}
    return result, torch.cuda.max_memory_allocated() - before


def _median(run: Run, repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 2):
        dist.barrier()
        begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    longest = torch.tensor([statistics.median(seconds[2:])], device="cuda")
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def _draw(shape: Shape, seqlen: int) -> list[torch.Tensor]:
    heads = (shape.nheads, shape.nheads_k, shape.nheads_k, shape.nheads)
    return [
        torch.randn(shape.batch, seqlen, h, shape.head_dim, device="cuda", dtype=torch.bfloat16)
        for h in heads
    ]


def _directions(
    attend: Callable[..., torch.Tensor],
    tensors: list[torch.Tensor],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Run, Run]:
    *inputs, dout = tensors
    leaves = [tensor.requires_grad_() for tensor in inputs]

    def forward() -> None:
        with context(), torch.no_grad():
            attend(*leaves)

    def both() -> None:
        with context():
            torch.autograd.grad(attend(*leaves), leaves, dout)

    return forward, both


def over_ranks(shape: Shape) -> Callable[[], tuple[Run, Run]]:
    """Ours, over all ranks."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = distributed.flash_attn_func(q, k, v, causal=True, order="zigzag")
        return out

    return lambda: _directions(attend, _draw(shape, shape.seqlen // dist.get_world_size()))


def on_one(shape: Shape) -> Callable[[], tuple[Run, Run]]:
    """Ours, on one GPU: every rank does the same."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=True)

    return lambda: _directions(attend, _draw(shape, shape.seqlen))


def in_context_parallel(shape: Shape) -> Callable[[], tuple[Run, Run]]:
    """torch's ring attention, which the context puts in place of SDPA; sequences cut beforehand."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    group = shape.nheads // shape.nheads_k

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # It takes as many KV heads as query heads.
        k, v = (tensor.repeat_interleave(group, 2).transpose(1, 2) for tensor in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, is_causal=True
        )
        return out.transpose(1, 2)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        # The tensors are parts already; what is cut here only opens the context.
        unused = torch.empty(2 * dist.get_world_size(), device="cuda")
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0]),
        ):
            yield

    own = shape.seqlen // dist.get_world_size()
    return lambda: _directions(attend, _draw(shape, own), context)


if __name__ == "__main__":
    sys.exit(main())
