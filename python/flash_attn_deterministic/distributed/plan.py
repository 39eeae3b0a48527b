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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ..types import Lengths, Options
from . import model
from .exchange import Places, Route, Stream
from .layout import Layout, Numbers, expand, layout_of, overlaps, summed
from .sums import Origin, Sums, sums_of

# A multiple of the keys per block of every kernel, forward and backward.
KEY_BLOCK = 128
# Levels of pieces of rows that are no run of chunks: all rows of a sequence, or some.
_WHOLE, _PART = -2, -1


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

    def layouts(self) -> tuple[Layout, Layout]:
        """Returns where the ranks have the tokens of q, and those of k and v."""

        def layout(name: str, starts: tuple[int, ...], tokens: int) -> Layout:
            argument = name if self.dense else f"cu_seqlens_{name}"
            return layout_of(starts, tokens, self.ranks, self.order, argument, self.dense)

        q = layout("q", self.starts_q, self.tokens_q)
        if (self.starts_q, self.tokens_q) == (self.starts_k, self.tokens_k):
            return q, q
        return q, layout("k", self.starts_k, self.tokens_k)


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
    _given: dict[tuple[Stream, Options], tuple[Lengths, Options]] = field(default_factory=dict)

    def given(self, stream: Stream, options: Options) -> tuple[Lengths, Options]:
        """Returns the arguments of the op; kept, as each copy to a GPU makes the host wait."""
        key = stream, options
        found = self._given.get(key)
        if found is None:
            sides = self.starts_q, self.starts_k
            q, k = (torch.tensor(one, dtype=torch.int32, device=stream[0]) for one in sides)
            longest = [max(b - a for a, b in itertools.pairwise(one)) for one in sides]
            own = options._replace(window_left=self.mask.left, window_right=self.mask.right)
            found = self._given[key] = Lengths(q, k, longest[0], longest[1]), own
        return found


class Pass(NamedTuple):
    """The forward or the backward of one rank."""

    rows: Route | None  # how rows come to the ranks that compute them; None: they stay
    keys: Route | None  # how keys come; None: no rank needs any
    calls: tuple[Call, ...]  # on whole sequences, or, in the forward, all calls
    heads: int  # KV heads at a time
    whole: Route | None = None  # how keys of whole sequences come, and their dk and dv go back
    runs: tuple[Call, ...] = ()  # in the backward, each of an aligned run of chunks
    sums: Sums | None = None  # what becomes of their sums


@dataclass(frozen=True)
class Explanation:
    """How a call is divided over ranks, and why.

    Args:
        ulysses_degree: ranks over which heads are divided.
        whole_sequences: how many come to one rank, or one group of `ulysses_degree` ranks.
        heads_k: KV heads computed at a time, forward and backward.
        seconds: that the planner's model expects of the forward and the backward on an H100.
        others: the same for the ways that were not chosen, by name.
    """

    ulysses_degree: int
    whole_sequences: int
    heads_k: tuple[int, int]
    seconds: tuple[float, float]
    others: Mapping[str, tuple[float, float]]


class Plan(NamedTuple):
    """What one rank does in a call."""

    local: tuple[Call, ...]  # calls on sequences that lie entirely on this rank
    forward: Pass  # of the others
    backward: Pass  # likewise
    chosen: Explanation  # for all ranks


class Keys(NamedTuple):
    """The keys of pieces of rows."""

    first: Numbers  # position in the sequence where the call's keys begin, for each piece of rows
    begin: Numbers  # first key that is seen
    end: Numbers  # after the last one
    at: Numbers  # where the team's keys have `first`
    wanted: Layout  # tokens that teams need
    whole: Numbers  # of each of these, whether it is for a whole sequence


@functools.lru_cache(maxsize=16)
def plan_of(shape: Shape, rank: int) -> Plan:
    """Plans a call; see `layout` for the errors of lengths that do not fit."""
    return _planner_of(shape).plan(rank)


class _Half(NamedTuple):
    """The forward or the backward of a choice."""

    rows: Layout  # pieces, with the team that computes each; of a team, whole sequences first
    level: Numbers  # n of a piece that is a run of 2^n chunks; _WHOLE, _PART
    keys: Keys
    stays: bool  # whether all rows are where they are computed
    load: model.Load


