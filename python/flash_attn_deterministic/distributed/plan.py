"""What each rank computes, and which tokens travel for it.

A row has the bits of one device if it sees the same keys at the same positions relative to splits
and blocks of keys, which begin at position 0 of the sequence. So the keys of a call begin at a
multiple of both; keys that no row sees are zeros and are not sent. A call aligns its masks to its
last row and its last key: if these do not belong together in the whole sequence, both sides of its
window are moved by the difference.

dk and dv of a key are a tree of sums over chunks of rows (ADR 17). A rank computes whole chunks,
in aligned runs of 2^n, and sends their sums to the rank of the key, which adds them in the order of
the tree. A chunk that lies on several ranks is computed by one of them.

Heads may be divided over `degree` ranks that follow one another (Ulysses), which together stand for
one "team" that has all their tokens. A sequence that lies on several teams may be computed by one.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import model
from .exchange import Places, Route
from .layout import Layout, Numbers, dense_layout, overlaps, packed_layout

# A multiple of the keys per block of every kernel, forward and backward.
KEY_BLOCK = 128


@dataclass(frozen=True)
class Shape:
    """All that a plan depends on.

    Args:
        starts_q: values of cu_seqlens_q, of all ranks; dense: made from the lengths.
        starts_k: likewise.
        dense: whether the tensors are (batch, seqlen, nheads, head_dim).
        tokens_q: on each rank.
        tokens_k: likewise.
        ranks: their number.
        order: of the tokens.
        left: keys that a row sees before its position; -1: all.
        right: likewise after it.
        align: the keys of a call begin at multiples of this.
        chunk: rows of a leaf of the tree.
        nheads: query heads.
        nheads_k: KV heads.
        head_dim: of q, k and v.
        itemsize: bytes of their elements.
        degree: ranks over which heads are divided; 0: the planner chooses.
        heads_k: KV heads computed at a time; 0: the planner chooses.
        one_machine: whether all ranks are on one.
    """

    starts_q: tuple[int, ...]
    starts_k: tuple[int, ...]
    dense: bool
    tokens_q: int
    tokens_k: int
    ranks: int
    order: str
    left: int
    right: int
    align: int
    chunk: int
    nheads: int
    nheads_k: int
    head_dim: int
    itemsize: int = 2
    degree: int = 0
    heads_k: int = 0
    one_machine: bool = True

    @property
    def link(self) -> model.Link:
        """Returns what is between the ranks."""
        return model.NVLINK if self.one_machine else model.NETWORK


class Mask(NamedTuple):
    """A row sees keys from `left` before to `right` after its position; -1: no limit."""

    left: int
    right: int


class Call(NamedTuple):
    """One call of a packed op.

    Args:
        rows: in the tensor of rows.
        keys: in the tensor of keys.
        starts_q: values of cu_seqlens_q.
        starts_k: values of cu_seqlens_k.
        mask: of the call.
    """

    rows: slice
    keys: slice
    starts_q: tuple[int, ...]
    starts_k: tuple[int, ...]
    mask: Mask

    @property
    def longest(self) -> tuple[int, int]:
        """Returns max_seqlen_q and max_seqlen_k."""
        q, k = (
            max(b - a for a, b in itertools.pairwise(starts))
            for starts in (self.starts_q, self.starts_k)
        )
        return q, k


Node = tuple[int, int]  # (n, i): the i-th run of 2^n chunks


class Run(NamedTuple):
    """An aligned run of chunks that this rank computes.

    Args:
        call: on its rows.
        keys: that they see, in the keys of the call.
        place: of their sums in the tensor of sums.
    """

    call: Call
    keys: slice
    place: slice


class Arrival(NamedTuple):
    """Where the sums for a piece of keys arrive.

    Args:
        keys: in this rank's tensors.
        chunks: of the sequence.
        sums: node of each run that sees keys of the piece, and where its sums begin.
    """

    keys: slice
    chunks: int
    sums: tuple[tuple[Node, int], ...]


class Pass(NamedTuple):
    """The forward or the backward of one rank.

    Args:
        rows: how rows come to the ranks that compute them; None: they stay.
        keys: how keys come; None: no rank needs any.
        calls: on whole sequences, or, in the forward, all calls.
        heads: KV heads at a time.
        runs: of chunks of the others, in the backward.
        whole: how dk and dv of whole sequences go back.
        whole_room: keys of these, the first ones of those that came.
        sums: how sums go to the ranks of the keys.
        sums_sent: keys of the runs.
        arrivals: of sums.
    """

    rows: Route | None
    keys: Route | None
    calls: tuple[Call, ...]
    heads: int
    runs: tuple[Run, ...] = ()
    whole: Route | None = None
    whole_room: int = 0
    sums: Route | None = None
    sums_sent: int = 0
    arrivals: tuple[Arrival, ...] = ()


class Plan(NamedTuple):
    """What one rank does in a call.

    Args:
        degree: ranks over which heads are divided.
        local: calls on sequences that lie entirely on this rank.
        forward: of the others.
        backward: likewise.
        seconds: that the model expects of forward and backward.
        others: the same for what was not chosen.
        moves: sequences that come to one team.
    """

    degree: int
    local: tuple[Call, ...]
    forward: Pass
    backward: Pass
    seconds: tuple[float, float]
    others: dict[str, tuple[float, float]]
    moves: int


class Rows(NamedTuple):
    """Pieces of rows of sequences, with the team that computes them.

    Args:
        team: of each piece.
        sequence: likewise.
        begin: token.
        end: likewise.
        whole: whether it is all of its sequence.
        at: where the team's rows have it.
        level: n of the run of 2^n chunks; -1: none.
    """

    team: Numbers
    sequence: Numbers
    begin: Numbers
    end: Numbers
    whole: Numbers
    at: Numbers
    level: Numbers

    def select(self, which: Numbers) -> Rows:
        """Returns some pieces."""
        return Rows(*(one[which] for one in self))


class Keys(NamedTuple):
    """The keys of pieces of rows.

    Args:
        first: position in the sequence where the call's keys begin, for each piece of rows.
        begin: first key that is seen.
        end: after the last one.
        at: where the team's keys have `first`.
        wanted: the tokens that each team needs; `rank` is the team.
        cut: of each of these, whether its sequence is cut.
        room: keys of each team, gaps included.
        whole_room: of whole sequences alone.
    """

    first: Numbers
    begin: Numbers
    end: Numbers
    at: Numbers
    wanted: Layout
    cut: Numbers
    room: Numbers
    whole_room: Numbers


class Pairs(NamedTuple):
    """Tokens that go from the places of their ranks to the places of teams."""

    rank: Numbers
    rank_at: Numbers
    team: Numbers
    team_at: Numbers
    length: Numbers


@functools.lru_cache(maxsize=64)
def plan_of(shape: Shape, rank: int) -> Plan:
    """Plans a call; see `layout` for the errors of lengths that do not fit."""
    planner = _planner_of(shape)
    return planner.plan(rank)


@functools.lru_cache(maxsize=4)
def _planner_of(shape: Shape) -> _Planner:
    return _Planner(shape)


def layouts_of(shape: Shape) -> tuple[Layout, Layout]:
    """Returns where the ranks have the tokens of q, and those of k and v."""
    if not shape.dense:
        q, k = (
            packed_layout(starts, total, shape.ranks, shape.order, name)
            for starts, total, name in (
                (shape.starts_q, shape.tokens_q, "cu_seqlens_q"),
                (shape.starts_k, shape.tokens_k, "cu_seqlens_k"),
            )
        )
        return q, k
    batch = len(shape.starts_q) - 1
    q, k = (
        dense_layout(batch, tokens // max(batch, 1), shape.ranks, shape.order, name)
        for tokens, name in ((shape.tokens_q, "q"), (shape.tokens_k, "k"))
    )
    return q, k


class _Part(NamedTuple):
    """The forward or the backward of a choice."""

    rows: Rows
    keys: Keys
    stays: bool  # whether all rows are where they are computed
    load: model.Load


class _Choice(NamedTuple):
    """One way to divide a call."""

    degree: int
    team_of: Numbers  # for each sequence, the team that gets all of it; -1: nobody
    local: Numbers  # for each sequence, its only rank; -1: none
    parts: tuple[_Part, _Part]
    heads: tuple[int, int]
    seconds: tuple[float, float]


class _Planner:
    """Plans the calls of all ranks for one shape."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._own_q, self._own_k = layouts_of(shape)
        self._starts_q, self._starts_k = (
            torch.tensor(starts) for starts in (shape.starts_q, shape.starts_k)
        )
        self._lengths_q, self._lengths_k = self._starts_q.diff(), self._starts_k.diff()
        self._total = int(max(shape.starts_q[-1], shape.starts_k[-1])) + shape.align + 1
        self._choices: dict[str, _Choice] = {}
        common = math.gcd(shape.ranks, shape.nheads_k)
        degrees = [shape.degree] if shape.degree else sorted({common, 1}, reverse=True)
        for degree in degrees:
            self._choose(degree)
        # Among equals, the one that divides heads most.
        best = next(iter(self._choices))
        for name, choice in self._choices.items():
            if sum(choice.seconds) < 0.99 * sum(self._choices[best].seconds):
                best = name
        self._best, self._choice = best, self._choices[best]

    # --- who computes what ------------------------------------------------------------------------

    def _choose(self, degree: int) -> None:
        """Adds the ways to divide a call for one degree."""
        teams = self._shape.ranks // degree
        pieces = self._pieces(self._own_q, self._starts_q, degree)
        home = self._home(pieces.team, pieces.sequence)
        local = torch.full_like(home, -1)
        if degree == 1:
            keys = self._pieces(self._own_k, self._starts_k, 1)
            same = (home >= 0) & (self._home(keys.team, keys.sequence) == home)
            local[same] = home[same]
        work = self._work(pieces.sequence, pieces.begin, pieces.end)
        loads = torch.zeros(teams, dtype=torch.float64)
        loads.index_add_(0, pieces.team, work)
        of_sequence = torch.zeros(home.numel(), dtype=torch.float64)
        of_sequence.index_add_(0, pieces.sequence, work)
        divided = (home < 0) & (of_sequence > 0)
        mean = float(of_sequence.sum()) / teams
        at_home = torch.zeros_like(loads)
        at_home.index_add_(0, pieces.team, work * (local[pieces.sequence] >= 0))
        words = [f"heads over {degree} ranks"] * (degree > 1)
        # Short sequences come to one team in any case.
        for name, limit in (("cut", mean / 4), ("whole", math.inf)):
            moving = divided & (of_sequence <= limit)
            if name == "whole" and bool((moving == (divided & (of_sequence <= mean / 4))).all()):
                continue
            team_of = home.clone()
            if moving.any():
                which = moving[pieces.sequence]
                rest = loads.index_add(0, pieces.team[which], -work[which])
                fullest = self._assign(moving, of_sequence, rest, team_of)
                if name == "whole" and fullest > 1.15 * mean:
                    continue
            rows = self._rows(pieces, team_of, local, degree)
            chunks = self._chunks(rows, at_home)
            forward = self._part(degree, rows, at_home)
            backward = forward if chunks is rows else self._part(degree, chunks, at_home)
            heads, time = self._timed(forward.load, False)
            heads_bwd, time_bwd = self._timed(backward.load, True)
            label = ", ".join(words + [f"long sequences {name}"] * (teams > 1))
            parts = forward, backward
            self._choices[label] = _Choice(
                degree, team_of, local, parts, (heads, heads_bwd), (time, time_bwd)
            )

    def _pieces(self, own: Layout, starts: Numbers, degree: int) -> Rows:
        """Cuts the tokens of teams at the borders of sequences."""
        sequences = torch.arange(starts.numel() - 1)
        some = starts.diff() > 0
        parts = Layout(sequences[some], starts[:-1][some], starts[1:][some], sequences[some])
        found = overlaps(parts, own.begin, own.end)
        team, sequence = own.rank[found.want] // degree, parts.rank[found.part]
        order = (team * self._total + found.begin).argsort()
        team, sequence = team[order], sequence[order]
        begin, end = found.begin[order], found.end[order]
        joined = torch.zeros(team.numel() + 1, dtype=torch.bool)
        joined[1:-1] = (
            (team[1:] == team[:-1]) & (sequence[1:] == sequence[:-1]) & (begin[1:] == end[:-1])
        )
        first, last = ~joined[:-1], ~joined[1:]
        return self._laid(starts, team[first], sequence[first], begin[first], end[last])

    def _laid(
        self,
        starts: Numbers,
        team: Numbers,
        sequence: Numbers,
        begin: Numbers,
        end: Numbers,
        level: Numbers | None = None,
    ) -> Rows:
        """Orders pieces, whole sequences first, and stores them one after another."""
        whole = (begin == starts[sequence]) & (end == starts[sequence + 1])
        order = ((2 * team + ~whole) * self._total + begin).argsort()
        team, sequence, begin, end, whole = (
            one[order] for one in (team, sequence, begin, end, whole)
        )
        level = torch.full_like(team, -1) if level is None else level[order]
        return Rows(team, sequence, begin, end, whole, _stored(team, end - begin), level)

    def _home(self, team: Numbers, sequence: Numbers) -> Numbers:
        """Returns for each sequence the team that has all of it; -1: several have."""
        count = self._lengths_q.numel()
        low = torch.full((count,), self._shape.ranks).scatter_reduce(0, sequence, team, "amin")
        high = torch.full((count,), -1).scatter_reduce(0, sequence, team, "amax")
        return torch.where(low == high, low, -1)

    def _seen(self, sequence: Numbers, begin: Numbers, end: Numbers) -> tuple[Numbers, Numbers]:
        """Returns the first and the last key + 1, by position, that rows (tokens) see."""
        length = self._lengths_k[sequence]
        shift = length - self._lengths_q[sequence] - self._starts_q[sequence]
        last, first = length, torch.zeros_like(length)
        if self._shape.right >= 0:
            last = torch.minimum((end + shift + self._shape.right).clamp(min=0), length)
        if self._shape.left >= 0:
            first = torch.minimum((begin + shift - self._shape.left).clamp(min=0), last)
        return first, last

    def _work(self, sequence: Numbers, begin: Numbers, end: Numbers) -> Numbers:
        """Returns how many pairs of a row and a key pieces of rows have."""
        length = self._lengths_k[sequence]
        shift = length - self._lengths_q[sequence] - self._starts_q[sequence]
        low, high = begin + shift, end + shift  # positions among the keys
        seen = (end - begin) * length
        if self._shape.right >= 0:
            seen = _clamped(low + self._shape.right + 1, high + self._shape.right + 1, length)
        if self._shape.left >= 0:
            seen = seen - _clamped(low - self._shape.left, high - self._shape.left, length)
        return seen.clamp(min=0).double()

    @staticmethod
    def _assign(moving: Numbers, work: Numbers, loads: Numbers, team_of: Numbers) -> float:
        """Gives each moving sequence to the emptiest team, the longest first.

        Returns:
            The work of the fullest team then.
        """
        heap = [(load, team) for team, load in enumerate(loads.tolist())]
        heapq.heapify(heap)
        which = moving.nonzero().flatten()
        which = which[work[which].argsort(descending=True, stable=True)]
        teams = []
        for more in work[which].tolist():
            load, team = heap[0]
            heapq.heapreplace(heap, (load + more, team))
            teams.append(team)
        team_of[which] = torch.tensor(teams)
        return float(max(load for load, _ in heap))

    def _rows(self, pieces: Rows, team_of: Numbers, local: Numbers, degree: int) -> Rows:
        """Returns the rows of the forward: whole sequences where a team gets them."""
        sequences = ((team_of >= 0) & (local < 0) & (self._lengths_q > 0)).nonzero().flatten()
        cut = pieces.select(team_of[pieces.sequence] < 0)
        parts = (
            (team_of[sequences], cut.team),
            (sequences, cut.sequence),
            (self._starts_q[sequences], cut.begin),
            (self._starts_q[sequences + 1], cut.end),
        )
        return self._laid(self._starts_q, *(torch.cat(part) for part in parts))

    def _chunks(self, rows: Rows, loads: Numbers) -> Rows:
        """Returns the rows of the backward: those of cut sequences in aligned runs of chunks."""
        chunk = self._shape.chunk
        cut = rows.select(~rows.whole)
        if not cut.team.numel():
            return rows
        work_of_whole = self._work(rows.sequence, rows.begin, rows.end) * rows.whole
        loads = loads.index_add(0, rows.team, work_of_whole)
        holders: dict[tuple[int, int], list[int]] = {}
        starts, ends = self._starts_q[:-1].tolist(), self._starts_q[1:].tolist()
        for team, of, low, high in zip(*(one.tolist() for one in cut[:4]), strict=True):
            first, last = (low - starts[of]) // chunk, (high - starts[of] - 1) // chunk
            for number in range(first, last + 1):
                holders.setdefault((of, number), []).append(team)
        order = sorted(holders)
        sequence, index = torch.tensor(order).unbind(1)
        begin = self._starts_q[sequence] + index * chunk
        end = torch.minimum(begin + chunk, self._starts_q[sequence + 1])
        work = dict(zip(order, self._work(sequence, begin, end).tolist(), strict=True))
        loaded = loads.tolist()
        owner = {}
        # Chunks of one team stay there; others go to the emptier of theirs.
        for one in sorted(order, key=lambda one: (len(set(holders[one])) > 1, -work[one], one)):
            team = min(holders[one], key=lambda team: (loaded[team], team))
            loaded[team] += work[one]
            owner[one] = team
        runs = []
        for (sequence_, team), group in itertools.groupby(
            order, key=lambda one: (one[0], owner[one])
        ):
            indices = [index for _, index in group]
            first, last = indices[0], indices[-1] + 1
            ends_here = last * chunk >= ends[sequence_] - starts[sequence_]
            while first < last:
                size = 1
                # Behind the sequence there are as many chunks as needed.
                while first % (2 * size) == 0 and (
                    first + 2 * size <= last or (ends_here and first + size < last)
                ):
                    size *= 2
                begin_ = starts[sequence_] + first * chunk
                end_ = min(begin_ + size * chunk, ends[sequence_])
                runs.append((team, sequence_, begin_, end_, size.bit_length() - 1))
                first += size
        whole = rows.select(rows.whole)
        found = [torch.tensor(one) for one in zip(*runs, strict=True)]
        levels = torch.cat([whole.level, found.pop()])
        pairs = zip(whole[:4], found, strict=True)
        team_, of, low_, high_ = (torch.cat(pair) for pair in pairs)
        return self._laid(self._starts_q, team_, of, low_, high_, levels)

    # --- how long it takes ------------------------------------------------------------------------

    def _part(self, degree: int, rows: Rows, at_home: Numbers) -> _Part:
        """Finds the keys of rows, and what the fullest rank computes and gets."""
        shape = self._shape
        teams = shape.ranks // degree
        zeros = torch.zeros(teams, dtype=torch.float64)
        keys = self._keys(rows, teams)
        others = 1 - 1 / shape.ranks
        moved, stays = 0.0, self._stays(degree, rows)
        if not stays:
            moved = float(zeros.index_add(0, rows.team, (rows.end - rows.begin).double()).max())
        needed = (keys.wanted.end - keys.wanted.begin).double()
        sums = (keys.end - keys.begin).double() * (rows.level >= 0)
        pairs = at_home.index_add(0, rows.team, self._work(rows.sequence, rows.begin, rows.end))
        load = model.Load(
            pairs=float(pairs.max()),
            nheads=shape.nheads // degree,
            nheads_k=shape.nheads_k // degree,
            head_dim=shape.head_dim,
            moved_q=moved * others,
            moved_k=float(zeros.index_add(0, keys.wanted.rank, needed).max()) * others,
            sums=float(zeros.index_add(0, rows.team, sums).max()) * others,
            whole=float(zeros.index_add(0, keys.wanted.rank, needed * ~keys.cut).max()) * others,
            itemsize=shape.itemsize,
            launches=float(zeros.index_add(0, rows.team, (~rows.whole).double()).max())
            + bool(rows.whole.any()),
        )
        return _Part(rows, keys, stays, load)

    def _timed(self, load: model.Load, backward: bool) -> tuple[int, float]:
        """Returns how many KV heads are computed at a time, and the seconds of the pass."""
        shape = self._shape
        heads = min(shape.heads_k, load.nheads_k) or model.best_heads(
            load, backward, shape.link, shape.starts_k[-1]
        )
        return heads, model.seconds(load, backward, heads, shape.link)

    # --- the part of one rank ---------------------------------------------------------------------

    def plan(self, rank: int) -> Plan:
        """Returns what a rank does."""
        choice = self._choice
        first, second = choice.parts
        forward = self._pass(first, choice.degree, rank)
        backward = forward
        if second is not first:
            backward = self._pass(second, choice.degree, rank)
        if backward.keys is not None:
            backward = self._with_gradients(backward, second, choice.degree, rank)
        return Plan(
            choice.degree,
            self._local(choice, rank),
            forward._replace(heads=choice.heads[0]),
            backward._replace(heads=choice.heads[1]),
            choice.seconds,
            {name: one.seconds for name, one in self._choices.items() if name != self._best},
            int(((choice.team_of >= 0) & (choice.local < 0)).sum()),
        )

    def _local(self, choice: _Choice, rank: int) -> tuple[Call, ...]:
        sequence = (choice.local == rank).nonzero().flatten()
        rows, keys = (
            (own.at[own.rank == rank], own.begin[own.rank == rank])
            for own in (self._own_q, self._own_k)
        )
        at_q, at_k = (
            _place(starts[sequence], *own)
            for starts, own in ((self._starts_q, rows), (self._starts_k, keys))
        )
        zero = torch.zeros_like(sequence)
        return self._calls(
            sequence,
            (at_q, self._starts_q[sequence], self._starts_q[sequence + 1]),
            (at_k, zero, self._lengths_k[sequence]),
        )

    def _pass(self, part: _Part, degree: int, rank: int) -> Pass:
        """Returns what travels to a rank, and its calls on it."""
        shape, (rows, keys, stays, _) = self._shape, part
        team, wanted = rank // degree, keys.wanted
        if not wanted.rank.numel():
            return Pass(None, None, (), 1)
        way = None
        if not stays:
            room = int((rows.end - rows.begin)[rows.team == team].sum())
            pairs = _pairs(self._own_q, rows.team, rows.begin, rows.end, rows.at)
            way = _route(pairs, shape.ranks, degree, rank, room)
        pairs = _pairs(self._own_k, wanted.rank, wanted.begin, wanted.end, wanted.at)
        keys_way = _route(pairs, shape.ranks, degree, rank, int(keys.room[team]))
        calls = self._calls_of(part, (rows.team == team) & (rows.level < 0))
        return Pass(way, keys_way, calls, 1)

    def _calls_of(self, part: _Part, some: Numbers) -> tuple[Call, ...]:
        """Returns the calls of some pieces of rows of one team."""
        rows, keys = part.rows.select(some), part.keys
        at = rows.at
        if part.stays:
            # Pieces that lie one after another in a sequence do so in the tensor.
            found = overlaps(self._own_q, rows.begin, rows.end)
            places = self._own_q.at[found.part] + found.begin - self._own_q.begin[found.part]
            at = torch.full_like(at, 2**62).scatter_reduce(0, found.want, places, "amin")
        return self._calls(
            rows.sequence,
            (at, rows.begin, rows.end),
            (keys.at[some], keys.first[some], keys.end[some]),
        )

    def _with_gradients(self, result: Pass, part: _Part, degree: int, rank: int) -> Pass:
        """Adds how dk and dv of whole sequences travel, the runs of a rank, and their sums."""
        chunk, team = self._shape.chunk, rank // degree
        rows, keys = part.rows, part.keys
        whole = ~keys.cut
        if bool(whole.any()):
            wanted = keys.wanted.select(whole)
            pairs = _pairs(self._own_k, wanted.rank, wanted.begin, wanted.end, wanted.at)
            way = _route(pairs, self._shape.ranks, degree, rank, 0)
            result = result._replace(whole=way.back, whole_room=int(keys.whole_room[team]))
        here = rows.team == team
        is_run = (rows.level >= 0) & (keys.begin < keys.end)
        if not bool(is_run.any()):
            return result
        length = (keys.end - keys.begin) * is_run
        sums_at = _stored(rows.team, length)
        own = []
        for number in (is_run & here).nonzero().flatten().tolist():
            one = torch.zeros_like(is_run)
            one[number] = True
            (call,) = self._calls_of(part, one)
            first, low, high = (int(side[number]) for side in keys[:3])
            at = int(sums_at[number])
            own.append(Run(call, slice(low - first, high - first), slice(at, at + high - low)))
        run = is_run.nonzero().flatten()
        sequence, level = rows.sequence[run], rows.level[run]
        index = (rows.begin[run] - self._starts_q[sequence]) // chunk >> level
        begin, end = (self._starts_k[sequence] + side[run] for side in (keys.begin, keys.end))
        pairs = _pairs(self._own_k, rows.team[run], begin, end, sums_at[run])
        # On this rank, the keys of each piece have a place for the sums of each run.
        pieces = self._pieces(self._own_k.select(self._own_k.rank == rank), self._starts_k, 1)
        parts = Layout(pieces.sequence, pieces.begin, pieces.end, pieces.at)
        found = overlaps(parts, begin, end)
        slots: dict[int, list[tuple[Node, int]]] = {}
        shift, room = [], 0
        for piece, which in zip(found.part.tolist(), found.want.tolist(), strict=True):
            slots.setdefault(piece, []).append(((int(level[which]), int(index[which])), room))
            shift.append(room - int(pieces.begin[piece]))
            room += int(pieces.end[piece] - pieces.begin[piece])
        own_k = self._own_k.select(self._own_k.rank == rank)
        starts = _place(pieces.begin, own_k.at, own_k.begin)
        arrivals = tuple(
            Arrival(
                slice(
                    int(starts[piece]), int(starts[piece] + pieces.end[piece] - pieces.begin[piece])
                ),
                -(-int(self._lengths_q[pieces.sequence[piece]]) // chunk),
                tuple(sums),
            )
            for piece, sums in slots.items()
        )
        mine = Pairs(
            torch.full_like(found.want, rank),
            found.begin + torch.tensor(shift, dtype=torch.long),
            rows.team[run][found.want],
            sums_at[run][found.want] + found.begin - begin[found.want],
            found.end - found.begin,
        )
        others = pairs.rank != rank
        every = Pairs(*(torch.cat([a[others], b]) for a, b in zip(pairs, mine, strict=True)))
        way = _route(every, self._shape.ranks, degree, rank, 0)
        return result._replace(
            runs=tuple(own),
            sums=way.back._replace(room=room),
            sums_sent=int(length[here].sum()),
            arrivals=arrivals,
        )

    def _stays(self, degree: int, rows: Rows) -> bool:
        """Returns whether all rows are where they are computed."""
        if degree > 1:
            return False
        found = overlaps(self._own_q, rows.begin, rows.end)
        return bool((self._own_q.rank[found.part] == rows.team[found.want]).all())

    def _keys(self, rows: Rows, teams: int) -> Keys:
        """Finds the keys that rows see; pieces of a sequence that see the same ones share them."""
        begin, end = self._seen(rows.sequence, rows.begin, rows.end)
        base, cut = self._starts_k[rows.sequence], ~rows.whole
        first = torch.where(begin < end, begin // self._shape.align * self._shape.align, begin)
        some = (begin < end).nonzero().flatten()
        group = (2 * rows.team + cut)[some] * self._total
        order = some[(group + (base + first)[some]).argsort()]
        group = ((2 * rows.team + cut) * self._total)[order]
        ends = (group + (base + end)[order]).cummax(0).values
        new = torch.ones(order.numel(), dtype=torch.bool)
        new[1:] = (rows.sequence[order][1:] != rows.sequence[order][:-1]) | (
            group[1:] + (base + first)[order][1:] > ends[:-1]
        )
        new[1:] |= group[1:] != group[:-1]
        number = new.cumsum(0) - 1
        count = int(new.sum())
        heads = order[new]
        team, low, is_cut = rows.team[heads], (base + first)[heads], cut[heads]
        big = torch.full((count,), 2**62)
        from_ = big.scatter_reduce(0, number, (base + begin)[order], "amin")
        to = torch.zeros(count, dtype=torch.long).scatter_reduce(
            0, number, (base + end)[order], "amax"
        )
        length = to - low
        at = _stored(team, length)
        at_of_rows = torch.zeros_like(first)
        at_of_rows[order] = at[number] + (base + first)[order] - low[number]
        wanted = Layout(team, from_, to, at + from_ - low)
        room, whole_room = (
            torch.zeros(teams, dtype=torch.long).index_add(0, team, length * part)
            for part in (torch.ones_like(is_cut), ~is_cut)
        )
        return Keys(first, begin, end, at_of_rows, wanted, is_cut, room, whole_room)

    def _calls(
        self,
        sequence: Numbers,
        rows: tuple[Numbers, Numbers, Numbers],
        keys: tuple[Numbers, Numbers, Numbers],
    ) -> tuple[Call, ...]:
        """Makes calls; neighbours with the same mask share one.

        Pieces without rows or keys need none: their results are 0 (+inf for softmax_lse).

        Args:
            sequence: of each piece.
            rows: place, first token and last + 1.
            keys: place, first position and last + 1.
        """
        shape = self._shape
        (at, begin, end), (key_at, first, key_end) = rows, keys
        some = (begin < end) & (first < key_end)
        sequence, at, begin, end, key_at, first, key_end = (
            one[some] for one in (sequence, at, begin, end, key_at, first, key_end)
        )
        if not sequence.numel():
            return ()
        # Position of the key after the last one, relative to that of the row after the last.
        offset = self._lengths_k[sequence] - self._lengths_q[sequence]
        shift = key_end - (end - self._starts_q[sequence] + offset)
        if shape.left < 0 and shape.right < 0:
            shift = torch.zeros_like(shift)
        length, key_length = end - begin, key_end - first
        new = torch.ones(sequence.numel(), dtype=torch.bool)
        new[1:] = (
            (shift[1:] != shift[:-1])
            | (at[1:] != (at + length)[:-1])
            | (key_at[1:] != (key_at + key_length)[:-1])
        )
        edges = [*new.nonzero().flatten().tolist(), sequence.numel()]
        made = []
        for low, high in itertools.pairwise(edges):
            starts_q, starts_k = (
                (0, *one[low:high].cumsum(0).tolist()) for one in (length, key_length)
            )
            row, key, moved = int(at[low]), int(key_at[low]), int(shift[low])
            mask = Mask(
                shape.left if shape.left < 0 else shape.left + moved,
                shape.right if shape.right < 0 else shape.right - moved,
            )
            places = slice(row, row + starts_q[-1]), slice(key, key + starts_k[-1])
            made.append(Call(*places, starts_q, starts_k, mask))
        return tuple(made)


def _clamped(begin: Numbers, end: Numbers, most: Numbers) -> Numbers:
    """Returns the sum of [begin, end), with each number clamped to [0, most]."""
    low, high = (torch.minimum(one.clamp(min=0), most) for one in (begin, end))
    return (high - low) * (low + high - 1) // 2 + most * (
        end.clamp(min=0) - torch.maximum(begin, most).clamp(min=0)
    ).clamp(min=0)


def _stored(team: Numbers, length: Numbers) -> Numbers:
    """Returns where pieces begin that each team stores one after another."""
    ends = length.cumsum(0)
    begins = ends - length
    if not team.numel():
        return begins
    base = torch.full((int(team.max()) + 1,), 2**62).scatter_reduce(0, team, begins, "amin")
    return begins - base[team]


def _place(token: Numbers, at: Numbers, begin: Numbers) -> Numbers:
    """Returns where tokens are in a tensor with pieces from `begin` on, stored from `at` on."""
    order = begin.argsort()
    piece = (
        order[torch.searchsorted(begin[order], token, right=True) - 1] if token.numel() else token
    )
    return at[piece] + token - begin[piece]


def _pairs(own: Layout, team: Numbers, begin: Numbers, end: Numbers, at: Numbers) -> Pairs:
    """Finds the tokens that teams want, where they are and where they go."""
    found = overlaps(own, begin, end)
    return Pairs(
        own.rank[found.part],
        own.at[found.part] + found.begin - own.begin[found.part],
        team[found.want],
        at[found.want] + found.begin - begin[found.want],
        found.end - found.begin,
    )


def _route(pairs: Pairs, ranks: int, degree: int, rank: int, room: int) -> Route:
    """Returns a rank's part of an exchange from the ranks that have tokens to teams."""
    after = pairs.length[:-1]
    joined = torch.zeros(pairs.rank.numel() + 1, dtype=torch.bool)
    joined[1:-1] = (
        (pairs.rank[1:] == pairs.rank[:-1])
        & (pairs.team[1:] == pairs.team[:-1])
        & (pairs.rank_at[1:] == pairs.rank_at[:-1] + after)
        & (pairs.team_at[1:] == pairs.team_at[:-1] + after)
    )
    length = pairs.length.cumsum(0)[~joined[1:]].diff(prepend=torch.zeros(1, dtype=torch.long))
    first = ~joined[:-1]
    pairs = pairs._replace(
        rank=pairs.rank[first],
        rank_at=pairs.rank_at[first],
        team=pairs.team[first],
        team_at=pairs.team_at[first],
    )
    mine, here = pairs.rank == rank, pairs.team == rank // degree
    sent = _by(pairs.team[mine], pairs.rank_at[mine], length[mine], ranks // degree)
    received = _by(pairs.rank[here], pairs.team_at[here], length[here], ranks)
    return Route(tuple(sent[to // degree] for to in range(ranks)), tuple(received), room)


def _by(other: Numbers, at: Numbers, length: Numbers, count: int) -> list[Places]:
    """Sorts pieces by the other side."""
    order = other.argsort(stable=True)
    counts = torch.bincount(other, minlength=count).tolist()
    parts = (torch.split_with_sizes(one[order], counts) for one in (at, length))
    return [Places(*one) for one in zip(*parts, strict=True)]
