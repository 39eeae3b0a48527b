"""Messages within a group of ranks, with errors that name the message that failed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from ...errors import ArgumentError, RankError, UnsupportedError

_Result = TypeVar("_Result")

# A tensor, and the rank that gets or sends it.
Message = tuple[torch.Tensor, int]

# Messages from one rank to another in one launch: with hundreds NCCL may hang (pull request 174942
# of pytorch/pytorch).
_AT_ONCE = 32

# Supported backends by type of the tensors' device.
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


# The compiler of torch 2.10 cannot trace it.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def _backends(group: dist.ProcessGroup) -> str:
    return str(dist.get_backend_config(group))


class Ranks:
    """The ranks of a process group, with this process among them.

    Args:
        group: the process group; None: this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.name = "" if group is None else group.group_name

    @classmethod
    def named(cls, name: str) -> Ranks:
        """Returns the ranks of the group with a name; "": this process alone."""
        if not name:
            return cls(None)
        c10d: Any = dist.distributed_c10d
        return cls(c10d._resolve_process_group(name))

    def check(self, device: torch.device) -> None:
        """Checks that the group can send tensors of a device.

        Raises:
            ArgumentError: this process is not in the group.
            UnsupportedError: another backend than gloo for the CPU and NCCL for CUDA devices, or
                another device.
        """
        if self.group is None:
            return
        if self.rank < 0:
            raise ArgumentError("group: expected one that this process is a rank of")
        if device.type not in _BACKENDS:
            raise UnsupportedError(f"q: expected a tensor on cpu or cuda, got {device}")
        expected = _BACKENDS[device.type]
        # Such as "gloo", or "cpu:gloo,cuda:nccl".
        config = _backends(self.group)
        backends = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
        found = backends.get(device.type, config)
        if found != expected:
            raise UnsupportedError(
                f"group: expected the backend {expected} for tensors on {device.type}, got "
                f"{found}; create the group with it"
            )

    def all_gather(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Returns the tensors of all ranks, (ranks, *shape); `what` describes them in errors."""
        if self.group is None:
            return values[None]
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        with self._named_errors(what):
            dist.all_gather(gathered, values, group=self.group)
        return torch.stack(gathered)

    def all_to_all(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], what: str
    ) -> Pending[torch.Tensor]:
        """Sends the first rows to rank 0, the next ones to rank 1, and so on.

        Args:
            rows: (rows, width), contiguous.
            sent: rows for each rank.
            received: rows from each rank.
            what: description of the rows, for errors.
        """
        if self.group is None:
            return Pending(self, rows, (), what)
        arrived = rows.new_empty((sum(received), rows.shape[1]))
        with self._named_errors(what):
            work = dist.all_to_all_single(
                arrived, rows, list(received), list(sent), group=self.group, async_op=True
            )
        return Pending(self, arrived, (work,), what, (rows,))

    def exchange(
        self, sent: Sequence[Message], received: Sequence[Message], what: str
    ) -> Pending[None]:
        """Starts to send and to receive contiguous tensors, all at the same time.

        Messages between two ranks arrive in the order in which they are listed. NCCL launches them
        together, in the group's order of launches, so a receive never blocks a send that the other
        rank waits for. Both ranks count the messages between them, and so form the same launches.

        Args:
            sent: tensors, and the ranks that get them.
            received: tensors to be filled, and the ranks that send them.
            what: description of the tensors, for errors.
        """
        batches: dict[int, list[dist.P2POp]] = {}
        works: list[dist.Work] = []
        with self._named_errors(what):
            for way, messages in ((dist.isend, sent), (dist.irecv, received)):
                counts: Counter[int] = Counter()
                for tensor, rank in messages:
                    message = dist.P2POp(way, tensor, group=self.group, group_peer=rank)
                    batches.setdefault(counts[rank] // _AT_ONCE, []).append(message)
                    counts[rank] += 1
            for number in sorted(batches):
                works += dist.batch_isend_irecv(batches[number])
        return Pending(self, None, works, what, [tensor for tensor, _ in (*sent, *received)])

    @contextlib.contextmanager
    def _named_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size}: {what} did not arrive: another rank has ended, "
                f"is late by more than the group's timeout, or makes another call; the backend "
                f"says: {error}"
            ) from error


class Pending(Generic[_Result]):
    """Messages that have been started.

    Holds the sent tensors until `wait`: the stream that made them could reuse their memory before
    they are sent. `wait` makes that stream wait for the messages; on a GPU the host does not wait.
    """

    def __init__(
        self,
        ranks: Ranks,
        result: _Result,
        works: Sequence[dist.Work],
        what: str,
        held: Sequence[torch.Tensor] = (),
    ) -> None:
        self._ranks, self._result, self._works, self._what = ranks, result, works, what
        self._held = held

    def wait(self) -> _Result:
        """Returns the result once all messages are sent and received."""
        with self._ranks._named_errors(self._what):
            for work in self._works:
                work.wait()
        self._works, self._held = (), ()
        return self._result
