"""Times attention over several GPUs beside one of them.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        -m tests.benchmarks.ranks --out docs/results/ranks.json

bfloat16. Ours over all ranks, as planned and with each way to divide heads, and on one GPU, one
after another in one process group. A time is the largest over the ranks of each rank's median.
Beside them: what the model of the planner says, the memory that a rank takes at its peak beyond
inputs, the host's time for a call, and whether all bits are those of one GPU.
The file is written after each time, what matters most first: "unfinished" is the case in work.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from flash_attn_deterministic import distributed, flash_attn_func
from flash_attn_deterministic.distributed.plan import Shape as PlanShape
from flash_attn_deterministic.distributed.plan import plan_of
from flash_attn_deterministic.verify.shared.files import json_text, write_files
from flash_attn_deterministic.verify.shared.provenance import provenance

Attend = Callable[..., torch.Tensor]
CUT: dict[str, Any] = {"order": "zigzag"}


@dataclass(frozen=True)
class Shape:
    """A causal call; seqlen is that of the whole sequence."""

    seqlen: int
    batch: int = 1
    nheads: int = 32
    nheads_k: int = 8
    head_dim: int = 128
    window: int = -1  # keys before its position that a row sees; -1: all


SHAPES = (
    *(Shape(65_536), Shape(32_768)),
    Shape(65_536, window=4096),
    Shape(65_536, nheads=16, nheads_k=16, head_dim=64),
    *(Shape(131_072), Shape(16_384)),
    Shape(131_072, window=4096),
    Shape(16_384, batch=8),
)


def main(argv: list[str] | None = None) -> int:
    """Runs all cases; rank 0 writes after each time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--wheel", type=Path, help="the installed wheel's file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    options: dict[str, Any] = {}
    if arguments.device == "cuda":
        options["device_id"] = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(options["device_id"])
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo", **options)
    try:
        record: dict[str, Any] = {
            "schema": "ranks/2",
            **provenance(
                ["python", "-m", "tests.benchmarks.ranks", *sys.argv[1:]],
                arguments.device,
                arguments.wheel,
            ),
            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
            "ranks": dist.get_world_size(),
            "cases": [],
            "unfinished": None,
        }

        def write(unfinished: dict[str, Any] | None) -> None:
            record["unfinished"] = unfinished
            if dist.get_rank() == 0:
                write_files(arguments.out.parent, {arguments.out.name: json_text(record)})

        for shape in SHAPES:
            case = Case(shape, arguments.device, arguments.repeats)
            record["cases"].append(case.measured(write))
            write(None)
            if dist.get_rank() == 0:
                print(record["cases"][-1], flush=True)
    finally:
        dist.destroy_process_group()
    return 0


