"""The wheel that is to be published, with the manifest that the build wrote beside it."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from ..compile import manifest, sources
from ..errors import RefusedError, first_of
from ..files import read_tree
from ..wheel import check, sbom

_PIN = "cpp/upstream/upstream.json"
_INSTANCES = "cpp/instances.json"


@dataclass(frozen=True)
class Candidate:
    """A wheel, its manifest and its faults.

    Attributes:
        path: The wheel.
        version: Its version without a local part; "" if its name is not that of a wheel.
        local: The local part of its version, such as "cu130"; mostly "".
        sha256: Of its bytes.
        manifest: The build manifest; empty if there is none.
        faults: Everything that is wrong with the wheel or its manifest.
    """

    path: Path
    version: str
    local: str
    sha256: str
    manifest: Mapping[str, Any] = field(repr=False)
    faults: tuple[str, ...] = ()

    @property
    def architectures(self) -> tuple[str, ...]:
        """Architectures of the machine code in the wheel, such as "sm_90"."""
        return tuple(
            f"sm_{str(name).removesuffix('-real')}"
            for name in self.manifest.get("architectures") or ()
            if not str(name).endswith("-virtual")
        )


def read_candidate(wheel: Path, root: Path | None = None) -> Candidate:
    """Reads a wheel and its manifest, and compares them with each other and with the source tree.

    Args:
        wheel: The wheel.
        root: The source tree that it must be built from; None: that is not checked.

    Returns:
        The wheel with its faults.
    """
    data = wheel.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    faults: list[str] = []
    version = local = ""
    text: dict[str, Any] = {}
    try:
        parsed = parse_wheel_filename(wheel.name)[1]
        version, local = parsed.public, parsed.local or ""
        text = manifest.read(manifest.path_of(wheel))
    except InvalidWheelFilename as error:
        faults.append(f"wheel: {error}")
    except RefusedError as error:
        faults.append(f"manifest: {error}")
    try:
        info = check.check(wheel)
        if text:
            stated = {"name": wheel.name, "sha256": digest, "bytes": len(data)}
            if text.get("wheel") != stated:
                faults.append(f"manifest: is of another wheel ({text.get('wheel')})")
            for name in manifest.FROM_WHEEL:
                if text.get(name) != info.get(name):
                    faults.append(f"manifest: {name} is not what the wheel says of itself")
    except RefusedError as error:
        faults.append(f"wheel: {error}")
    # Readers of zip and JSON raise many kinds of errors for a damaged file; each is a fault.
    except Exception as error:
        faults.append(f"wheel: cannot be read ({error!r})")
    if root:
        try:
            faults += _manifest_faults(text, root) if text else []
        except (AttributeError, LookupError, TypeError) as error:
            faults.append(f"manifest: not laid out as the build does it ({error!r})")
        try:
            with zipfile.ZipFile(wheel) as archive:
                info = json.loads(archive.read(check.BUILD_INFO))
                faults += _date_faults(archive, text) if text else []
                faults += _source_faults(archive, info, root)
            faults += instance_faults(info, root)
        except Exception as error:  # as above
            faults.append(f"wheel: cannot be compared with the tree ({error!r})")
    return Candidate(wheel, version, local, digest, text, tuple(faults))


def _date_faults(archive: zipfile.ZipFile, text: Mapping[str, Any]) -> Iterator[str]:
    """The date that the manifest states is the one in the wheel's bill of materials."""
    (bill,) = (name for name in archive.namelist() if name.endswith(f"/{sbom.FILE_NAME}"))
    stated = datetime.fromtimestamp(text["build"]["source_date_epoch"], timezone.utc)
    if json.loads(archive.read(bill))["metadata"]["timestamp"] != stated.isoformat():
        yield "manifest: source_date_epoch is not the date in the wheel"


