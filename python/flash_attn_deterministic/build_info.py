"""The build's record of this wheel: its sources, architectures and kernels."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .errors import BuildInfoError

_SCHEMA = 1
_PATH = Path(__file__).parent.joinpath("_build_info.json")


class Patch(NamedTuple):
    name: str
    sha256: str


class Upstream(NamedTuple):
    """The pinned source distribution, and the patches put on it."""

    name: str
    version: str
    sha256: str
    patches: tuple[Patch, ...]


class Tile(NamedTuple):
    """The rows and keys that one thread block of a kernel processes at a time."""

    block_m: int
    block_n: int
    warps: int


class Instance(NamedTuple):
    """The kernels of a direction, dtype and family for head dims up to one; sm90: Hopper only."""

    direction: str
    dtype: str
    head_dim: int
    family: str = "sm80"


@dataclass(frozen=True)
class BuildInfo:
    upstream: Upstream
    cuda_toolkit: str
    architectures: tuple[str, ...]
    deterministic: bool
    torch_target: str
    tiles: Mapping[int, Tile]
    instances: tuple[Instance, ...]
    # sha256 by part of the source tree that the machine code is compiled from.
    sources: Mapping[str, str]
    # Wheels with equal numbers give equal bits on one compute capability.
    bits_version: int

    def kernel_head_dim(self, head_dim: int) -> int:
        """Returns the head dim of the kernel that serves `head_dim` (1 to 256, or 576)."""
        for kernel_head_dim in self.tiles:
            if head_dim <= kernel_head_dim:
                return kernel_head_dim
        raise BuildInfoError(f"{_PATH.name}: no tile for head_dim {head_dim}; rebuild the wheel")

    def tile(self, head_dim: int) -> Tile:
        """Returns the tile of the kernel that serves `head_dim` (1 to 256, or 576)."""
        return self.tiles[self.kernel_head_dim(head_dim)]


def parse(record: Mapping[str, Any]) -> BuildInfo:
    """Converts a parsed `_build_info.json`; tiles in rising order of head dim."""
    schema = record.get("schema")
    if schema != _SCHEMA:
        raise BuildInfoError(f"{_PATH.name}: expected schema {_SCHEMA}, got {schema!r}")
    try:
        upstream = dict(record["upstream"])
        patches = tuple(Patch(**patch) for patch in upstream.pop("patches"))
        tiles = sorted((int(head_dim), tile) for head_dim, tile in record["tiles"].items())
        return BuildInfo(
            upstream=Upstream(**upstream, patches=patches),
            cuda_toolkit=record["cuda_toolkit"],
            architectures=tuple(record["architectures"]),
            deterministic=record["deterministic"],
            torch_target=record["torch_target"],
            tiles={head_dim: Tile(**tile) for head_dim, tile in tiles},
            instances=tuple(Instance(**instance) for instance in record["instances"]),
            sources=dict(record["sources"]),
            bits_version=int(record["bits_version"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BuildInfoError(
            f"{_PATH.name}: missing or wrong field ({type(error).__name__}: {error})"
        ) from error


def installed_version() -> str:
    """Returns the version of the installed distribution; "" for a source tree."""
    # Here: importlib.metadata takes longer to import than the rest of the package.
    from importlib import metadata

    try:
        return metadata.version("flash-attn-deterministic")
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def build_info() -> BuildInfo:
    """Reads the record of this wheel, once per process.

    Raises:
        BuildInfoError: the file is missing (a source tree) or unreadable.
    """
    try:
        record = json.loads(_PATH.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BuildInfoError(
            f"{_PATH} does not exist: this is the source tree, not an installed wheel; run "
            "`nox -s build` and install the wheel it leaves in dist/"
        ) from None
    except ValueError as error:
        raise BuildInfoError(f"{_PATH}: not JSON ({error}); reinstall the wheel") from error
    return parse(record)
