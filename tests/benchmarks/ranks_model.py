"""How long attention over P ranks takes, by a model: compute, bytes, and who waits for whom.

    python -m tests.benchmarks.ranks_model

Rates are those of one GPU and of its links. `ranks` writes what the model says beside what it
measures; `checked` compares the two with the rates of the GPU that was measured.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flash_attn_deterministic.distributed.passes.chained_backward import LAG
from flash_attn_deterministic.distributed.planning import steps
from flash_attn_deterministic.distributed.planning.layout import dense_tokens
from flash_attn_deterministic.distributed.planning.plan import Mask
from flash_attn_deterministic.distributed.planning.steps import (
    find_steps,
    find_units,
    head_slices,
    heads_of_forward,
)

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "results" / "ranks.json"

CAUSAL = Mask(-1, 0)


@dataclass(frozen=True)
class Machine:
    """What a rank computes with, and sends through."""

    forward: float  # 2 * multiply-adds per second of the forward
    backward: float  # the same of the backward
    link: float  # bytes per second in one direction
    latency: float = 20e-6  # seconds of one message
    sms: int = 132  # streaming multiprocessors


# Rows of the forward's tiles at head dim 128, and their speed, as in cpp/kernels/plan.cpp.
TILES = ((192, 1.15), (128, 1.0))


# One H100: the forward for Hopper, the backward of the sm80 family; NVLink, or 400 Gbit/s.
NVLINK = Machine(590e12, 320e12, 400e9)
NETWORK = Machine(590e12, 320e12, 45e9)


@dataclass(frozen=True)
class Shape:
    """A causal call in the zigzag order."""

    seqlen: int  # tokens of the whole sequence
    batch: int = 1  # sequences
    nheads: int = 32  # query heads
    nheads_k: int = 8  # KV heads
    head_dim: int = 128  # of q, k and v, in 16 bits

    def products(self) -> float:
        """Returns 2 * multiply-adds of the forward."""
        return 2.0 * self.batch * self.nheads * self.head_dim * self.seqlen**2

    def keys(self, heads_k: int) -> float:
        """Returns the bytes of K and V of some heads, whole."""
        return 4.0 * self.batch * self.seqlen * heads_k * self.head_dim

    def rows(self) -> float:
        """Returns the bytes of q, out and dout, whole, with softmax_lse."""
        return self.batch * self.seqlen * self.nheads * (6.0 * self.head_dim + 4)


# Of a shape, a number of ranks and a machine.
Seconds = Callable[[Shape, int, Machine], float]


def forward_seconds(shape: Shape, ranks: int, machine: Machine, heads_k: int = 0) -> float:
    """Keys of the next heads come while these are computed: the first ones are waited for."""
    compute = shape.products() / ranks / machine.forward
    if ranks == 1:
        return compute
    begin = end = 0.0
    for span in forward_slices(shape, heads_k):
        heads = span.stop - span.start
        came = begin + shape.keys(heads) * (ranks - 1) / ranks / machine.link + machine.latency
        begin = max(end, came)
        end = begin + compute * heads / shape.nheads_k / busy(shape, ranks, machine, heads)
    return end


def forward_slices(shape: Shape, heads_k: int) -> list[slice]:
    """Returns the KV heads that a forward gathers at a time; heads_k is 0 where none are given."""
    at_once = heads_of_forward(heads_k, shape.nheads_k, int(shape.keys(1)))
    return head_slices(shape.nheads_k, at_once)


def busy(shape: Shape, ranks: int, machine: Machine, heads_k: int) -> float:
    """Returns the share of its time that a forward kernel on some KV heads computes in.

    SMs take tiles of rows in turns, and the last turn is rarely full: the fewer tiles, the more of
    the time it is. Few heads may want the smaller tile, too. A kernel has one of the two parts of a
    rank; tiles of a part take about the same time.
    """
    heads = shape.batch * heads_k * shape.nheads // shape.nheads_k
    rows = shape.seqlen / (2 * ranks)
    best = max(speed for _, speed in TILES)
    found = min(
        tile / speed * math.ceil(heads * math.ceil(rows / tile) / machine.sms)
        for tile, speed in TILES
    )
    return heads * rows / machine.sms / best / found


def gathered_seconds(shape: Shape, ranks: int, machine: Machine) -> float:
    """The backward in which each side gathers the other: twice the products of one device."""
    compute = 2.5 * shape.products() / machine.backward
    if ranks == 1:
        return compute
    share = (ranks - 1) / ranks
    sent = (shape.keys(shape.nheads_k) + shape.rows()) * share / machine.link
    first = sent / shape.nheads_k
    return first + max(2 * compute / ranks, sent)


def chain_seconds(shape: Shape, ranks: int, machine: Machine, heads_k: int = 1) -> float:
    """The backward with sums that travel: its waves played through, last rows first.

    A rank computes the steps of a wave one after another. Messages of a wave are one batch on each
    rank, after the batch before and after the gathering of keys that stands before it; a message
    moves once both ends are there.
    """
    compute = 2.5 * shape.products() / machine.backward
    if ranks == 1:
        return compute
    units = find_units(shape.nheads, shape.nheads_k, heads_k, ranks)
    # Shares of rows and keys do not depend on the length.
    tokens = dense_tokens(1, 2, ranks, "zigzag")
    found = find_steps(tokens, tokens, CAUSAL, True).steps
    in_order = sorted(found, key=lambda step: step.number)
    parts = 2 * ranks  # of a sequence
    piece = {(rank, i): p for rank, own in enumerate(tokens.layout) for i, p in enumerate(own)}
    # Pairs of a row's part and a key's part: a part of rows sees half of its own keys.
    costs = [
        sum(part + 0.5 for part in range(p.begin, p.end))
        for p in (piece[step.rank, step.piece] for step in in_order)
    ]
    pair = compute / len(units) / (parts * parts / 2)
    per_key = 8.0 * shape.batch * (shape.nheads // len(units)) * shape.head_dim
    gathering = shape.keys(heads_k) * (ranks - 1) / ranks / machine.link + machine.latency
    computed, sent, arrived = ([0.0] * ranks for _ in range(3))
    gathered = gathering
    for wave in range(len(units) + LAG * (len(in_order) - 1)):
        begin = list(map(max, computed, arrived))
        if wave < len(units) and units[wave].first:
            begin = [max(one, gathered) for one in begin]
            gathered = max(map(max, begin, sent)) + gathering
            if units[wave].number + 1 < units[-1].number:
                sent = [gathered] * ranks
        ready, arrived = list(map(max, begin, sent)), begin.copy()
        for step, following in itertools.pairwise(in_order):
            if 0 <= wave - 1 - LAG * step.number < len(units):
                size = (step.goes[1] - step.goes[0]) * shape.seqlen / parts * per_key
                ends = (step.rank, following.rank)
                there = max(ready[end] for end in ends) + size / machine.link + machine.latency
                for end in ends:
                    arrived[end] = max(arrived[end], there)
        sent = list(map(max, sent, arrived))
        computed = begin
        for step, cost in zip(in_order, costs, strict=True):
            if 0 <= wave - LAG * step.number < len(units):
                computed[step.rank] += cost * pair
    return max(computed)


def bubble(shape: Shape, ranks: int, heads_k: int = 1) -> float:
    """Returns the share of a chain's time in which ranks wait, if messages took no time."""
    free = Machine(1e12, 1e12, math.inf, 0.0)
    return 1.0 - chain_seconds(shape, 1, free) / ranks / chain_seconds(shape, ranks, free, heads_k)