class Case:
    """One shape.

    Args:
        shape: of the whole sequence.
        device: "cuda" or "cpu".
        repeats: of which the median counts.
    """

    def __init__(self, shape: Shape, device: str, repeats: int) -> None:
        self._shape, self._device, self._repeats = shape, device, repeats
        self._ranks = dist.get_world_size()

    def measured(
        self, write: Callable[[dict[str, Any]], None] = lambda found: None
    ) -> dict[str, Any]:
        """Returns seconds, bytes, and what follows of them; `write` gets them after each time."""
        found: dict[str, Any] = {
            "shape": asdict(self._shape), "seconds": {}, "peak_bytes": {}, "refused": {},
            "model": self._modelled(),
        }  # fmt: skip
        mask: dict[str, Any] = {"causal": True, "window_size": (self._shape.window, -1)}
        planned: Attend = functools.partial(distributed.flash_attn_func, **mask, **CUT)
        one: Any = functools.partial(flash_attn_func, **mask)
        sides: dict[str, Attend] = {"planned": planned, "one": one}
        for degree in range(1, self._ranks + 1):
            is_planned = degree == found["model"]["degree"]
            if not (is_planned or self._ranks % degree or self._shape.nheads_k % degree):
                sides[f"heads over {degree}"] = functools.partial(planned, ulysses_degree=degree)
        for name, attend in sides.items():
            try:
                times = self._timed(attend, is_cut=name != "one")
                found["seconds"][name], found["peak_bytes"][name] = times
            except torch.cuda.OutOfMemoryError as error:
                found["refused"][name] = f"{type(error).__name__}: {error}"[:300]
            write(found)
        seconds = found["seconds"]
        if "one" in seconds:
            found["efficiency"] = {
                part: seconds["one"][part] / self._ranks / seconds["planned"][part]
                for part in ("forward", "both")
            }
            found["same_bits"] = self._same_bits(planned, one)
        return found

    def _modelled(self) -> dict[str, Any]:
        """Returns what the planner chooses, and what it expects of each choice."""
        shape = self._shape
        starts = tuple(shape.seqlen * index for index in range(shape.batch + 1))
        tokens = starts[-1] // self._ranks
        plan = plan_of(
            PlanShape(
                *(starts, starts, True, tokens, tokens, self._ranks, CUT["order"]),
                *(shape.window, 0, 2048, 4096, shape.nheads, shape.nheads_k, shape.head_dim),
            ),
            0,
        )
        return {
            "degree": plan.degree,
            "moves": plan.moves,
            "heads": (plan.forward.heads, plan.backward.heads),
            "seconds": plan.seconds,
            "others": plan.others,
        }

    def _inputs(self, is_cut: bool) -> list[torch.Tensor]:
        """q, k, v and dout, the same numbers on all ranks: whole, or this rank's part."""
        shape = self._shape
        generator = torch.Generator(self._device).manual_seed(0)
        tensors = []
        for heads in (shape.nheads, shape.nheads_k, shape.nheads_k, shape.nheads):
            size = (shape.batch, shape.seqlen, heads, shape.head_dim)
            whole = torch.randn(
                size, generator=generator, device=self._device, dtype=torch.bfloat16
            )
            tensors.append(distributed.shard(whole, 1, **CUT) if is_cut else whole)
        return tensors

    def _timed(self, attend: Attend, is_cut: bool) -> tuple[dict[str, float], int]:
        """Returns seconds of the forward and of both directions, and the bytes at the peak.

        The bytes are those beyond q, k, v and dout: out, softmax_lse and the gradients are in them.
        """
        *leaves, dout = self._inputs(is_cut)
        for leaf in leaves:
            leaf.requires_grad_()

        def forward() -> None:
            with torch.no_grad():
                attend(*leaves)

        def both() -> None:
            torch.autograd.grad(attend(*leaves), leaves, dout)

        before = 0
        if self._device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        times = {"forward": self._median(forward), "both": self._median(both)}
        times |= {"host": self._host(forward, times), "host_both": self._host(both, times)}
        peak = torch.cuda.max_memory_allocated() - before if self._device == "cuda" else 0
        return times, peak

    def _median(self, run: Callable[[], None]) -> float:
        seconds: list[float] = []
        for _ in range(self._repeats + 2):
            dist.barrier()
            self._synchronize()
            begin = time.perf_counter()
            run()
            self._synchronize()
            seconds.append(time.perf_counter() - begin)
        longest = torch.tensor([statistics.median(seconds[2:])], device=self._device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return float(longest)

    def _host(self, run: Callable[[], None], times: dict[str, float]) -> float:
        """Returns the seconds that the host takes to start a call, while the GPU is busy."""
        seconds = []
        for number in range(12 if times["both"] < 0.05 else 4):  # the same number on all ranks
            if number % 4 == 0:  # the queue of a GPU holds about a thousand launches
                self._synchronize()
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
        self._synchronize()
        return statistics.median(seconds)

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _same_bits(self, over: Attend, one: Attend) -> bool:
        """Compares out, dq, dk and dv over all ranks with one GPU's, on every rank."""
        results = []
        for attend, is_cut in ((over, True), (one, False)):
            *leaves, dout = self._inputs(is_cut)
            out = attend(*(leaf.requires_grad_() for leaf in leaves))
            found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
            parts = found if is_cut else [distributed.shard(one, 1, **CUT) for one in found]
            results.append([one.contiguous().view(torch.int16) for one in parts])
        differing = sum(not torch.equal(*pair) for pair in zip(*results, strict=True))
        total = torch.tensor([differing], device=self._device)
        dist.all_reduce(total)
        return int(total) == 0


if __name__ == "__main__":
    sys.exit(main())
