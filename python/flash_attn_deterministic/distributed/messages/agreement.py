"""Checks that all ranks make the same call, before anything else is sent.

Ranks that disagree would wait for messages that never come, or mix up tensors. So each rank sends
its arguments to all others, and all raise the same error. A rank whose own arguments are wrong
sends its error, so that the others don't wait for it.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import ArgumentError, FlashAttnError, RankError
from .ranks import Ranks

_FIELDS = 32
_TEXT = 256  # bytes of an error's message
_WIDTH = _FIELDS + 1 + _TEXT // 8


def check(
    ranks: Ranks, facts: Mapping[str, Any], device: torch.device, then: Ranks | None = None
) -> None:
    """Checks that all ranks give the same facts, in the same order.

    Args:
        ranks: which all make this call.
        facts: by name of the argument: numbers, strings, dtypes, or tuples of numbers.
        device: of the tensors.
        then: ranks of another group that call `check` next; an error is reported to them.

    Raises:
        ArgumentError: ranks disagree; names the arguments and what each rank gave.
        RankError: another rank's arguments are wrong, or a rank does not answer.
    """
    try:
        _check(ranks, facts, device)
    except FlashAttnError as error:
        if then is not None and then.size > 1:
            with contextlib.suppress(RankError):
                report(then, error, device)
        raise


def _check(ranks: Ranks, facts: Mapping[str, Any], device: torch.device) -> None:
    values = [_number(value) for value in facts.values()]
    row = [len(values), *values]
    table = _exchange(ranks, row, "", device)
    for rank, line in enumerate(table):
        if line[_FIELDS]:
            raise RankError(
                f"rank {rank} of {ranks.size} did not make the call that rank {ranks.rank} makes; "
                f"its error: {_text(line)}"
            )
    wrong = []
    for place, (name, value) in enumerate(facts.items(), 1):
        given = [line[place] for line in table]
        if len(set(given)) > 1:
            wrong.append(f"{name}: {_shown(value, given, ranks)}")
    if any(line[0] != row[0] for line in table):
        wrong.append("the function itself")
    if wrong:
        raise ArgumentError(
            f"expected the same on all {ranks.size} ranks, rank {ranks.rank} found a difference "
            f"in {'; '.join(wrong)}"
        )


def report(ranks: Ranks, error: FlashAttnError, device: torch.device) -> None:
    """Sends an error of this rank to the other ranks, which are in `check`."""
    _exchange(ranks, [], f"{type(error).__name__}: {error}", device)


def _exchange(
    ranks: Ranks, numbers: Sequence[int], text: str, device: torch.device
) -> list[list[int]]:
    data = text.encode()[:_TEXT]
    words = struct.unpack(f"{_TEXT // 8}q", data.ljust(_TEXT, b"\0"))
    padded = [*numbers, *[0] * (_FIELDS - len(numbers))]
    row = torch.tensor([*padded, len(data), *words], dtype=torch.int64, device=device)
    gathered = ranks.all_gather(row, "what the ranks are called with")
    table: list[list[int]] = gathered.tolist()
    return table


def _text(line: Sequence[int]) -> str:
    data = struct.pack(f"{_TEXT // 8}q", *line[_FIELDS + 1 :])[: line[_FIELDS]]
    return data.decode(errors="replace")


def _number(value: Any) -> int:
    """Returns a number for a fact: its own value or bits, or a hash."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return int(struct.unpack("q", struct.pack("d", value))[0])
    return zlib.crc32(repr(value).encode())


def _shown(value: Any, given: Sequence[int], ranks: Ranks) -> str:
    if isinstance(value, float):
        given = [struct.unpack("d", struct.pack("q", one))[0] for one in given]
    elif not isinstance(value, int):
        # Of the others' values only the hashes are known.
        unlike = [rank for rank, one in enumerate(given) if one != given[ranks.rank]]
        return f"{value} here, another value on rank{'s' * (len(unlike) > 1)} {unlike}"
    return ", ".join(f"{one} on rank {rank}" for rank, one in enumerate(given))
