"""Times attention over several GPUs: against one of them, and against torch's context parallel.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        -m tests.benchmarks.ranks --out docs/results/ranks.json

bfloat16. Ours over all ranks, as planned and with each way to divide heads, ours on one GPU (where
the memory suffices), and with --peers F.scaled_dot_product_attention within torch's
context_parallel, one after another in one process group. A time is the largest over the ranks of
each rank's median. Beside them: what the model of the planner says, the memory that a rank takes at
its peak beyond inputs, the host's time for a call, and whether all bits are those of one GPU.
The file is written after each time, what matters most first: "unfinished" is the case in work.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from flash_attn_deterministic import distributed, flash_attn_func
from flash_attn_deterministic.verify.shared.files import json_text, write_files
from flash_attn_deterministic.verify.shared.provenance import provenance
from torch.distributed.device_mesh import init_device_mesh

ONE_GPU_UP_TO = 262_144
Attend = Callable[..., torch.Tensor]
Context = Callable[[], AbstractContextManager[Any]]
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
    parser.add_argument(
        "--lengths", type=int, nargs="*", help="of H32/8 D128 instead of all shapes"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="torch's context_parallel too")
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

        for shape in [Shape(seqlen) for seqlen in arguments.lengths or ()] or SHAPES:
            case = Case(shape, arguments.device, arguments.repeats)
            record["cases"].append(case.measured(arguments.peers, write))
            write(None)
            if dist.get_rank() == 0:
                print(record["cases"][-1], flush=True)
    finally:
        dist.destroy_process_group()
    return 0


@dataclass(frozen=True)
class Case:
    """One shape."""

    shape: Shape
    device: str  # "cuda" or "cpu"
    repeats: int  # of which the median counts

    def measured(
        self, peers: bool = False, write: Callable[[dict[str, Any]], None] = lambda found: None
    ) -> dict[str, Any]:
        """Returns seconds, bytes, and what follows of them.

        Args:
            peers: whether to time torch's context_parallel too.
            write: gets what has been found, after each time.
        """
        ranks = dist.get_world_size()
        mask: dict[str, Any] = {"causal": True, "window_size": (self.shape.window, -1)}
        found: dict[str, Any] = {
            "shape": vars(self.shape) | {},
            "seconds": {},
            "peak_bytes": {},
            "refused": {},
            "model": self._explained(mask),
        }
        sides: dict[str, tuple[Attend, bool, Context]] = {}
        over: Any = functools.partial(distributed.flash_attn_func, **mask, **CUT)
        sides["planned"] = (over, True, nullcontext)
        one: Any = functools.partial(flash_attn_func, **mask)
        if self.shape.seqlen <= ONE_GPU_UP_TO:
            sides["one"] = (one, False, nullcontext)
        for degree in range(1, ranks + 1):
            is_planned = degree == found["model"]["degree"]
            if not (is_planned or ranks % degree or self.shape.nheads_k % degree):
                divided = functools.partial(over, ulysses_degree=degree)
                sides[f"heads over {degree}"] = (divided, True, nullcontext)
        if peers and self.device == "cuda" and self.shape.window < 0:
            mesh = init_device_mesh("cuda", (ranks,))
            sides["context_parallel"] = (sdpa, True, functools.partial(ring_attention, mesh))
        for name, (attend, is_cut, context) in sides.items():
            try:
                found["seconds"][name], found["peak_bytes"][name] = self._timed(
                    attend, is_cut, context
                )
            except Exception as error:
                # torch's context_parallel is a prototype: it may refuse.
                if attend is not sdpa and not isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                found["refused"][name] = f"{type(error).__name__}: {error}"[:300]
            write(found)
        seconds = found["seconds"]
        for key, name, times in (("efficiency", "one", ranks), ("over_peer", "peer", 1)):
            other = seconds.get("context_parallel" if name == "peer" else name, {})
            found[key] = {
                part: value / times / seconds["planned"][part]
                for part, value in other.items()
                if not part.startswith("host")
            }
        if "one" in seconds:
            found["same_bits"] = self._same_bits(sides["planned"][0], sides["one"][0])
        return found

    def _explained(self, mask: dict[str, Any]) -> dict[str, Any]:
        """Returns what the planner chooses, and what it expects of each choice."""
        shape = self.shape
        q, k = (
            torch.empty(
                *(shape.batch, shape.seqlen // dist.get_world_size(), heads, shape.head_dim),
                dtype=torch.bfloat16,
                device=self.device,
            )
            for heads in (shape.nheads, shape.nheads_k)
        )
        found = distributed.explain(q, k, **mask, **CUT)
        names = ("degree", "moves", "heads", "seconds", "others")  # of the fields, in their order
        return dict(zip(names, vars(found).values(), strict=True))

    def _inputs(self, is_cut: bool) -> list[torch.Tensor]:
        """q, k, v and dout, the same numbers on all ranks: whole, or this rank's part."""
        shape = self.shape
        generator = torch.Generator(self.device).manual_seed(0)
        tensors = []
        for heads in (shape.nheads, shape.nheads_k, shape.nheads_k, shape.nheads):
            size = (shape.batch, shape.seqlen, heads, shape.head_dim)
            whole = torch.randn(size, generator=generator, device=self.device, dtype=torch.bfloat16)
            tensors.append(distributed.shard(whole, 1, **CUT) if is_cut else whole)
        return tensors

    def _timed(
        self, attend: Attend, is_cut: bool, context: Context
    ) -> tuple[dict[str, float], int]:
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
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with context():
            times = {
                name: self._median(run) for name, run in (("forward", forward), ("both", both))
            }
            times |= {"host": self._host(forward, times), "host_both": self._host(both, times)}
        peak = torch.cuda.max_memory_allocated() - before if self.device == "cuda" else 0
        return times, peak

    def _median(self, run: Callable[[], None]) -> float:
        seconds: list[float] = []
        for _ in range(self.repeats + 2):
            dist.barrier()
            self._synchronize()
            begin = time.perf_counter()
            run()
            self._synchronize()
            seconds.append(time.perf_counter() - begin)
        longest = torch.tensor([statistics.median(seconds[2:])], device=self.device)
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
        if self.device == "cuda":
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
        total = torch.tensor([differing], device=self.device)
        dist.all_reduce(total)
        return int(total) == 0


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What torch's context_parallel replaces. It takes as many KV heads as query heads."""
    group = q.shape[2] // k.shape[2]
    k, v = (tensor.repeat_interleave(group, 2).transpose(1, 2) for tensor in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
    return out.transpose(1, 2)


@contextlib.contextmanager
def ring_attention(mesh: Any) -> Iterator[None]:
    """torch's context parallel. The tensors are parts already: cutting only opens the context."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    unused = torch.empty(2 * mesh.size(), device="cuda")
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0]),
    ):
        yield


if __name__ == "__main__":
    sys.exit(main())
