"""All ranks make the same call, or all raise an error.

Ranks that call different things would wait for messages that never come, or mix up tensors. So the
ranks tell each other what they are called with, through the store of torch.distributed: no tensor
and no GPU takes part, and after a difference has been found the group is as it was.

This happens in the first calls with the same arguments, forward and backward, and after every
failure; later calls cost nothing. Where only the lengths of packed sequences are new, it happens in
one forward with them. The environment variable FLASH_ATTENTION_RANK_CHECKS, read in
each call, is "first" (that), "always" or "off".
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..errors import ArgumentError, RankError

VARIABLE = "FLASH_ATTENTION_RANK_CHECKS"
_CHOICES = ("first", "always", "off")
_LOOK = 0.25  # seconds between two looks for errors of other ranks
_TEXT = 1000  # characters of an error that are told
_MOST = 1024  # calls that are remembered as agreed on
_MANY = 256  # calls with the same arguments that are compared at most


@dataclass
class _Begun:
    """Calls with the same arguments that have been compared."""

    calls: int = 0
    open: int = 0  # forwards whose backward has not been compared
    had_backward: bool = False

    def count(self, is_backward: bool, follows: bool) -> bool:
        """Counts a call, and returns whether later ones need not be compared.

        Layers of one shape are called one after another, and then backwards. That has happened if
        no backward is to come; or if a forward comes after a backward, since checkpoints make more
        forwards than backwards. Forwards that nobody differentiates end with their number.
        """
        self.calls += 1
        self.open += follows - is_backward
        is_next = self.had_backward and not is_backward
        self.had_backward |= is_backward
        return self.open <= 0 or is_next or self.calls >= _MANY


class Agreement:
    """What this rank and the others of a group have agreed on.

    Every call has a number in its group: forwards, backwards and `unshard`, in the order in which
    this rank makes them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        c10d: Any = dist.distributed_c10d
        self._store: Any = c10d.PrefixStore(
            f"flash_attn_deterministic/{group.group_name}", c10d._get_default_store()
        )
        with contextlib.suppress(RuntimeError):  # a store without deletion
            self._store.delete_key(self._failure_of(self.rank))
        self._calls = 0  # made
        self._settled: set[str] = set()
        self._begun: defaultdict[str, _Begun] = defaultdict(_Begun)
        self._told = ""  # key with this rank's arguments
        self._lost = ""  # why the group can't be used any more

    @property
    def _timeout(self) -> float:
        """Returns the seconds after which the group gives up."""
        backend: Any = self._group._get_backend(next(iter(self._group._device_types)))
        return float(backend.options._timeout.total_seconds())

    @property
    def last(self) -> int:
        """Returns the number of the last call."""
        return self._calls - 1

    def agree(
        self,
        call: str,
        facts: str,
        kind: str = "",
        follows: bool = False,
        forward: int | None = None,
    ) -> None:
        """Counts a call; checks that all ranks make it with the same facts, unless they have.

        Args:
            call: its kind, such as "forward".
            facts: JSON of what has to be the same, by name of the argument. A forward and its
                backward have the same ones.
            kind: the same without lengths of packed sequences.
            follows: whether a backward does.
            forward: number of the forward, of a backward; -1: unknown.

        Raises:
            ArgumentError: ranks differ; names the arguments and what each rank gave.
            RankError: another rank failed, or does not answer within the group's timeout.
        """
        when = os.environ.get(VARIABLE, "").strip() or _CHOICES[0]
        if when not in _CHOICES:
            raise ArgumentError(f"{VARIABLE}: expected one of {', '.join(_CHOICES)}, got {when!r}")
        number = self._calls
        self._calls += 1
        settled = facts in self._settled and when == "first"
        if not self._lost and (settled or when == "off"):
            return
        mine = {"call": call, **json.loads(facts)}
        if forward is not None:
            mine["the number of the forward"] = forward
        self._heard(number, mine)
        is_over = self._begun[facts].count(forward is not None, follows)
        if is_over or kind in self._settled:
            if len(self._settled) >= _MOST:
                self._settled.clear()
            self._settled |= {facts, kind} if is_over and kind else {facts}
            del self._begun[facts]

    def exchange(self, call: str, value: Any) -> list[Any]:
        """Returns a value of each rank, as JSON has it; counts as a call. Raises as `agree`."""
        number = self._calls
        self._calls += 1
        return [told["value"] for told in self._heard(number, {"call": call, "value": value})]

    def _heard(self, number: int, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Tells the ranks of a call, and returns what each of them tells."""
        self._tell(number, {"error": self._lost} if self._lost else mine)
        try:
            if self._lost:
                raise RankError(self._lost)
            every = self._collect(number)
            if self._told:  # by now all ranks have read it
                self._store.delete_key(self._told)
            self._told = f"{number}/{self.rank}"
            for rank, told in enumerate(every):
                if "error" in told:
                    raise RankError(self._of_another(rank, told["error"]))
            self._compare(every)
        except Exception as error:
            self._forget()
            know(error)
            raise
        return every

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Tells the other ranks of an error in a call."""
        before = self._calls
        try:
            yield
        except BaseException as error:  # KeyboardInterrupt too: messages of this call are lost
            if not is_known(error):
                self.report(error, begun=self._calls > before)
            raise

    def report(self, error: BaseException, begun: bool = False) -> None:
        """Tells the other ranks why a call failed here.

        `begun`: messages may have been sent; then a group of several ranks can't be used any more.
        """
        text = f"{type(error).__name__}: {error}"[:_TEXT]
        if not begun or self.size == 1:
            self._tell(self._calls, {"error": text})
            self._calls += 1
        else:
            self._lose(f"rank {self.rank} failed within a call: {text}")
        with contextlib.suppress(RuntimeError):
            told = json.dumps([self.last, begun, text])
            self._store.set(self._failure_of(self.rank), told)
        self._forget()
        know(error)

    def wait_for(self, work: dist.Work) -> None:
        """Waits for a message; RankError if another rank failed, RuntimeError at the timeout."""
        for is_late in _waiting(work.is_completed, self._timeout, 1e-3):
            for rank in range(self.size):
                if rank == self.rank or not self._store.check([self._failure_of(rank)]):
                    continue
                number, begun, text = json.loads(self._store.get(self._failure_of(rank)))
                if begun or number == self.last:
                    raise RankError(self._of_another(rank, text))
            if is_late:
                raise RuntimeError("the group's timeout has passed")

    def lose(self, error: Exception) -> None:
        """Notes that messages of a call failed: those of the next one would be taken for them."""
        self._lose(f"messages were lost: {error}"[:_TEXT])
        self._forget()
        know(error)

    def _lose(self, why: str) -> None:
        self._lost = self._lost or (
            f"rank {self.rank} of {self.size}: this group can't be used any more, since {why}; "
            "make a new one"
        )

    def _forget(self) -> None:
        self._settled.clear()
        self._begun.clear()

    def _tell(self, number: int, what: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the process with the store may have ended
            self._store.set(f"{number}/{self.rank}", json.dumps(what))

    def _collect(self, number: int) -> list[dict[str, Any]]:
        """Waits for what all ranks tell of a call."""
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        try:
            for is_late in _waiting(lambda: self._store.check(keys), self._timeout, 5e-3):
                silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if silent and is_late:
                    raise RankError(
                        f"rank {self.rank} of {self.size}: rank {silent[0]} did not make call "
                        f"{number} of this group within its timeout: it has ended, is late, or "
                        "makes other calls"
                    )
            return [json.loads(text) for text in self._store.multi_get(keys)]
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            raise RankError(
                f"rank {self.rank} of {self.size}: the store of torch.distributed does not answer; "
                f"the process that holds it has ended: {error}"
            ) from error

    def _compare(self, every: list[dict[str, Any]]) -> None:
        wrong = []
        for name in dict.fromkeys(name for told in every for name in told if name != "value"):
            given = [told.get(name) for told in every]
            if any(one != given[0] for one in given):
                values = (f"{_shown(one)} on rank {rank}" for rank, one in enumerate(given))
                wrong.append(f"{name}: {', '.join(values)}")
        if wrong:
            raise ArgumentError(
                f"expected the same on all {self.size} ranks, rank {self.rank} found a difference "
                f"in {'; '.join(wrong)}"
            )

    def _of_another(self, rank: int, text: str) -> str:
        return (
            f"rank {rank} of {self.size} did not make the call that rank {self.rank} makes; "
            f"its error: {text}"
        )

    @staticmethod
    def _failure_of(rank: int) -> str:
        return f"failed/{rank}"


def is_known(error: BaseException) -> bool:
    """Returns whether the other ranks know of an error, or have it too."""
    return isinstance(error, RankError) or getattr(error, "known_to_all_ranks", False)


def know(error: BaseException) -> None:
    """Notes that the other ranks know of an error, or have it too."""
    error.known_to_all_ranks = True  # type: ignore[attr-defined]


def _waiting(is_done: Callable[[], bool], timeout: float, pause: float) -> Iterator[bool]:
    """Waits, the host asleep; yields now and then whether `timeout` seconds have passed.

    At most `pause` seconds pass between two questions whether it is done.
    """
    begin = looked = time.monotonic()
    asleep = 2e-5
    while not is_done():
        time.sleep(asleep)
        asleep = min(2 * asleep, pause)
        now = time.monotonic()
        if now > looked + _LOOK:
            yield now > begin + timeout
            looked = now


def _shown(value: Any) -> str:
    text = f"({', '.join(map(str, value))})" if isinstance(value, list) else str(value)
    return text if len(text) < 120 else text[:120] + "..."
