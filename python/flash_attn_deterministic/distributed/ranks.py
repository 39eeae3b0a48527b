"""A group of ranks: what they send each other, with errors that say what failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ArgumentError, RankError, UnsupportedError

# Backends that send what is sent here, by the type of the tensors' device.
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


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
        config = str(dist.get_backend_config(self.group))
        backends = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
        found = backends.get(device.type, config)
        if found != expected:
            raise UnsupportedError(
                f"group: expected the backend {expected} for tensors on {device.type}, got "
                f"{found}; create the group with it"
            )

    def all_gather(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Returns the tensors of all ranks, (ranks, *shape); `what` is for messages."""
        if self.group is None:
            return values[None]
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        with self._named_errors(what):
            dist.all_gather(gathered, values, group=self.group)
        return torch.stack(gathered)

    def all_to_all(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], what: str
    ) -> Pending:
        """Sends the first rows to rank 0, the next ones to rank 1, and so on.

        Args:
            rows: (rows, bytes), uint8, contiguous.
            sent: rows for each rank.
            received: rows from each rank.
            what: is sent, for messages.
        """
        if self.group is None:
            return Pending(self, rows, None, what)
        arrived = rows.new_empty((sum(received), rows.shape[1]))
        with self._named_errors(what):
            work = dist.all_to_all_single(
                arrived, rows, list(received), list(sent), group=self.group, async_op=True
            )
        return Pending(self, arrived, work, what, rows)

    def send(self, tensor: torch.Tensor, rank: int, what: str) -> Pending:
        """Starts to send a contiguous tensor to a rank of the group."""
        with self._named_errors(what):
            work = dist.isend(tensor, group=self.group, group_dst=rank)
        return Pending(self, tensor, work, what)

    def receive(self, tensor: torch.Tensor, rank: int, what: str) -> None:
        """Receives into a contiguous tensor from a rank of the group."""
        with self._named_errors(what):
            dist.recv(tensor, group=self.group, group_src=rank)

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


class Pending:
    """What is on its way."""

    def __init__(
        self,
        ranks: Ranks,
        result: torch.Tensor,
        work: dist.Work | None,
        what: str,
        sent: torch.Tensor | None = None,
    ) -> None:
        self._ranks, self._result, self._work, self._what = ranks, result, work, what
        self._sent = sent  # has to live as long

    def done(self) -> bool:
        """Returns whether it has arrived."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> torch.Tensor:
        """Returns it when it has arrived."""
        if self._work is not None:
            with self._ranks._named_errors(self._what):
                self._work.wait()
            self._work = self._sent = None
        return self._result