def forward_memory(shape: Shape, ranks: int, heads_k: int = 0) -> float:
    """Returns the bytes of a rank in the forward, beside q, k, v, out and softmax_lse.

    Keys and values of three slices: computed, sent, received; and out of a slice's rows, which is
    copied to its place.
    """
    slices = forward_slices(shape, heads_k)
    heads: int = slices[0].stop
    rows = 2.0 * shape.batch * shape.seqlen / ranks * shape.head_dim
    out = rows * heads * shape.nheads // shape.nheads_k
    return min(len(slices) + 1, 3) * shape.keys(heads) + out


def memory(shape: Shape, ranks: int, heads_k: int, chain: bool) -> float:
    """Returns the bytes of a rank in the backward, beside what it is given and what it returns."""
    group = shape.nheads // shape.nheads_k
    slices = math.ceil(shape.nheads_k / heads_k)
    if chain:
        units = find_units(shape.nheads, shape.nheads_k, heads_k, ranks)
        waves = LAG * (2 * ranks - 2)  # from the first step of a rank to its last one
        kept = min(slices, math.ceil(waves * slices / len(units)) + 2)  # slices of keys
        # Of one unit: here, and on their way in and out; and of own keys, all heads of a KV head.
        sums = 8.0 * shape.batch * shape.seqlen * shape.head_dim
        at_once = 3 * shape.nheads / len(units) + (group / ranks if heads_k == 1 else 0)
        gradients = shape.keys(shape.nheads_k) / ranks  # dk and dv where they end
        return kept * shape.keys(heads_k) + sums * at_once + gradients
    slice_of_rows = shape.rows() / shape.nheads_k * heads_k
    # Of rows, which are more than the keys before them: three slices as in the forward, and the
    # gradients that are thrown away: dq in 32 bits of all rows of a slice.
    unused = 6.0 * shape.batch * shape.seqlen * heads_k * group * shape.head_dim
    return min(slices + 1, 3) * slice_of_rows + unused


