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
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..types import Lengths, Options
from . import model
from .exchange import Key, Places, Route, stream_of
from .layout import Layout, Numbers, dense_layout, overlaps, packed_layout

# A multiple of the keys per block of every kernel, forward and backward.
KEY_BLOCK = 128
_FAR = 2**62


@dataclass(frozen=True)
class Shape:
    """All that a plan depends on."""

    starts_q: tuple[int, ...]  # values of cu_seqlens_q, of all ranks; dense: made from the lengths
    starts_k: tuple[int, ...]  # likewise
    dense: bool  # whether the tensors are (batch, seqlen, nheads, head_dim)
    tokens_q: int  # on each rank
    tokens_k: int  # likewise
    ranks: int  # their number
    order: str  # of the tokens
    left: int  # keys that a row sees before its position; -1: all
    right: int  # likewise after it
    align: int  # the keys of a call begin at multiples of this
    chunk: int  # rows of a leaf of the tree
    nheads: int  # query heads
    nheads_k: int  # KV heads
    head_dim: int  # of q, k and v
    itemsize: int = 2  # bytes of their elements
    degree: int = 0  # ranks over which heads are divided; 0: the planner chooses
    heads_k: int = 0  # KV heads computed at a time; 0: the planner chooses
    one_machine: bool = True  # whether all ranks are on one

    @functools.cached_property
    def has_blind_rows(self) -> bool:
        """Whether a row sees no key."""
        lengths_q, lengths_k = (torch.tensor(one).diff() for one in (self.starts_q, self.starts_k))
        seen = lengths_k  # by the first row
        if self.right >= 0:
            seen = torch.minimum(seen, lengths_k - lengths_q + 1 + self.right)
        return bool(((lengths_q > 0) & (seen <= 0)).any())

    @property
    def link(self) -> model.Link:
        """Returns what is between the ranks."""
        return model.NVLINK if self.one_machine else model.NETWORK

    def layouts(self) -> tuple[Layout, Layout]:
        """Returns where the ranks have the tokens of q, and those of k and v."""
        q = self._layout(self.starts_q, self.tokens_q, "q")
        if (self.starts_q, self.tokens_q) == (self.starts_k, self.tokens_k):
            return q, q
        return q, self._layout(self.starts_k, self.tokens_k, "k")

    def _layout(self, starts: tuple[int, ...], tokens: int, name: str) -> Layout:
        if not self.dense:
            return packed_layout(starts, tokens, self.ranks, self.order, f"cu_seqlens_{name}")
        batch = len(starts) - 1
        return dense_layout(batch, tokens // max(batch, 1), self.ranks, self.order, name)


class Mask(NamedTuple):
    """A row sees keys from `left` before to `right` after its position; -1: no limit."""

    left: int
    right: int


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a packed op."""

    rows: slice  # in the tensor of rows
    keys: slice  # in the tensor of keys
    starts_q: tuple[int, ...]  # values of cu_seqlens_q
    starts_k: tuple[int, ...]  # values of cu_seqlens_k
    mask: Mask  # of the call
    _given: dict[tuple[Key, Options], tuple[Lengths, Options]] = field(default_factory=dict)

    def given(self, device: torch.device, options: Options) -> tuple[Lengths, Options]:
        """Returns the arguments of the op; kept, as each copy to a GPU makes the host wait."""
        key = stream_of(device), options
        found = self._given.get(key)
        if found is None:
            sides = self.starts_q, self.starts_k
            q, k = (torch.tensor(one, dtype=torch.int32, device=device) for one in sides)
            longest = [max(b - a for a, b in itertools.pairwise(one)) for one in sides]
            own = options._replace(window_left=self.mask.left, window_right=self.mask.right)
            found = self._given[key] = Lengths(q, k, longest[0], longest[1]), own
        return found


Node = tuple[int, int]  # (n, i): the i-th run of 2^n chunks


class Run(NamedTuple):
    """An aligned run of chunks that this rank computes, and the keys that its rows see in it."""

    call: Call
    keys: slice


class Part(NamedTuple):
    """Sums of a run for some keys, in the messages of the run's team, or in a run of this rank."""

    node: Node  # of the run
    team: int  # that computes it
    at: int  # of its dk in a message; those of dv are as many further as the message has keys
    run: int  # of this rank; -1: of another
    here: int  # place in the keys of that run's call


class Arrival(NamedTuple):
    """The sums for keys that are all seen by the same runs."""

    keys: slice  # in this rank's tensors
    chunks: int  # of the sequence
    parts: tuple[Part, ...]  # of each run


class Sums(NamedTuple):
    """How sums of runs go to the ranks of the keys."""

    # pieces of messages, in their order: rank, dk (0) or dv (1), run, and keys of the run's call
    sent: tuple[tuple[int, int, int, slice], ...]
    counts: tuple[list[int], list[int]]  # keys of the message to each rank, and of that from each
    arrivals: tuple[Arrival, ...]  # of sums, those of this rank too


class Pass(NamedTuple):
    """The forward or the backward of one rank."""

    rows: Route | None  # how rows come to the ranks that compute them; None: they stay
    keys: Route | None  # how keys come; None: no rank needs any
    calls: tuple[Call, ...]  # on whole sequences, or, in the forward, all calls
    heads: int  # KV heads at a time
    whole: Route | None = None  # how dk and dv of whole sequences go back
    whole_room: int = 0  # keys of these, the first ones of those that came
    runs: tuple[Run, ...] = ()  # of chunks of the others, in the backward
    sums: Sums | None = None  # what becomes of their sums


class Plan(NamedTuple):
    """What one rank does in a call."""

    degree: int  # ranks over which heads are divided
    local: tuple[Call, ...]  # calls on sequences that lie entirely on this rank
    forward: Pass  # of the others
    backward: Pass  # likewise
    seconds: tuple[float, float]  # that the model expects of forward and backward
    others: dict[str, tuple[float, float]]  # the same for what was not chosen
    moves: int  # sequences that come to one team


class Rows(NamedTuple):
    """Pieces of rows of sequences, with the team that computes them; whole sequences first."""

    team: Numbers  # of each piece
    sequence: Numbers  # likewise
    begin: Numbers  # token
    end: Numbers  # likewise
    level: Numbers  # n of the run of 2^n chunks; -1: none
    whole: Numbers  # whether it is all of its sequence
    at: Numbers  # where the team's rows have it

    def select(self, which: Numbers) -> Rows:
        """Returns some pieces: a mask, or their numbers."""
        if which.dtype == torch.bool:
            which = which.nonzero().flatten()
        return Rows(*(one.index_select(0, which) for one in self))


class Keys(NamedTuple):
    """The keys of pieces of rows."""

    first: Numbers  # position in the sequence where the call's keys begin, for each piece of rows
    begin: Numbers  # first key that is seen
    end: Numbers  # after the last one
    at: Numbers  # where the team's keys have `first`
    wanted: Wanted  # tokens that teams need: team, begin, end, and where the team's keys have them
    cut: Numbers  # of each of these, whether its sequence is cut
    room: Numbers  # keys of each team, gaps included
    whole_room: Numbers  # of whole sequences alone


class Wanted(NamedTuple):
    """Tokens that teams need, and where these have them."""

    team: Numbers
    begin: Numbers
    end: Numbers
    at: Numbers


@functools.lru_cache(maxsize=16)
def plan_of(shape: Shape, rank: int) -> Plan:
    """Plans a call; see `layout` for the errors of lengths that do not fit."""
    return _planner_of(shape).plan(rank)


@functools.lru_cache(maxsize=4)
def _planner_of(shape: Shape) -> _Planner:
    return _Planner(shape)


class _Half(NamedTuple):
    """The forward or the backward of a choice."""

    rows: Rows
    keys: Keys
    stays: bool  # whether all rows are where they are computed
    load: model.Load


class _Choice(NamedTuple):
    """One way to divide a call."""

    degree: int
    local: Numbers  # for each sequence, its only rank; -1: none
    moves: int
    halves: tuple[_Half, _Half]
    heads: tuple[int, int]
    seconds: tuple[float, float]


class _Planner:
    """Plans the calls of all ranks for one shape."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._own_q, self._own_k = shape.layouts()
        self._starts_q, self._starts_k = map(torch.tensor, (shape.starts_q, shape.starts_k))
        self._lengths_q, self._lengths_k = self._starts_q.diff(), self._starts_k.diff()
        self._total = max(shape.starts_q[-1], shape.starts_k[-1]) + shape.align + 1
        sequences = torch.arange(self._lengths_q.numel())
        self._work_of_each = self._work(sequences, *self._ends(sequences))
        self._choices: dict[str, _Choice] = {}
        common = math.gcd(shape.ranks, shape.nheads_k)
        for degree in [shape.degree] if shape.degree else sorted({common, 1}, reverse=True):
            self._choose(degree)
        # Among equals, the one that divides heads most.
        self._best = next(iter(self._choices))
        for name, choice in self._choices.items():
            if sum(choice.seconds) < 0.99 * sum(self._choices[self._best].seconds):
                self._best = name

    # --- who computes what ------------------------------------------------------------------------

    def _choose(self, degree: int) -> None:
        """Adds the ways to divide a call for one degree."""
        teams = self._shape.ranks // degree
        pieces = self._own_q.of_teams(degree)
        home = self._home(pieces)
        local = torch.full_like(home, -1)
        if degree == 1:
            same = home >= 0
            if self._own_k is not self._own_q:
                same &= self._home(self._own_k) == home
            local[same] = home[same]
        of_sequence, at_one = self._work_of_each, home.clamp(min=0)
        divided = (home < 0) & (of_sequence > 0)
        mean = float(of_sequence.sum()) / teams
        at_home = _summed(teams, at_one, of_sequence * (local >= 0))
        loads = _summed(teams, at_one, of_sequence * (home >= 0))
        short = divided & (of_sequence <= mean / 4)
        words = [f"heads over {degree} ranks"] * (degree > 1)
        # Short sequences come to one team in any case.
        for name, moving in (("cut", short), ("whole", divided)):
            if name == "whole" and torch.equal(moving, short):
                continue
            team_of = home.clone()
            if moving.any():
                cut = pieces.select((divided & ~moving)[pieces.sequence])
                work = self._work(cut.sequence, cut.begin, cut.end)
                rest = loads.index_add(0, cut.rank, work)
                fullest = self._assign(moving, of_sequence, rest, team_of)
                if name == "whole" and fullest > 1.15 * mean:
                    continue
            stays = degree == 1 and not bool(moving.any())
            rows = self._rows(pieces, team_of, local)
            chunks, chunks_stay = self._chunks(rows, at_home)
            forward = self._half(degree, rows, stays, at_home)
            backward = forward
            if chunks is not rows:
                backward = self._half(degree, chunks, stays and chunks_stay, at_home)
            heads, time = self._timed(forward.load, False)
            heads_bwd, time_bwd = self._timed(backward.load, True)
            moves = int(((team_of >= 0) & (local < 0)).sum())
            self._choices[", ".join(words + [f"long sequences {name}"] * (teams > 1))] = _Choice(
                *(degree, local, moves, (forward, backward)), (heads, heads_bwd), (time, time_bwd)
            )

    def _home(self, pieces: Layout) -> Numbers:
        """Returns for each sequence the rank or team that has all of it; -1: several, or none."""
        count = self._lengths_q.numel()
        low, high = (
            torch.full((count,), none).scatter_reduce(0, pieces.sequence, pieces.rank, how)
            for none, how in ((self._shape.ranks, "amin"), (-1, "amax"))
        )
        return torch.where(low == high, low, -1)

    def _shift(self, sequence: Numbers) -> Numbers:
        """Returns what a token of q lacks to its position among the keys."""
        return self._lengths_k[sequence] - self._lengths_q[sequence] - self._starts_q[sequence]

    def _seen(self, rows: Rows) -> tuple[Numbers, Numbers]:
        """Returns the first and the last key + 1, by position, that rows see."""
        length, shift = self._lengths_k[rows.sequence], self._shift(rows.sequence)
        last, first = length, torch.zeros_like(length)
        if self._shape.right >= 0:
            last = torch.minimum((rows.end + shift + self._shape.right).clamp(min=0), length)
        if self._shape.left >= 0:
            first = torch.minimum((rows.begin + shift - self._shape.left).clamp(min=0), last)
        return first, last

    def _work(self, sequence: Numbers, begin: Numbers, end: Numbers) -> Numbers:
        """Returns how many pairs of a row and a key pieces of rows have."""
        length, shift = self._lengths_k[sequence], self._shift(sequence)
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
        if loads.numel() == 1:
            team_of[moving] = 0
            return float(loads + work[moving].sum())
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
        return float(max(heap)[0])

    def _rows(self, pieces: Layout, team_of: Numbers, local: Numbers) -> Rows:
        """Returns the rows of the forward: whole sequences where a team gets them."""
        sequences = ((team_of >= 0) & (local < 0) & (self._lengths_q > 0)).nonzero().flatten()
        cut = pieces.select(team_of[pieces.sequence] < 0)
        whole = team_of[sequences], sequences, *self._ends(sequences)
        rows: Any = [torch.cat(pair) for pair in zip(whole, cut[:4], strict=True)]
        rows.append(torch.full_like(rows[0], -1))
        return self._laid(*rows)

    def _ends(self, sequences: Numbers) -> tuple[Numbers, Numbers]:
        return self._starts_q[sequences], self._starts_q[sequences + 1]

    def _laid(
        self, team: Numbers, sequence: Numbers, begin: Numbers, end: Numbers, level: Numbers
    ) -> Rows:
        """Orders pieces, whole sequences first, and stores them one after another."""
        first, last = self._ends(sequence)
        whole = (begin == first) & (end == last)
        order = ((2 * team + ~whole) * self._total + begin).argsort()
        pieces: Any = [one[order] for one in (team, sequence, begin, end, level, whole)]
        pieces.append(_stored(pieces[0], pieces[3] - pieces[2]))
        return Rows(*pieces)

    def _chunks(self, rows: Rows, loads: Numbers) -> tuple[Rows, bool]:
        """Returns the rows of the backward: those of cut sequences in aligned runs of chunks.

        And whether no chunk lies on several teams.
        """
        chunk = self._shape.chunk
        cut = rows.select(~rows.whole)
        if not cut.team.numel():
            return rows, True
        work_of_whole = self._work(rows.sequence, rows.begin, rows.end) * rows.whole
        loaded = loads.index_add(0, rows.team, work_of_whole).tolist()
        holders: dict[tuple[int, int], set[int]] = {}
        starts, ends = self._starts_q[:-1].tolist(), self._starts_q[1:].tolist()
        for team, of, low, high in zip(*(one.tolist() for one in cut[:4]), strict=True):
            for number in range((low - starts[of]) // chunk, -((starts[of] - high) // chunk)):
                holders.setdefault((of, number), set()).add(team)
        order = sorted(holders)
        sequence, index = torch.tensor(order).unbind(1)
        begin = self._starts_q[sequence] + index * chunk
        end = torch.minimum(begin + chunk, self._starts_q[sequence + 1])
        work = dict(zip(order, self._work(sequence, begin, end).tolist(), strict=True))
        owner = {}
        # Chunks of one team stay there; others go to the emptier of theirs.
        for one in sorted(order, key=lambda one: (len(holders[one]) > 1, -work[one], one)):
            team = min(holders[one], key=lambda team: (loaded[team], team))
            loaded[team] += work[one]
            owner[one] = team
        runs = []
        for (of, team), group in itertools.groupby(order, key=lambda one: (one[0], owner[one])):
            indices = [index for _, index in group]
            first, last = indices[0], indices[-1] + 1
            ends_here = last * chunk >= ends[of] - starts[of]
            while first < last:
                level = 0
                # Behind the sequence there are as many chunks as needed.
                while first % (2 << level) == 0 and (
                    first + (2 << level) <= last or (ends_here and first + (1 << level) < last)
                ):
                    level += 1
                begin_ = starts[of] + first * chunk
                runs.append((team, of, begin_, min(begin_ + (chunk << level), ends[of]), level))
                first += 1 << level
        found = torch.tensor(runs).unbind(1)
        whole = rows.select(rows.whole)
        pieces: Any = (torch.cat(pair) for pair in zip(whole[:5], found, strict=True))
        return self._laid(*pieces), all(len(one) == 1 for one in holders.values())

    def _keys(self, rows: Rows, teams: int) -> Keys:
        """Finds the keys that rows see; pieces of a sequence that see the same ones share them."""
        begin, end = self._seen(rows)
        base, cut = self._starts_k[rows.sequence], ~rows.whole
        first = torch.where(begin < end, begin // self._shape.align * self._shape.align, begin)
        group = (2 * rows.team + cut) * self._total
        order = (begin < end).nonzero().flatten()  # as rows ascend, so do their keys
        low, seen, to, group_ = (
            one[order] for one in (base + first, base + begin, base + end, group)
        )
        ends = (group_ + to).cummax(0).values
        new = torch.ones(order.numel(), dtype=torch.bool)
        new[1:] = (rows.sequence[order].diff() != 0) | (group_.diff() != 0)
        new[1:] |= (group_ + low)[1:] > ends[:-1]
        number = new.cumsum(0) - 1
        team, start, is_cut = rows.team[order][new], low[new], cut[order][new]
        seen = torch.full_like(start, _FAR).scatter_reduce(0, number, seen, "amin")
        to = torch.zeros_like(start).scatter_reduce(0, number, to, "amax")
        length = to - start
        at = _stored(team, length)
        at_of_rows = torch.zeros_like(first)
        at_of_rows[order] = at[number] + low - start[number]
        wanted = Wanted(team, seen, to, at + seen - start)
        room, whole_room = (_summed(teams, team, one) for one in (length, length * ~is_cut))
        return Keys(first, begin, end, at_of_rows, wanted, is_cut, room, whole_room)

    def _half(self, degree: int, rows: Rows, stays: bool, at_home: Numbers) -> _Half:
        """Finds the keys of rows, and what the fullest rank computes and gets."""
        shape = self._shape
        teams = shape.ranks // degree
        keys = self._keys(rows, teams)

        def most(team: Numbers, count: Numbers) -> float:
            return float(_summed(teams, team, count).max())

        others = 1 - 1 / shape.ranks
        needed = keys.wanted.end - keys.wanted.begin
        pairs = at_home.index_add(0, rows.team, self._work(rows.sequence, rows.begin, rows.end))
        load = model.Load(
            pairs=float(pairs.max()),
            nheads=shape.nheads // degree,
            nheads_k=shape.nheads_k // degree,
            head_dim=shape.head_dim,
            moved_q=0.0 if stays else most(rows.team, rows.end - rows.begin) * others,
            moved_k=most(keys.wanted.team, needed) * others,
            sums=most(rows.team, (keys.end - keys.begin) * (rows.level >= 0)) * others,
            whole=most(keys.wanted.team, needed * ~keys.cut) * others,
            itemsize=shape.itemsize,
            launches=most(rows.team, (~rows.whole).long()) + bool(rows.whole.any()),
        )
        return _Half(rows, keys, stays, load)

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
        choice = self._choices[self._best]
        first, second = choice.halves
        forward = backward = self._pass(first, choice.degree, rank)
        if second is not first:
            backward = self._pass(second, choice.degree, rank)
        if backward.keys is not None:
            backward = self._with_gradients(backward, second, choice.degree, rank)
        others = {name: one.seconds for name, one in self._choices.items() if name != self._best}
        return Plan(
            choice.degree,
            self._local(choice, rank),
            forward._replace(heads=choice.heads[0]),
            backward._replace(heads=choice.heads[1]),
            choice.seconds,
            others,
            choice.moves,
        )

    def _local(self, choice: _Choice, rank: int) -> tuple[Call, ...]:
        sequence = (choice.local == rank).nonzero().flatten()
        begin, end = self._ends(sequence)
        rows = self._own_q.place(begin), begin, end
        zero, keys_at = torch.zeros_like(sequence), self._own_k.place(self._starts_k[sequence])
        return self._calls(sequence, rows, (keys_at, zero, self._lengths_k[sequence]))

    def _pass(self, half: _Half, degree: int, rank: int) -> Pass:
        """Returns what travels to a rank, and its calls on it."""
        rows, keys, stays, _ = half
        team = rank // degree
        if not keys.wanted.team.numel():
            return Pass(None, None, (), 1)
        calls = self._calls_of(half, (rows.team == team) & (rows.level < 0))
        way = None
        if not stays:
            room = int((rows.end - rows.begin)[rows.team == team].sum())
            wanted = Wanted(rows.team, rows.begin, rows.end, rows.at)
            way = self._route(self._own_q, wanted, degree, rank, room)
            if self._own_k is self._own_q and all(map(torch.equal, wanted, keys.wanted)):
                return Pass(way, way, calls, 1)
        keys_way = self._route(self._own_k, keys.wanted, degree, rank, int(keys.room[team]))
        return Pass(way, keys_way, calls, 1)

    def _route(self, own: Layout, wanted: Wanted, degree: int, rank: int, room: int) -> Route:
        """Returns a rank's part of an exchange from the ranks that have tokens to teams.

        Rows that a rank sends to itself are the last ones sent, and the first ones received.
        """
        ranks, team = self._shape.ranks, rank // degree
        mine = own.select(own.rank == rank)
        found = overlaps(mine, wanted.begin, wanted.end)
        length = found.end - found.begin
        members = torch.arange(degree)
        to = (wanted.team[found.want, None] * degree + members).flatten()
        at = (mine.at[found.part] + found.begin - mine.begin[found.part]).repeat_interleave(degree)
        head = members.repeat(length.numel())
        last = torch.where(to == rank, ranks, to)
        length = length.repeat_interleave(degree)
        sent = _places(ranks, to, last, at, length, head, degree)
        wanted = Wanted(*(one[wanted.team == team] for one in wanted))
        found = overlaps(own, wanted.begin, wanted.end)
        at = wanted.at[found.want] + found.begin - wanted.begin[found.want]
        by = own.rank[found.part]
        received = _places(ranks, by, torch.where(by == rank, -1, by), at, found.end - found.begin)
        return Route(sent, received, room)

    def _calls_of(self, half: _Half, some: Numbers) -> tuple[Call, ...]:
        """Returns the calls of some pieces of rows of one team."""
        rows, keys = half.rows.select(some), half.keys
        at = self._own_q.place(rows.begin) if half.stays else rows.at
        sides = (at, rows.begin, rows.end), (keys.at[some], keys.first[some], keys.end[some])
        return self._calls(rows.sequence, *sides)

    def _with_gradients(self, result: Pass, half: _Half, degree: int, rank: int) -> Pass:
        """Adds how dk and dv of whole sequences travel, the runs of a rank, and their sums."""
        rows, keys = half.rows, half.keys
        team, whole = rank // degree, ~keys.cut
        if bool(whole.all()):
            assert result.keys is not None
            result = result._replace(whole=result.keys.back, whole_room=int(keys.room[team]))
        elif bool(whole.any()):
            wanted = Wanted(*(one[whole] for one in keys.wanted))
            way = self._route(self._own_k, wanted, degree, rank, 0).back
            result = result._replace(whole=way, whole_room=int(keys.whole_room[team]))
        run = ((rows.level >= 0) & (keys.begin < keys.end)).nonzero().flatten()
        if not run.numel():
            return result
        first, begin, end = (side[run] for side in keys[:3])
        own = []
        for number in (rows.team[run] == team).nonzero().flatten().tolist():
            (call,) = self._calls_of(half, run[number : number + 1])
            low, high = (int(side[number] - first[number]) for side in (begin, end))
            own.append(Run(call, slice(low, high)))
        base = self._starts_k[rows.sequence[run]]
        sides = base + first, base + begin, base + end
        sums = self._sums(rows.select(run), *sides, degree, rank)
        return result._replace(runs=tuple(own), sums=sums)

    def _sums(
        self, runs: Rows, first: Numbers, begin: Numbers, end: Numbers, degree: int, rank: int
    ) -> Sums:
        """Plans the sums of runs of all teams.

        Args:
            runs: their rows.
            first: token at which the keys of each run's call begin.
            begin: first token that each sees.
            end: after the last one.
            degree: ranks of a team.
            rank: whose part it is.
        """
        ranks, chunk, team, own = self._shape.ranks, self._shape.chunk, rank // degree, self._own_k
        found = overlaps(own, begin, end)
        by, to, length = runs.team[found.want], own.rank[found.part], found.end - found.begin
        message = by * ranks + to
        order = message.argsort(stable=True)
        at = torch.empty_like(order)
        at[order] = _stored(message[order], length[order])
        counts = _summed(ranks // degree * ranks, message, length).view(-1, ranks)
        here = runs.team == team
        number = torch.where(here, here.cumsum(0) - 1, -1)  # among the runs of this rank
        leaving = ((by == team) & (to != rank)).nonzero().flatten()
        low = found.begin - first[found.want]
        leaving = leaving[(to[leaving] * self._total + at[leaving]).argsort()]
        columns = to, number[found.want], low, low + length
        pieces = [*zip(*(one[leaving].tolist() for one in columns), strict=True)]
        sent = tuple(
            (other, side, run, slice(low_, high))
            for other, of_rank in itertools.groupby(pieces, key=lambda one: one[0])
            for side, (_, run, low_, high) in itertools.product(range(2), [*of_rank])
        )
        # Pieces of keys that are all seen by the same runs.
        mine = (own.rank == rank).nonzero().flatten()
        borders = torch.unique(torch.cat([begin, end]))  # type: ignore[no-untyped-call, unused-ignore]
        cut = overlaps(own.select(mine), borders[:-1], borders[1:])
        part, low, high = mine[cut.part], cut.begin, cut.end
        sees = (begin <= low[:, None]) & (high[:, None] <= end)
        keys, run = sees.nonzero().unbind(1)
        pairs = found.want * own.rank.numel() + found.part
        pair = torch.searchsorted(pairs, run * own.rank.numel() + part[keys])
        level = runs.level[run]
        node = (runs.begin - self._starts_q[runs.sequence])[run] // chunk >> level
        in_message = at[pair] + low[keys] - found.begin[pair]
        numbered = level, node, runs.team[run], in_message, number[run], low[keys] - first[run]
        parts: dict[int, list[Part]] = {}
        for index, *numbers in zip(keys.tolist(), *(one.tolist() for one in numbered), strict=True):
            parts.setdefault(index, []).append(Part((numbers[0], numbers[1]), *numbers[2:]))
        place, chunks = own.place(low), -(-self._lengths_q[own.sequence[part]] // chunk)
        arrivals = tuple(
            Arrival(
                slice(int(place[index]), int(place[index] + high[index] - low[index])),
                int(chunks[index]),
                tuple(some),
            )
            for index, some in parts.items()
        )
        to_others, from_others = counts[team].clone(), counts[:, rank].repeat_interleave(degree)
        to_others[rank] = from_others[rank] = 0
        return Sums(sent, (to_others.tolist(), from_others.tolist()), arrivals)

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
        some = (rows[1] < rows[2]) & (keys[1] < keys[2])
        sequence, at, begin, end, key_at, first, key_end = (
            one[some] for one in (sequence, *rows, *keys)
        )
        if not sequence.numel():
            return ()
        # Position of the key after the last one, relative to that of the row after the last.
        shift = key_end - (end + self._shift(sequence))
        if shape.left < 0 and shape.right < 0:
            shift = torch.zeros_like(shift)
        length, key_length = end - begin, key_end - first
        new = torch.ones(sequence.numel(), dtype=torch.bool)
        new[1:] = (shift.diff() != 0) | (at[1:] != (at + length)[:-1])
        new[1:] |= key_at[1:] != (key_at + key_length)[:-1]
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


def _summed(count: int, index: Numbers, numbers: Numbers) -> Numbers:
    """Returns the sums of the numbers of each index."""
    return torch.zeros(count, dtype=numbers.dtype).index_add_(0, index, numbers)


def _stored(team: Numbers, length: Numbers) -> Numbers:
    """Returns where pieces begin that each team stores one after another; teams ascend."""
    ends = length.cumsum(0)
    begins = ends - length
    if not team.numel():
        return begins
    base = torch.full((int(team[-1]) + 1,), _FAR).scatter_reduce(0, team, begins, "amin")
    return begins - base[team]


def _places(
    ranks: int,
    other: Numbers,
    order: Numbers,
    at: Numbers,
    length: Numbers,
    head: Numbers | None = None,
    parts: int = 1,
) -> Places:
    """Returns pieces, sorted, and rows of each other rank."""
    counts = _summed(ranks, other, length).tolist()
    by = order.argsort(stable=True)
    return Places(counts, at[by], length[by], None if head is None else head[by], parts)
