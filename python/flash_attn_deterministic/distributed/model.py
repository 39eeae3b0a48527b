"""How long a call over ranks takes: bytes, what of them is overlapped, and the fullest rank's work.

The planner compares its choices with this, and `explain` shows it. The numbers of a GPU and its
links are rounded from measurements on H100s; only their ratio matters for a choice.
"""

from __future__ import annotations

from typing import NamedTuple

_FORWARD, _BACKWARD = 4, 10  # operations for each pair of a row and a key, head and element
# Operations per second of the kernels, forward and backward, by head dim.
_RATES = {64: (400e12, 415e12), 128: (560e12, 500e12)}
# Seconds that a launch adds: its own, and the SMs that are idle at its end.
_LAUNCH = 40e-6
_STEP = 150e-6  # seconds that a step adds: the host's, and those of small kernels
# Bytes per second at which messages are put together and taken apart, both read and written.
_COPIES = 0.3e12
# Most bytes of keys and values of a step; a single head may have more.
_STEP_BYTES = 512 * 2**20


class Link(NamedTuple):
    """What a rank sends and receives through at the same time: bytes per second, seconds."""

    bandwidth: float
    latency: float


NVLINK = Link(300e9, 30e-6)
NETWORK = Link(42e9, 60e-6)  # 400 Gbit/s for each GPU


class Load(NamedTuple):
    """What one pass of a call is for the fullest rank."""

    pairs: float  # of rows and keys that see each other, of all sequences; of one head
    nheads: int  # query heads that a rank computes
    nheads_k: int  # KV heads likewise
    head_dim: int  # of q, k and v
    moved_q: float  # rows that come from other ranks
    moved_k: float  # keys that come from other ranks
    sums: float  # keys whose sums go to other ranks, for each run
    whole: float  # keys whose gradients go to other ranks
    itemsize: int  # bytes of an element of q
    launches: float = 1.0  # of kernels on these

    def bytes(self, backward: bool) -> tuple[float, float]:
        """Returns the bytes that come before a rank computes, and those that go after it."""
        row = self.nheads * self.head_dim * self.itemsize * self.moved_q
        key = self.nheads_k * self.head_dim * 2
        lse = 4 * self.nheads * self.moved_q
        come = (3 if backward else 1) * row + key * self.itemsize * self.moved_k
        go = row + key * (4 * self.sums + self.itemsize * self.whole) * backward
        return (come + lse, go) if backward else (come, go + lse)


def seconds(load: Load, backward: bool, heads: int, link: Link) -> float:
    """Returns how long a pass takes if `heads` KV heads are computed at a time."""
    steps = -(-load.nheads_k // heads)
    come, go = (part / link.bandwidth / steps for part in load.bytes(backward))
    work = (_BACKWARD if backward else _FORWARD) * load.pairs * load.nheads * load.head_dim
    rate = _RATES[64 if load.head_dim <= 64 else 128][backward]
    compute = work / rate / steps + _LAUNCH * load.launches + _STEP
    compute += sum(load.bytes(backward)) / _COPIES / steps
    # Before the first step its tensors come, after the last one its results go.
    exposed = come + go + link.latency * ((come > 0) + (go > 0))
    return exposed + compute + (steps - 1) * max(compute, come + go + link.latency)


def best_heads(load: Load, backward: bool, link: Link, keys: int) -> int:
    """Returns how many KV heads are computed at a time, if all ranks have so many keys of each."""
    most = max(1, _STEP_BYTES // max(1, 2 * keys * load.head_dim * load.itemsize))
    return min(
        range(1, min(load.nheads_k, most) + 1),
        key=lambda heads: (seconds(load, backward, heads, link), heads),
    )