def _source_faults(archive: zipfile.ZipFile, info: Mapping[str, Any], root: Path) -> Iterator[str]:
    """The wheel's files, and those its machine code was compiled from, are the tree's."""
    made = (check.LIBRARY, check.BUILD_INFO, *check.LICENSES)  # by the build
    held = {
        name: archive.read(name)
        for name in archive.namelist()
        if name.startswith(f"{check.PACKAGE}/") and not name.endswith("/")
    }
    there = read_tree(root / "python", [check.PACKAGE])
    native, stated = sources.digests(root), info["sources"]
    differing = [n for n in {*held, *there}.difference(made) if held.get(n) != there.get(n)]
    differing += [part for part in {*native, *stated} if native.get(part) != stated.get(part)]
    if differing:
        yield f"wheel: built from another tree: {first_of(differing)}"


def instance_faults(info: Mapping[str, Any], root: Path) -> Iterator[str]:
    """Compares the kernels of a wheel with those that a tree has tiles for.

    Args:
        info: The wheel's build information.
        root: The source tree.

    Yields:
        Every reason.
    """
    table = json.loads((root / _INSTANCES).read_text(encoding="utf-8"))
    tiles = {"fwd": table["fwd_tiles"]["one_cta"], "bwd": table["bwd_tiles"]}
    wanted = {
        (direction, dtype, int(head_dim))
        for direction, head_dims in tiles.items()
        for dtype in table["dtypes"]
        for head_dim in head_dims
    }
    # A kernel may exist in several families, but in each only once.
    held = {(each["direction"], each["dtype"], each["head_dim"]) for each in info["instances"]}
    distinct = len({json.dumps(each, sort_keys=True) for each in info["instances"]})
    if held != wanted or distinct != len(info["instances"]):
        missing = [" ".join(map(str, each)) for each in wanted.difference(held)] or ["none"]
        yield f"wheel: its kernels are not those of {_INSTANCES}: missing are {first_of(missing)}"


def _manifest_faults(text: Mapping[str, Any], root: Path) -> Iterator[str]:
    """Compares what the manifest states of the build with what a release demands."""
    if text["deterministic"] is not True:
        yield "manifest: built with FLASH_ATTENTION_DETERMINISTIC=OFF"
    build, tools = text["build"], text["tools"]
    if build["preset"] != "release":
        yield f"manifest: built with preset {build['preset']!r}, not 'release'"
    if build["defines"] != []:
        yield f"manifest: built with options of its own: {' '.join(build['defines'])}"
    if build["environment"] != {}:
        yield (
            "manifest: environment variables changed how it was compiled: "
            f"{', '.join(build['environment'])}"
        )
    if build["locked"] is not True:
        yield "manifest: built with tools that locks/ does not pin (`nox -s build -- --locked`)"
    python = {"python_full_version": tools["python"]}
    for locked in manifest.locked(text["cuda_toolkit"], root):
        wanted = locked.marker is None or locked.marker.evaluate(python)
        version = tools.get(locked.name, "").partition("+")[0]  # a local version: "+cpu"
        if (wanted or version) and version not in locked.specifier:
            yield f"manifest: built with {locked.name} {version or None}, but locks/ has {locked}"
    if tools["nvcc"] != text["cuda_toolkit"]:
        yield f"manifest: nvcc {tools['nvcc']} made a wheel of CUDA {text['cuda_toolkit']}"
    units, totals = text["translation_units"], text["totals"]
    objects = [unit for unit in units if unit["output"].endswith(".cu.o")]
    if len(objects) < len(text["instances"]) or totals["translation_units"] != len(units):
        yield (
            f"manifest: {len(objects)} CUDA translation units of {totals['translation_units']} for "
            f"{len(text['instances'])} kernels"
        )
    try:
        pin = json.loads((root / _PIN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"tree: {_PIN} is unreadable ({error})"
        return
    expected = {"name": pin["name"], "version": pin["version"], "sha256": pin["sdist"]["sha256"]}
    if not isinstance(text["architectures"], list):
        raise TypeError("architectures: expected a list")
    if text["upstream"] != {**expected, "patches": pin["patches"]}:
        yield f"manifest: its upstream or patches are not those that {_PIN} pins"
