"""The wheel that is to be published, with the manifest that the build wrote beside it."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from .. import manifest, sources, wheelcheck
from ..errors import WheelError

_PIN = "cpp/upstream/upstream.json"
_INSTANCES = "cpp/instances.json"
# By the manifest and by the wheel's own record.
_SAID_TWICE = (
    "upstream", "architectures", "cuda_toolkit", "deterministic", "instances", "sources",
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A wheel and what is known of it.

    Attributes:
        path: The wheel.
        version: Its version; "" if its name is not that of a wheel.
        sha256: Of its bytes.
        manifest: The build manifest; empty if there is none.
        faults: Everything that is wrong with the wheel or its manifest.
    """

    path: Path
    version: str
    sha256: str
    manifest: Mapping[str, Any] = field(repr=False)
    faults: tuple[str, ...] = ()

    @property
    def upstream(self) -> Mapping[str, Any]:
        """Name, version, sha256 and patches of upstream's release, as the manifest has them."""
        found = self.manifest.get("upstream")
        return found if isinstance(found, dict) else {}

    @property
    def architectures(self) -> tuple[str, ...]:
        """Architectures of the machine code in the wheel, such as "sm_90"."""
        return tuple(
            f"sm_{str(name).removesuffix('-real')}"
            for name in self.manifest.get("architectures", ())
            if not str(name).endswith("-virtual")
        )


def read_candidate(wheel: Path, root: Path) -> Candidate:
    """Reads a wheel and its manifest, and holds one to the other.

    Args:
        wheel: The wheel.
        root: The source tree that it must be built from.

    Returns:
        The wheel with its faults.
    """
    data = wheel.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    faults: list[str] = []
    version = ""
    try:
        version = str(parse_wheel_filename(wheel.name)[1])
    except InvalidWheelFilename as error:
        faults.append(f"wheel: {error}")
    text, why = _read_manifest(wheel)
    try:
        faults += [why] if why else _manifest_faults(text, digest, len(data), root)
    except (AttributeError, LookupError, TypeError) as error:
        faults.append(f"manifest: not laid out as the build does it ({error!r})")
        text = {}
    try:
        info = wheelcheck.check(wheel)
        faults += _source_faults(wheel, info, root)
        faults += instance_faults(info, root)
        for name in _SAID_TWICE:
            if text and text.get(name) != info.get(name):
                faults.append(f"manifest: {name} is not what the wheel says of itself")
    except WheelError as error:
        faults.append(f"wheel: {error}")
    # Whatever readers of zip, ELF and JSON throw at a damaged file: it is no reason to let it out.
    except Exception as error:
        faults.append(f"wheel: cannot be read and held to the tree ({error!r})")
    return Candidate(wheel, version, digest, text, tuple(faults))


def _source_faults(wheel: Path, info: Mapping[str, Any], root: Path) -> Iterator[str]:
    """The wheel's Python files, and those its machine code was compiled from, are the tree's."""
    package = root / "python" / wheelcheck.PACKAGE
    with zipfile.ZipFile(wheel) as archive:
        held = {
            name: archive.read(name)
            for name in archive.namelist()
            if name.startswith(f"{wheelcheck.PACKAGE}/") and name.endswith((".py", ".pyi"))
        }
    there = {
        path.relative_to(package.parent).as_posix(): path.read_bytes()
        for path in package.rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    native, stated = sources.digests(root), info["sources"]
    differing = [name for name in {*held, *there} if held.get(name) != there.get(name)]
    differing += [part for part in {*native, *stated} if native.get(part) != stated.get(part)]
    if differing:
        some = ", ".join(sorted(differing)[:3])
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        yield f"wheel: built from another tree: {some}{more}"


def instance_faults(info: Mapping[str, Any], root: Path) -> Iterator[str]:
    """Says where a wheel lacks kernels that a tree has tiles for, or has others.

    Args:
        info: What the wheel says of itself.
        root: The source tree.

    Yields:
        Every reason.
    """
    table = json.loads((root / _INSTANCES).read_text(encoding="utf-8"))
    wanted = {
        (direction, dtype, int(head_dim))
        for direction, tiles in (("fwd", "tiles"), ("bwd", "bwd_tiles"))
        for dtype in table["dtypes"]
        for head_dim in table[tiles]
    }
    held = [(each["direction"], each["dtype"], each["head_dim"]) for each in info["instances"]]
    if sorted(held) != sorted(wanted):
        missing = sorted(wanted.difference(held))
        some = ", ".join(" ".join(map(str, each)) for each in missing[:3]) or "none"
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        yield f"wheel: its kernels are not those of {_INSTANCES}: missing are {some}{more}"


def _read_manifest(wheel: Path) -> tuple[dict[str, Any], str]:
    path = wheel.with_name(manifest.file_name(wheel.name))
    try:
        text = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"manifest: {path.name} is missing; the build writes it beside the wheel"
    except (OSError, ValueError) as error:
        return {}, f"manifest: {path.name} is unreadable ({error})"
    if not isinstance(text, dict) or text.get("schema") != manifest.SCHEMA:
        return {}, f"manifest: expected schema {manifest.SCHEMA} in {path.name}"
    return text, ""


def _manifest_faults(text: Mapping[str, Any], digest: str, size: int, root: Path) -> Iterator[str]:
    wheel = text.get("wheel", {})
    if wheel.get("sha256") != digest or wheel.get("bytes") != size:
        yield f"manifest: is of another wheel (sha256 {wheel.get('sha256')})"
    if not text.get("deterministic"):
        yield "manifest: built with FLASH_ATTENTION_DETERMINISTIC=OFF"
    build = text.get("build", {})
    if build.get("preset") != "release":
        yield f"manifest: built with preset {build.get('preset')!r}, not 'release'"
    if build.get("defines"):
        yield f"manifest: built with options of its own: {' '.join(build['defines'])}"
    influences = build.get("environment")
    if influences is None:
        yield "manifest: does not say what the environment told the compilers"
    elif influences:
        yield f"manifest: the environment told the compilers of its own: {', '.join(influences)}"
    try:
        pin = json.loads((root / _PIN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"tree: {_PIN} is unreadable ({error})"
        return
    expected = {
        "name": pin["name"],
        "version": pin["version"],
        "sha256": pin["sdist"]["sha256"],
        "patches": pin["patches"],
    }
    if not isinstance(text.get("architectures"), list):
        raise TypeError("architectures: expected a list")
    if text.get("upstream") != expected:
        yield f"manifest: its upstream or patches are not those that {_PIN} pins"
