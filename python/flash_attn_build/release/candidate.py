"""The wheel that is to be published, with the manifest that the build wrote beside it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from ..compile import manifest, sources
from ..errors import RefusedError, differences, first_of
from ..files import read_tree
from ..wheel import archive, check
from ..wheel.dist_info import PACKAGE
from . import schema
from .policy import Policy

_SCHEMA = "docs/manifest.schema.json"
_PIN = "cpp/upstream/upstream.json"
_INSTANCES = "cpp/instances.json"
# Flags that CMake adds by itself, or that name folders or what the build was asked for; any other
# must stand in the tree's CMake files.
_FLAGS = re.compile(
    r"(?!.*\.\.)(-(D(NDEBUG|TORCH_TARGET_VERSION=0x[0-9a-f]+|FAD_ARCHITECTURES=\S+|fad_\w+_EXPORTS)"
    r"|O3|MD|x|isystem|include|fPIC|Xcompiler=-fPIC|forward-unknown-to-host-compiler"
    r"|ccbin=/[\w./+-]+|std=gnu\+\+17"
    r"|I(\.|build)/[\w./-]+|-generate-code=arch=compute_\d+[a-z]?,code=\[[\w,]+\]"
    r"|(Xcompiler=-)?ffile-prefix-map=[\w./<>=-]+)|cu|(\.|build|<cuda>|<environment>)/[\w./-]+)"
)


@dataclass(frozen=True)
class Candidate:
    """A wheel, its manifest, and everything that is wrong with them."""

    path: Path
    version: str  # without a local part; "" if the name is not that of a wheel
    kind: str  # machine and local part of the version: "x86_64", "aarch64+cu12"
    sha256: str
    # As the schema has it; empty if there is none of these bytes and that form.
    manifest: Mapping[str, Any] = field(repr=False)
    problems: tuple[str, ...] = ()

    @property
    def architectures(self) -> tuple[str, ...]:
        """Architectures of the machine code in the wheel, such as "sm_90"."""
        return tuple(
            f"sm_{name.removesuffix('-real')}"
            for name in self.manifest.get("architectures") or ()
            if not name.endswith("-virtual")
        )


def read_candidate(wheel: Path, root: Path, policy: Policy) -> Candidate:
    """Reads a wheel and its manifest, and compares them with each other and with the tree."""
    data = wheel.read_bytes()  # once: what is judged are these bytes, whatever becomes of the file
    sha256 = hashlib.sha256(data).hexdigest()
    problems: list[str] = []
    version = kind = ""
    text: dict[str, Any] = {}
    try:
        _, parsed, _, tags = parse_wheel_filename(wheel.name)
        version, machine = parsed.public, min(str(tag) for tag in tags).partition("_2_28_")[2]
        kind = machine + (f"+{parsed.local}" if parsed.local else "")
        text = manifest.read(wheel)
        if misshapen := schema.problems(text, root / _SCHEMA):
            problems += [f"manifest: {problem}" for problem in misshapen]
            text = {}
    except (InvalidWheelFilename, RefusedError) as error:
        problems.append(f"manifest: {error}")
    # Readers of ELF and JSON raise many kinds of errors for a damaged file; each is a problem.
    try:
        info = check.check(wheel, root)
        contents, date = archive.unpack(data)
        problems += _source_problems(contents, info, root)
        problems += instance_problems(info, root)
        if text:
            expected = {key: info.get(key) for key in manifest.FROM_WHEEL}
            expected["wheel"] = {"name": wheel.name, "sha256": sha256, "bytes": len(data)}
            problems += [f"manifest: {each}" for each in differences(text, expected)]
            if archive.date_of(text["build"]["source_date_epoch"]) != date:
                problems.append("manifest: source_date_epoch is not the date in the wheel")
    except RefusedError as error:
        problems.append(f"wheel: {error}")
    except Exception as error:
        problems.append(f"wheel: cannot be compared with manifest and tree ({error!r})")
    try:
        found = _manifest_problems(text, root, policy) if text else ()
        problems += [f"manifest: {problem}" for problem in found]
    except (OSError, LookupError, ValueError) as error:
        problems.append(f"tree: {error}")
    return Candidate(wheel, version, kind, sha256, text, tuple(problems))


def _source_problems(
    contents: Mapping[str, bytes], info: Mapping[str, Any], root: Path
) -> Iterator[str]:
    """The wheel's files, and those its machine code was compiled from, are the tree's."""
    made = (check.LIBRARY, check.BUILD_INFO, *check.LICENSES)  # by the build
    held = {name: data for name, data in contents.items() if name.startswith(f"{PACKAGE}/")}
    there = read_tree(root / "python", [PACKAGE])
    native, stated = sources.digests(root), info["sources"]
    differing = [n for n in {*held, *there}.difference(made) if held.get(n) != there.get(n)]
    differing += [part for part in {*native, *stated} if native.get(part) != stated.get(part)]
    if differing:
        yield f"wheel: built from another tree: {first_of(differing)}"


def instance_problems(info: Mapping[str, Any], root: Path) -> Iterator[str]:
    """Compares the kernels of a wheel with those that a tree has tiles for."""
    table = json.loads((root / _INSTANCES).read_text(encoding="utf-8"))
    forward = dict.fromkeys(head_dim for tiles in table["fwd_tiles"].values() for head_dim in tiles)
    tiles = {"fwd": forward, "bwd": table["bwd_tiles"]}
    wanted = {
        f"{direction} {dtype} {head_dim}"
        for direction, head_dims in tiles.items()
        for dtype in table["dtypes"]
        for head_dim in head_dims
    }
    # A kernel may exist in several families, but in each only once.
    held = {"{direction} {dtype} {head_dim}".format(**each) for each in info["instances"]}
    distinct = len({json.dumps(each, sort_keys=True) for each in info["instances"]})
    if held != wanted or distinct != len(info["instances"]):
        missing = wanted - held or {"none"}
        yield f"wheel: its kernels are not those of {_INSTANCES}: missing are {first_of(missing)}"


def _manifest_problems(text: Mapping[str, Any], root: Path, policy: Policy) -> Iterator[str]:
    """Compares what a manifest, as the schema has it, states of the build with tree and policy."""
    build, tools, cuda, units = (
        text[key] for key in ("build", "tools", "cuda_toolkit", "translation_units")
    )
    pin = json.loads((root / _PIN).read_text(encoding="utf-8"))
    upstream = {"name": pin["name"], "version": pin["version"], "sha256": pin["sdist"]["sha256"]}
    expected = {
        "build": {"compiled_in_this_run": len(units)},  # nothing that an earlier build left
        "tools": {"nvcc": cuda},
        "totals": {"translation_units": len(units)},
        "upstream": {**upstream, "patches": pin["patches"]},
    }
    yield from differences(text, expected)
    if build["toolkit_sha256"] not in policy.toolkits.get(cuda, ()):
        yield f"the toolkit {build['toolkit_sha256']} is not the locked one of nvcc {cuda}"
    objects = [unit for unit in units if unit["output"].endswith(".cu.o")]
    if len(objects) < len(text["instances"]):
        yield f"{len(objects)} CUDA translation units for {len(text['instances'])} kernels"
    python = {"python_full_version": tools["python"]}
    others = {*tools} - {"nvcc", "python"}
    for locked in manifest.locked(cuda, root):
        others.discard(locked.name)
        wanted = locked.marker is None or locked.marker.evaluate(python)
        version = tools.get(locked.name, "").partition("+")[0]  # a local version: "+cpu"
        if (wanted or version) and version not in locked.specifier:
            yield f"built with {locked.name} {version or None}, but locks/ has {locked}"
    if len(others) != 1:
        yield f"beside what locks/ has it names {sorted(others)}, not the host compiler alone"
    files = [root / "CMakeLists.txt", *sorted((root / "cmake").rglob("*"))]
    lines = "\n".join(path.read_text(encoding="utf-8") for path in files if path.is_file())
    known = set(re.split(r'[\s;<>"():$]+', re.sub(r"#.*", "", lines)))
    for target, flags in text["flags"].items():
        for flag in flags:
            if not _FLAGS.fullmatch(flag) and flag.removeprefix("-D") not in known:
                yield f"{target} was compiled with {flag!r}, which no CMake file has"