class Checked(NamedTuple):
    """A measured run beside the model, with the measured rates of one GPU.

    Args:
        name: of the run in the record.
        seconds: of forward and backward, by the model.
        measured_seconds: the same, measured.
        bytes: that a rank has at its peak beside q, k, v and dout, by the model.
        measured_bytes: the same, measured.
    """

    name: str
    seconds: float
    measured_seconds: float
    bytes: float
    measured_bytes: float


def checked(case: Mapping[str, Any], ranks: int, heads_k: int, link: float) -> list[Checked]:
    """Compares the model with a case of docs/results/ranks.json.

    Args:
        case: the measured case.
        ranks: of the case.
        heads_k: KV heads that its forward gathered at a time.
        link: bytes per second in one direction.
    """
    shape, seconds = Shape(**case["shape"]), case["seconds"]
    alone = seconds["one"]["forward"], seconds["one"]["both"] - seconds["one"]["forward"]
    machine = Machine(shape.products() / alone[0], 2.5 * shape.products() / alone[1], link)
    forward = forward_seconds(shape, ranks, machine, heads_k)
    # out, softmax_lse and the gradients, which the measurement counts.
    rows = shape.batch * shape.seqlen / ranks * shape.nheads
    returned = rows * (4.0 * shape.head_dim + 4) + shape.keys(shape.nheads_k) / ranks
    found = []
    for name, measured in seconds.items():
        if not name.startswith("ours_"):
            continue
        chain = name != "ours_gathered"
        before, steps.UNIT_HEADS = steps.UNIT_HEADS, int(name.split("_")[-1]) if chain else None
        try:
            backward = (chain_seconds if chain else gathered_seconds)(shape, ranks, machine)
            held = memory(shape, ranks, 1, chain) + returned
        finally:
            steps.UNIT_HEADS = before
        at_peak = case["peak_bytes"][name]
        found.append(Checked(name, forward + backward, measured["both"], held, at_peak))
    return found


def main() -> int:
    """Prints the table, and what was measured beside the model."""
    print(
        "| tokens | ranks | link | forward | gathered | chain | bubble "
        "| forward GB | gathered GB | chain GB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for seqlen, ranks, name, machine in (
        (65_536, 2, "NVLink", NVLINK),
        (65_536, 4, "NVLink", NVLINK),
        (65_536, 8, "NVLink", NVLINK),
        (262_144, 8, "NVLink", NVLINK),
        (1_048_576, 8, "NVLink", NVLINK),
        (1_048_576, 16, "400 Gbit/s", NETWORK),
        (1_048_576, 64, "400 Gbit/s", NETWORK),
    ):
        shape = Shape(seqlen)
        one = Machine(machine.forward, machine.backward, math.inf)
        forward = forward_seconds(shape, 1, one) / ranks / forward_seconds(shape, ranks, machine)
        backward = gathered_seconds(shape, 1, one)
        shares = [
            forward,
            backward / ranks / gathered_seconds(shape, ranks, machine),
            backward / ranks / chain_seconds(shape, ranks, machine),
            bubble(shape, ranks),
        ]
        sizes = [forward_memory(shape, ranks) / 1e9]
        sizes += [memory(shape, ranks, 1, chain) / 1e9 for chain in (False, True)]
        words = [f"{seqlen:,}", str(ranks), name, *(f"{100 * share:.0f} %" for share in shares)]
        print("| " + " | ".join([*words, *(f"{size:.1f}" for size in sizes)]) + " |")
    record = json.loads(MEASURED.read_text(encoding="utf-8"))
    print("\n| measured | ms | by the model | GB | by the model |\n|---|---|---|---|---|")
    for run in checked(record["cases"][0], record["ranks"], 1, NVLINK.link):
        print(
            f"| {run.name} | {run.measured_seconds * 1e3:.0f} | {run.seconds * 1e3:.0f} "
            f"| {run.measured_bytes / 1e9:.2f} | {run.bytes / 1e9:.2f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
