"""What a rank holds at its peak, beside what it is given and what it returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from flash_attn_deterministic.distributed.messages.ranks import Pending, Ranks
from flash_attn_deterministic.distributed.passes import forward, gathered_backward, op_calls
from flash_attn_deterministic.distributed.planning.layout import dense_tokens
from flash_attn_deterministic.distributed.planning.plan import Mask
from flash_attn_deterministic.distributed.planning.steps import heads_of_forward
from torch.utils._python_dispatch import TorchDispatchMode

HEAD_DIM = 64


class Alone(Ranks):
    """A rank of several; what it sends goes nowhere, and what comes is not written."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size

    def all_to_all(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], what: str
    ) -> Pending[torch.Tensor]:
        assert sum(sent) == rows.shape[0]
        arrived = rows.new_empty((sum(received), rows.shape[1]))
        return Pending(self, arrived, (), what, (rows,))


class Held(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside of it."""

    def __init__(self, *others: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.now: int = 0
        self.most: int = 0
        self._known = {one.untyped_storage()._cdata for one in others}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self._note(one.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        number, size = storage._cdata, storage.nbytes()
        if number in self._known:
            return
        self._known.add(number)
        self.now += size
        self.most = max(self.most, self.now)

        def freed() -> None:
            self.now -= size
            self._known.discard(number)

        weakref.finalize(storage, freed)


def _forward_call(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _backward_call(
    rows: op_calls.Rows, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    sums = rows.q.new_empty(rows.q.shape, dtype=torch.float32)
    dq = torch.empty_like(rows.q)
    del sums
    return dq, torch.empty_like(k), torch.empty_like(v)


def _keys(seqlen: int, heads_k: int) -> int:
    """Bytes of K and V of some heads, whole."""
    return 4 * seqlen * heads_k * HEAD_DIM


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("nheads", "nheads_k"), [(32, 8), (8, 8), (8, 1), (10, 5)])
def test_memory_is_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, count: int, nheads: int, nheads_k: int
) -> None:
    """docs/distributed.md, "Costs"."""
    monkeypatch.setattr(forward, "forward_call", _forward_call)
    monkeypatch.setattr(gathered_backward, "backward_call", _backward_call)
    seqlen, group = 2048, nheads // nheads_k
    tokens = dense_tokens(1, seqlen // count, count, "zigzag")
    scores = op_calls.Numbers(1.0, Mask(-1, 0), 0.0, 0, True, True)

    def most_of(run: Callable[..., Sequence[torch.Tensor]], heads_k: int, is_forward: bool) -> int:
        """Returns the bytes at the peak of the rank that has most."""
        found: list[int] = []
        for rank in range(count):
            q, k, v = (
                torch.empty(seqlen // count, heads, HEAD_DIM, dtype=torch.bfloat16)
                for heads in (nheads, nheads_k, nheads_k)
            )
            rows = op_calls.Rows(q, q, q, torch.empty(q.shape[:2]))
            given = (k, v, tokens, tokens, scores, heads_k)
            with Held(*rows, k, v) as held:
                results = run(Alone(rank, count), q if is_forward else rows, *given)
                found.append(held.most - sum(one.nbytes for one in results))
            del results
        return max(found)

    for heads_k in (0, 1, nheads_k):
        at_once = heads_of_forward(heads_k, nheads_k, _keys(seqlen, 1))
        slices = -(-nheads_k // at_once)
        out = 2 * seqlen // count * HEAD_DIM * at_once * group
        expected = min(slices + 1, 3) * _keys(seqlen, at_once) + out
        assert 0.6 * expected <= most_of(forward.forward, heads_k, True) <= expected
    # Rows of three slices, and the gradients that are thrown away: dq in 32 bits of a slice's rows.
    rows = seqlen * group * (6 * HEAD_DIM + 4)
    expected = min(nheads_k + 1, 3) * rows + 6 * seqlen * group * HEAD_DIM
    assert 0.6 * expected <= most_of(gathered_backward.backward, 1, False) <= 1.05 * expected