class _Choice(NamedTuple):
    """One way to divide a call."""

    local: Numbers  # for each sequence, its only rank; -1: none
    halves: tuple[_Half, _Half]
    explanation: Explanation  # without others


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
        seconds = {name: one.explanation.seconds for name, one in self._choices.items()}
        # Among equals, the one that divides heads most.
        best = next(iter(seconds))
        for name, expected in seconds.items():
            if sum(expected) < 0.99 * sum(seconds[best]):
                best = name
        self._best = self._choices[best]
        del seconds[best]
        self._chosen = replace(self._best.explanation, others=seconds)
        self._degree = self._chosen.ulysses_degree

    # --- who computes what ------------------------------------------------------------------------

    def _choose(self, degree: int) -> None:
        """Adds the ways to divide a call for one degree."""
        teams = self._shape.ranks // degree
        pieces = self._own_q.of_teams(degree)
        home = self._home(pieces)
        local = torch.full_like(home, -1)
        if degree == 1:
            local = torch.where(self._home(self._own_k) == home, home, -1)
        of_sequence, at_one = self._work_of_each, home.clamp(min=0)
        divided = (home < 0) & (of_sequence > 0)
        mean = float(of_sequence.sum()) / teams
        at_home = summed(teams, at_one, of_sequence * (local >= 0))
        loads = summed(teams, at_one, of_sequence * (home >= 0))
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
            cut = pieces.select(team_of[pieces.sequence] < 0)
            sequences = ((team_of >= 0) & (local < 0)).nonzero().flatten()
            team = team_of[sequences]
            whole = team, sequences, *self._ends(sequences), torch.full_like(team, _WHOLE)
            parts = *cut[:4], torch.full_like(cut.rank, _PART)
            forward = backward = self._half(degree, whole, parts, stays, at_home)
            if cut.rank.numel():
                work = self._work_of_each[sequences]
                runs, chunks_stay = self._chunks(cut, at_home.index_add(0, team, work))
                backward = self._half(degree, whole, runs, stays and chunks_stay, at_home)
            heads, time = self._timed(forward.load, False)
            heads_bwd, time_bwd = self._timed(backward.load, True)
            chosen = Explanation(degree, len(sequences), (heads, heads_bwd), (time, time_bwd), {})
            way = ", ".join(words + [f"long sequences {name}"] * (teams > 1))
            self._choices[way] = _Choice(local, (forward, backward), chosen)

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

    def _seen(self, rows: Layout) -> tuple[Numbers, Numbers]:
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
        """Gives moving sequences to the emptiest team, the longest first; returns the most work."""
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

    def _ends(self, sequences: Numbers) -> tuple[Numbers, Numbers]:
        return self._starts_q[sequences], self._starts_q[sequences + 1]

    def _chunks(self, cut: Layout, loads: Numbers) -> tuple[tuple[Numbers, ...], bool]:
        """Divides cut sequences into aligned runs of chunks, each with a team that computes it.

        Returns team, sequence, begin, end and level of each run, and whether no chunk lies on
        several teams; `loads` is the work that teams have already.
        """
        chunk = self._shape.chunk
        sequences = torch.bincount(cut.sequence).nonzero().flatten()
        which, index = expand(-(-self._lengths_q[sequences] // chunk))
        sequence = sequences[which]
        begin = self._starts_q[sequence] + index * chunk
        end = torch.minimum(begin + chunk, self._starts_q[sequence + 1])
        found = overlaps(cut, begin, end)
        holders: list[set[int]] = [set() for _ in which]
        for number, team in zip(found.want.tolist(), cut.rank[found.part].tolist(), strict=True):
            holders[number].add(team)
        work, loaded = self._work(sequence, begin, end).tolist(), loads.tolist()
        owner = [-1] * len(holders)
        # Chunks of one team stay there; others go to the emptier of theirs.
        for number in sorted(range(len(holders)), key=lambda n: (len(holders[n]) > 1, -work[n], n)):
            team = min(holders[number], key=lambda team: (loaded[team], team))
            loaded[team] += work[number]
            owner[number] = team
        runs = []
        chunks = zip(sequence.tolist(), owner, index.tolist(), strict=True)
        for (of, team), group in itertools.groupby(chunks, key=lambda one: one[:2]):
            numbers = [number for _, _, number in group]
            start, stop = self._shape.starts_q[of : of + 2]
            last = numbers[-1] + 1
            for first, level in _aligned(numbers[0], last, start + last * chunk >= stop):
                low = start + first * chunk
                runs.append((team, of, low, min(low + (chunk << level), stop), level))
        return torch.tensor(runs).unbind(1), max(map(len, holders)) == 1

    def _keys(self, rows: Layout, whole: Numbers) -> Keys:
        """Finds the keys that rows see; pieces of a sequence that see the same ones share them."""
        begin, end = self._seen(rows)
        first = torch.where(begin < end, begin // self._shape.align * self._shape.align, begin)
        order = (begin < end).nonzero().flatten()
        some, base = rows.select(order), self._starts_k[rows.sequence]
        # As the rows of a sequence ascend, so do these.
        low, seen, to = ((base + one)[order] for one in (first, begin, end))
        new = torch.ones(order.numel() + 1, dtype=torch.bool)
        new[1:-1] = (some.sequence.diff() != 0) | (some.rank.diff() != 0) | (low[1:] > to[:-1])
        is_first, is_last = new[:-1], new[1:]
        start, seen, to = low[is_first], seen[is_first], to[is_last]
        team, number = some.rank[is_first], is_first.cumsum(0) - 1
        stored = _stored(team, to - start)
        at = torch.zeros_like(first)
        at[order] = stored[number] + low - start[number]
        wanted = Layout(team, some.sequence[is_first], seen, to, stored + seen - start)
        return Keys(first, begin, end, at, wanted, whole[order][is_first])

    def _half(
        self,
        degree: int,
        whole: tuple[Numbers, ...],
        parts: tuple[Numbers, ...],
        stays: bool,
        at_home: Numbers,
    ) -> _Half:
        """Orders pieces, and finds their keys and what the fullest rank computes and gets.

        `whole` and `parts` have team, sequence, begin, end and level: of whole sequences, and of
        pieces of others. `at_home` is the work of teams on sequences that lie there entirely.
        """
        shape = self._shape
        teams = shape.ranks // degree
        columns = [torch.cat(pair) for pair in zip(whole, parts, strict=True)]
        order = ((2 * columns[0] + (columns[4] != _WHOLE)) * self._total + columns[2]).argsort()
        team, sequence, begin, end, level = (one[order] for one in columns)
        is_whole = level == _WHOLE
        rows = Layout(team, sequence, begin, end, _stored(team, end - begin))
        keys = self._keys(rows, is_whole)

        def most(team: Numbers, count: Numbers) -> float:
            return float(summed(teams, team, count).max())

        others = 1 - 1 / shape.ranks
        wanted, needed = keys.wanted, keys.wanted.end - keys.wanted.begin
        pairs = at_home.index_add(0, rows.rank, self._work(rows.sequence, rows.begin, rows.end))
        load = model.Load(
            pairs=float(pairs.max()),
            nheads=shape.nheads // degree,
            nheads_k=shape.nheads_k // degree,
            head_dim=shape.head_dim,
            moved_q=0.0 if stays else most(rows.rank, rows.end - rows.begin) * others,
            moved_k=most(wanted.rank, needed) * others,
            sums=most(rows.rank, (keys.end - keys.begin) * (level >= 0)) * others,
            whole=most(wanted.rank, needed * keys.whole) * others,
            itemsize=shape.itemsize,
            launches=most(rows.rank, (~is_whole).long()) + bool(is_whole.any()),
        )
        return _Half(rows, level, keys, stays, load)

    def _timed(self, load: model.Load, backward: bool) -> tuple[int, float]:
        """Returns how many KV heads are computed at a time, and the seconds of the pass."""
        shape = self._shape
        link = model.NVLINK if shape.one_machine else model.NETWORK
        heads = min(shape.heads_k, load.nheads_k) or model.best_heads(
            load, backward, link, shape.starts_k[-1]
        )
        return heads, model.seconds(load, backward, heads, link)

    # --- the part of one rank ---------------------------------------------------------------------

    def plan(self, rank: int) -> Plan:
        """Returns what a rank does."""
        (first, second), heads = self._best.halves, self._chosen.heads_k
        forward = self._pass(first, rank)
        backward = forward if second is first else self._pass(second, rank)
        backward = self._with_gradients(backward, second, rank)
        passes = forward._replace(heads=heads[0]), backward._replace(heads=heads[1])
        return Plan(self._local(rank), *passes, self._chosen)

    def _local(self, rank: int) -> tuple[Call, ...]:
        sequence = (self._best.local == rank).nonzero().flatten()
        begin, end = self._ends(sequence)
        rows = self._own_q.place(begin), begin, end
        zero, keys_at = torch.zeros_like(sequence), self._own_k.place(self._starts_k[sequence])
        return self._calls(sequence, rows, (keys_at, zero, self._lengths_k[sequence]))

    def _pass(self, half: _Half, rank: int) -> Pass:
        """Returns what travels to a rank, and its calls on it; heads are to be filled in."""
        rows, wanted = half.rows, half.keys.wanted
        if not wanted.rank.numel():
            return Pass(None, None, (), 1)
        calls = self._calls_of(half, (rows.rank == rank // self._degree) & (half.level < 0))
        way = None if half.stays else self._route(self._own_q, rows, rank)
        if way is None or self._own_k is not self._own_q or not all(map(torch.equal, rows, wanted)):
            return Pass(way, self._route(self._own_k, wanted, rank), calls, 1)
        return Pass(way, way, calls, 1)

    def _route(self, own: Layout, wanted: Layout, rank: int) -> Route:
        """Returns a rank's part of an exchange from the ranks that have tokens to teams.

        Rows that a rank sends to itself are the last ones sent, and the first ones received.
        """
        ranks, degree = self._shape.ranks, self._degree
        mine = own.select(own.rank == rank)
        found = overlaps(mine, wanted.begin, wanted.end)
        length = found.end - found.begin
        members = torch.arange(degree)
        to = (wanted.rank[found.want, None] * degree + members).flatten()
        at = (mine.at[found.part] + found.begin - mine.begin[found.part]).repeat_interleave(degree)
        head, length = members.repeat(length.numel()), length.repeat_interleave(degree)
        sent = Places(rank, ranks, to, at, length, head, degree)
        wanted = wanted.select(wanted.rank == rank // degree)
        found = overlaps(own, wanted.begin, wanted.end)
        at = wanted.at[found.want] + found.begin - wanted.begin[found.want]
        received = Places(rank, ranks, own.rank[found.part], at, found.end - found.begin)
        ends = wanted.at + wanted.end - wanted.begin
        return Route(sent, received, int(ends.max()) if ends.numel() else 0)

    def _calls_of(self, half: _Half, some: Numbers) -> tuple[Call, ...]:
        """Returns the calls of some pieces of rows of one team."""
        rows, keys = half.rows.select(some), half.keys
        at = self._own_q.place(rows.begin) if half.stays else rows.at
        sides = (at, rows.begin, rows.end), (keys.at[some], keys.first[some], keys.end[some])
        return self._calls(rows.sequence, *sides)

    def _with_gradients(self, result: Pass, half: _Half, rank: int) -> Pass:
        """Adds how dk and dv of whole sequences travel, the runs of a rank, and their sums."""
        rows, keys = half.rows, half.keys
        if bool(keys.whole.all()):
            result = result._replace(whole=result.keys)
        elif bool(keys.whole.any()):
            wanted = keys.wanted.select(keys.whole)
            result = result._replace(whole=self._route(self._own_k, wanted, rank))
        run = ((half.level >= 0) & (keys.begin < keys.end)).nonzero().flatten()
        if not run.numel():
            return result
        own = run[rows.rank[run] == rank // self._degree]
        calls = [call for one in own[:, None] for call in self._calls_of(half, one)]
        return result._replace(runs=tuple(calls), sums=self._sums(half, run, rank))

    def _sums(self, half: _Half, run: Numbers, rank: int) -> Sums:
        """Plans how a rank sends and adds the sums of runs of all teams, given their numbers."""
        runs, levels = half.rows.select(run), half.level[run]
        # Tokens: where the keys of each run's call begin, and those that are seen.
        first, begin, end = (self._starts_k[runs.sequence] + side[run] for side in half.keys[:3])
        ranks, chunk, degree, own = self._shape.ranks, self._shape.chunk, self._degree, self._own_k
        team = rank // degree
        found = overlaps(own, begin, end)
        by, to, length = runs.rank[found.want], own.rank[found.part], found.end - found.begin
        message = by * ranks + to
        order = message.argsort(stable=True)
        at = torch.empty_like(order)
        at[order] = _stored(message[order], length[order])
        counts = summed(ranks // degree * ranks, message, length).view(-1, ranks)
        here = runs.rank == team
        number = torch.where(here, here.cumsum(0) - 1, -1)  # among the runs of this rank
        leaving = order[((by == team) & (to != rank))[order]]
        low = found.begin - first[found.want]
        columns = (one[leaving].tolist() for one in (number[found.want], low, low + length))
        sent = tuple((run, slice(*keys)) for run, *keys in zip(*columns, strict=True))
        to_others, from_others = counts[team].clone(), counts[:, rank].repeat_interleave(degree)
        to_others[rank] = from_others[rank] = 0
        arrives = 2 * (from_others.cumsum(0) - from_others)  # the row of each rank's message
        # Pieces of keys that are all seen by the same runs.
        mine = (own.rank == rank).nonzero().flatten()
        borders = torch.unique(torch.cat([begin, end]))  # type: ignore[no-untyped-call, unused-ignore]
        cut = overlaps(own.select(mine), borders[:-1], borders[1:])
        part, low, high = mine[cut.part], cut.begin, cut.end
        sees = (begin <= low[:, None]) & (high[:, None] <= end)
        keys, run = sees.nonzero().unbind(1)
        pairs = found.want * own.rank.numel() + found.part
        pair = torch.searchsorted(pairs, run * own.rank.numel() + part[keys])
        node = (runs.begin - self._starts_q[runs.sequence])[run] // chunk >> levels[run]
        dk = 2 * at[pair] + low[keys] - found.begin[pair]
        numbered = levels[run], node, runs.rank[run], dk, length[pair], number[run]
        columns = (one.tolist() for one in (*numbered, low[keys] - first[run]))
        seen: dict[int, dict[tuple[int, int], Origin]] = {}
        for index, n, i, *origin in zip(keys.tolist(), *columns, strict=True):
            seen.setdefault(index, {})[n, i] = Origin(*origin)
        place, chunks = own.place(low), -(-self._lengths_q[own.sequence[part]] // chunk)
        places, rows, of = (one.tolist() for one in (place, high - low, chunks))
        some = [(places[at], rows[at], of[at], origins) for at, origins in seen.items()]
        both = [2 * one for one in to_others.tolist()], [2 * one for one in from_others.tolist()]
        return sums_of(some, rank, degree, arrives.tolist(), sent, both)

    def _calls(
        self,
        sequence: Numbers,
        rows: tuple[Numbers, Numbers, Numbers],
        keys: tuple[Numbers, Numbers, Numbers],
    ) -> tuple[Call, ...]:
        """Makes calls of pieces; neighbours with the same mask share one.

        Pieces without rows or keys need none: their results are 0 (+inf for softmax_lse). Rows have
        place, first token and last + 1, keys place, first position and last + 1.
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


_planner_of = functools.lru_cache(maxsize=4)(_Planner)


def _clamped(begin: Numbers, end: Numbers, most: Numbers) -> Numbers:
    """Returns the sum of [begin, end), with each number clamped to [0, most]."""
    low, high = (torch.minimum(one.clamp(min=0), most) for one in (begin, end))
    return (high - low) * (low + high - 1) // 2 + most * (
        end.clamp(min=0) - torch.maximum(begin, most).clamp(min=0)
    ).clamp(min=0)


def _stored(team: Numbers, length: Numbers) -> Numbers:
    """Returns where pieces begin that each team stores one after another; teams ascend."""
    begins = length.cumsum(0) - length
    return begins - begins[torch.searchsorted(team, team)]


def _aligned(first: int, last: int, is_end: bool) -> Iterator[tuple[int, int]]:
    """Cuts chunks into aligned runs of 2^n, as long as possible; yields first chunk and n of each.

    Behind the end of a sequence there are as many chunks as needed.
    """
    while first < last:
        level = 0
        while first % (2 << level) == 0 and (
            first + (2 << level) <= last or (is_end and first + (1 << level) < last)
        ):
            level += 1
        yield first, level
        first += 1 << level
