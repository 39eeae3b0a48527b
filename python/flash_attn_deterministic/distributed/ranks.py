"""The ranks of a process group, and messages between them, with errors that name the message."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..checks.describe import type_name
from ..errors import ArgumentError, ArgumentTypeError, RankError, UnsupportedError
from .agreement import Agreement, is_known

# Supported backends by type of the tensors' device.
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


# The compiler of torch 2.10 cannot trace it.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def _backends(group: dist.ProcessGroup) -> str:
    return str(dist.get_backend_config(group))


class Ranks:
    """The ranks of a process group, with this process among them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.name = group, group.group_name
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.valid: dict[Any, Any] = {}  # what calls with such arguments mean, once checked

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ranks:
        """Returns those of a group, kept while it is there."""
        if torch.compiler.is_compiling():
            return cls(group)
        found = _known.get(group.group_name)
        if found is None or found.group is not group:
            found = _known[group.group_name] = cls(group)
        return found

    @classmethod
    def named(cls, name: str) -> Ranks:
        """Returns the ranks of the group with a name."""
        c10d: Any = dist.distributed_c10d
        return cls.of(c10d._resolve_process_group(name))

    @functools.cached_property
    def agreement(self) -> Agreement:
        """What the ranks have agreed on."""
        return Agreement(self.group)

    @functools.cached_property
    def in_one_machine(self) -> bool:
        """Whether all ranks are on one machine, as torchrun numbers them."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or self.size
        return len({member // local for member in dist.get_process_group_ranks(self.group)}) == 1

    @functools.cached_property
    def _host_waits(self) -> bool:
        """Whether the host waits for messages of NCCL; torch reads it once for a group, too."""
        names = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
        return any(os.environ.get(name, "0").lower() in ("1", "true", "y", "yes") for name in names)

    def check(self, device: torch.device) -> None:
        """Checks that the group can send tensors of a device.

        Raises:
            ArgumentError: this process is not in the group.
            UnsupportedError: another backend than gloo for the CPU and NCCL for CUDA devices, or
                another device.
        """
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

    def all_to_all(
        self,
        data: torch.Tensor,
        arrived: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        what: str,
    ) -> Pending:
        """Sends the first rows of data to rank 0, the next ones to rank 1, and so on.

        `arrived` gets those of rank 0, then those of rank 1, and so on. `sent` and `received` say
        how many go to and come from each; errors say `what` the data are.
        """
        if self.size == 1:
            return Pending(self, data, None, what)
        try:
            work = dist.all_to_all_single(
                arrived, data, [*received], [*sent], group=self.group, async_op=True
            )
        except RuntimeError as error:
            self._fail(error, what)
        return Pending(self, data, work, what)

    def _finish(self, work: dist.Work, device: torch.device) -> None:
        """Waits for a message: the host, or only the GPU's stream, as torch does."""
        if device.type == "cpu" or self._host_waits:
            # With looks for errors of other ranks, and without NCCL's own way to end a wait, which
            # may wait for the other rank again.
            self.agreement.wait_for(work)
        work.wait()

    def _fail(self, error: RuntimeError, what: str) -> NoReturn:
        """Raises RankError for an error of a message."""
        found = error
        if not isinstance(error, RankError):
            found = RankError(
                f"rank {self.rank} of {self.size}: {what} did not arrive: another rank has "
                "ended, is late by more than the group's timeout, or makes another call; the "
                f"backend says: {error}"
            )
        self.agreement.lose(found)
        raise found from (None if found is error else error)


class Pending:
    """A message that has been started.

    Holds the sent data until `wait`: the stream that made them could reuse their memory before they
    are sent. `wait` makes that stream wait for the message; on a GPU the host does not wait.
    """

    def __init__(self, ranks: Ranks, held: torch.Tensor, work: dist.Work | None, what: str) -> None:
        self._ranks, self._held, self._work, self._what = ranks, held, work, what

    def wait(self) -> None:
        """Returns once all is sent and received."""
        if self._work is not None:
            try:
                self._ranks._finish(self._work, self._held.device)
            except RuntimeError as error:
                self._ranks._fail(error, self._what)
        del self._work, self._held


_known: dict[str, Ranks] = {}


def report(error: Exception, group: Any) -> None:
    """Tells other ranks why a call failed here before its op.

    Where the group is None, its argument is wrong: the error is told in all groups of this rank,
    since the others may wait in any of them.
    """
    if is_known(error) or not dist.is_available() or not dist.is_initialized():
        return
    c10d: Any = dist.distributed_c10d
    for one in [*c10d._world.pg_map] if group is None else [group]:
        if dist.get_rank(one) >= 0:
            Ranks.of(one).agreement.report(error)


def find_group(group: Any, mesh: Any) -> dist.ProcessGroup:
    """Returns the group of the arguments.

    Args:
        group: a process group, or None: that of all ranks, unless mesh is given.
        mesh: a DeviceMesh of one dimension, or None.

    Raises:
        ArgumentTypeError: a wrong type.
        ArgumentError: torch.distributed is not initialised, both are given, or the mesh has more
            dimensions or another order.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            "group: expected a process group, got none: torch.distributed is not initialised; "
            "start the ranks with torchrun and call torch.distributed.init_process_group()"
        )
    if mesh is None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ArgumentTypeError(
                f"group: expected a torch.distributed.ProcessGroup or None, got {type_name(group)}"
            )
        found: Any = dist.group.WORLD if group is None else group
        return found  # type: ignore[no-any-return]
    if group is not None:
        raise ArgumentError("mesh: expected None together with group, got one")
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(f"mesh: expected a DeviceMesh or None, got {type_name(mesh)}")
    if mesh.ndim != 1:
        raise ArgumentError(
            f"mesh: expected 1 dimension, got {mesh.ndim}; pass a part of it, such as mesh['cp']"
        )
    return group_of_dimension(mesh, 0)


def group_of_dimension(mesh: DeviceMesh, dimension: int) -> dist.ProcessGroup:
    """Returns the group of this process along a dimension of a mesh.

    Raises:
        ArgumentError: this process is not in the mesh; or its ranks are not in ascending order, as
            torch sorts them in the group, and parts would be swapped.
    """
    place = mesh.get_coordinate()
    if place is None:
        raise ArgumentError("mesh: expected one that this process is a rank of")
    group = mesh.get_group(dimension)
    if place[dimension] != dist.get_rank(group):
        raise ArgumentError(
            f"mesh: expected ranks in ascending order along dimension {dimension}, got {mesh}"
        )
    return group
