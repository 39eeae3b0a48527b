"""The ranks of a call, from process groups or a mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...checks.describe import type_name
from ...errors import ArgumentError, ArgumentTypeError
from .ranks import Ranks


class Groups(NamedTuple):
    """The ranks of a call.

    Args:
        sequence: over which each sequence is distributed.
        heads: over which the heads are distributed inside the call.
    """

    sequence: Ranks
    heads: Ranks

    def check(self, device: torch.device) -> None:
        """Checks both, as `Ranks.check` does."""
        self.sequence.check(device)
        self.heads.check(device)


def find_groups(group: Any, heads_group: Any, mesh: Any) -> Groups:
    """Returns the groups of the arguments.

    Args:
        group: a process group, or None: that of all ranks, unless another argument is given.
        heads_group: a process group, or None.
        mesh: a DeviceMesh of one dimension (sequence) or two (sequence, heads), or None.

    Raises:
        ArgumentTypeError: a wrong type.
        ArgumentError: torch.distributed is not initialised, the groups share more than this rank,
            or the mesh is given together with groups or has more dimensions.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            "group: expected a process group, got none: torch.distributed is not initialised; "
            "start the ranks with torchrun and call torch.distributed.init_process_group()"
        )
    if mesh is not None:
        if group is not None or heads_group is not None:
            raise ArgumentError("mesh: expected None together with group or heads_group, got one")
        return _of_mesh(mesh)
    for name, one in (("group", group), ("heads_group", heads_group)):
        if one is not None and not isinstance(one, dist.ProcessGroup):
            raise ArgumentTypeError(
                f"{name}: expected a torch.distributed.ProcessGroup or None, got {type_name(one)}"
            )
    if group is not None and heads_group is not None and not torch.compiler.is_compiling():
        both = set(dist.get_process_group_ranks(group)) & set(
            dist.get_process_group_ranks(heads_group)
        )
        if len(both) > 1:
            raise ArgumentError(
                f"heads_group: expected no rank of group but this one, got {sorted(both)} in both"
            )
    if group is None and heads_group is None:
        group = dist.group.WORLD
    return Groups(Ranks(group), Ranks(heads_group))


def _of_mesh(mesh: Any) -> Groups:
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(f"mesh: expected a DeviceMesh or None, got {type_name(mesh)}")
    if mesh.ndim not in (1, 2):
        raise ArgumentError(
            "mesh: expected 1 dimension (sequence) or 2 (sequence, heads), got "
            f"{mesh.ndim}; pass a part of it, such as mesh['cp']"
        )
    return Groups(
        Ranks(group_of_dimension(mesh, 0)),
        Ranks(group_of_dimension(mesh, 1) if mesh.ndim == 2 else None),
    )


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
