"""Checks a finished wheel: archive, name, contents, metadata, licences, stable ABI, GPU code."""

from __future__ import annotations

import configparser
import io
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomllib  # type: ignore[import-not-found, unused-ignore]
from elftools.elf.elffile import ELFFile
from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version
from torch_abi_audit import inspect_extension

from ..compile import manifest
from ..errors import RefusedError, differences, first_of
from ..files import ROOT
from . import archive, cubins, sbom

PACKAGE = "flash_attn_deterministic"
# By the machine that the library is for.
TAGS = {
    "EM_X86_64": "py3-none-manylinux_2_28_x86_64",
    "EM_AARCH64": "py3-none-manylinux_2_28_aarch64",
}
LIBRARY = f"{PACKAGE}/_C.so"
BUILD_INFO = f"{PACKAGE}/_build_info.json"
# What the package reads, beside its Python files.
DATA = frozenset(
    f"{PACKAGE}/verify/{name}"
    for name in ("contract/golden/golden.json", "last_release.json",
                 "shared/templates/page.html.j2", "shared/templates/page.md.j2")
)  # fmt: skip
LICENSES = (
    f"{PACKAGE}/licenses/FlashAttention-LICENSE",
    f"{PACKAGE}/licenses/CUTLASS-LICENSE.txt",
)

# These come with torch, which Python loads first.
TORCH = frozenset({"libtorch_cpu.so", "libtorch_cuda.so"})
# Shared, so that exceptions pass between torch and this library, and not linked in.
RUNTIME = frozenset({"libstdc++.so.6", "libgcc_s.so.1"})
_SYSTEM = frozenset(
    {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1",
     "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
)  # fmt: skip
# What cmake/BuildInfo.cmake writes.
_INFO = {*manifest.FROM_WHEEL, "schema", "tiles"}
_PYTHON = re.compile(rf"{PACKAGE}/(?:[A-Za-z0-9_]+/)*(?:[A-Za-z0-9_]+\.pyi?|py\.typed)")
_SHIM = re.compile(r"(aoti_)?torch_\w+\Z")
_WHEEL = (
    r"Wheel-Version: 1\.0\nGenerator: scikit-build-core [\d.]+\nRoot-Is-Purelib: false\nTag: {}"
)


def check(wheel: Path, root: Path = ROOT) -> dict[str, Any]:
    """Checks a wheel, with the tree whose pyproject.toml, README and licences it must have.

    Returns:
        The build information that the wheel carries.

    Raises:
        RefusedError: Everything that is wrong with it.
    """
    try:
        problems, version = [], parse_wheel_filename(wheel.name)[1]
    except InvalidWheelFilename as error:
        raise RefusedError(f"name: {error}") from error
    contents, date = archive.unpack(wheel.read_bytes())
    info_folder = f"{PACKAGE}-{version}.dist-info"
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours = {f"{info_folder}/licenses/{name}": name for name in project["license-files"]}
    expected = {
        LIBRARY, BUILD_INFO, *LICENSES, *ours, f"{info_folder}/sboms/{sbom.FILE_NAME}",
        *(f"{info_folder}/licenses/{name}" for name in sbom.LICENCE_TEXTS),
        *(f"{info_folder}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")),
    }  # fmt: skip
    for name in sorted(expected.difference(contents)):
        problems.append(f"contents: {name} is missing")
    for name in contents:
        if name not in expected | DATA and not _PYTHON.fullmatch(name):
            problems.append(f"contents: {name!r} does not belong into the wheel")
    for name, file in ours.items():
        if contents.get(name) not in (None, (root / file).read_bytes()):
            problems.append(f"contents: {name} is not the tree's {file}")
    readme = (root / project["readme"]).read_text(encoding="utf-8")
    problems += _metadata(contents.get(f"{info_folder}/METADATA", b""), project, readme, version)
    problems += _entry_points(contents.get(f"{info_folder}/entry_points.txt", b""), project)
    info: dict[str, Any] = json.loads(contents.get(BUILD_INFO, b"{}"))
    tag = ""
    if data := contents.get(LIBRARY):
        library = ELFFile(io.BytesIO(data))
        tag = TAGS.get(library["e_machine"], "")
        problems += [*_library(library), *_stable_abi(data, info), *_gpu_code(library, info)]
        problems += _folders(data)
        bill = contents.get(f"{info_folder}/sboms/{sbom.FILE_NAME}")
        if bill is not None and info:
            problems += sbom.problems(bill, str(version), info, data, date)
    full = project["version"] + (f"+{version.local}" if version.local else "")
    if wheel.name != f"{PACKAGE}-{full}-{tag}.whl":
        problems.append(f"name: expected {PACKAGE}-{full}-{tag}.whl, got {wheel.name}")
    if unknown := {*info} - _INFO:
        problems.append(f"{BUILD_INFO}: says more than the build writes: {first_of(unknown)}")
    said = contents.get(f"{info_folder}/WHEEL", b"").decode(errors="replace").strip()
    if not re.fullmatch(_WHEEL.format(tag), said, re.ASCII):
        problems.append(f"WHEEL: expected the one tag {tag} and no field of its own, got {said!r}")
    if problems:
        raise RefusedError(f"{wheel.name} is not fit to be used:\n  " + "\n  ".join(problems))
    return info


def metadata_of(
    project: Mapping[str, Any], readme: str, version: Version, texts: frozenset[str]
) -> dict[str, Any]:
    """What METADATA must say, as `packaging` reads it; `texts`: licences beside the project's."""
    extras = project.get("optional-dependencies", {})
    required = [str(Requirement(each)) for each in project["dependencies"]]
    for extra, wanted in extras.items():
        required += [str(Requirement(f"{each}; extra == '{extra}'")) for each in wanted]
    return {
        "metadata_version": "2.4",
        "name": project["name"],
        "version": project["version"] + (f"+{version.local}" if version.local else ""),
        "summary": project["description"],
        "keywords": project["keywords"],
        "license_expression": project["license"],
        "license_files": sorted([*project["license-files"], *texts]),
        "classifiers": project["classifiers"],
        "requires_python": project["requires-python"],
        "requires_dist": required,
        "provides_extra": [*extras] or None,
        "project_urls": sorted(project.get("urls", {}).items()),
        "description_content_type": "text/markdown",
        "description": readme.strip(),
    }


def _metadata(
    data: bytes, project: Mapping[str, Any], readme: str, version: Version
) -> Iterator[str]:
    raw, unknown = parse_email(data)
    found: dict[str, Any] = {**raw, **unknown}
    found["description"] = str(found.get("description", "")).strip()
    found["license_files"] = sorted(found.get("license_files", []))
    found["project_urls"] = sorted(found.get("project_urls", {}).items())
    expected = metadata_of(project, readme, version, sbom.LICENCE_TEXTS)
    # What pyproject.toml does not say, METADATA must not.
    yield from differences(found, {**dict.fromkeys(found), **expected}, "METADATA")


def _entry_points(data: bytes, project: Mapping[str, Any]) -> Iterator[str]:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    try:
        parser.read_string(data.decode())
    except (configparser.Error, UnicodeDecodeError) as error:
        yield f"entry_points.txt: cannot be read ({error!r})"
        return
    found = {name: dict(parser[name]) for name in parser.sections()}
    expected = {"console_scripts": project["scripts"], **project["entry-points"]}
    if found != expected:
        yield f"entry_points.txt: expected {expected} as pyproject.toml has it, got {found}"


def _library(library: ELFFile) -> Iterator[str]:
    dynamic: Any = library.get_section_by_name(".dynamic")
    needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
    for name in sorted(TORCH - needed):
        yield f"{LIBRARY}: does not name {name}, so torch's functions would not be found"
    for name in sorted(RUNTIME - needed):
        yield f"{LIBRARY}: does not name {name}, which must not be linked in"
    for name in sorted(needed - TORCH - RUNTIME - _SYSTEM):
        yield f"{LIBRARY}: needs {name}, which the wheel cannot count on"
    for kind in ("rpath", "runpath"):
        for tag in dynamic.iter_tags(f"DT_{kind.upper()}"):
            yield f"{LIBRARY}: carries library search paths: {getattr(tag, kind)}"
    if library.get_section_by_name(".symtab") is not None:
        yield f"{LIBRARY}: not stripped (it has a .symtab section)"
    for symbol in sorted(unbound(library)):
        if not _SHIM.match(symbol):
            yield f"{LIBRARY}: imports {symbol}, which no library is named for"


def unbound(library: ELFFile) -> set[str]:
    """Names the symbols that others must define, without saying which library, but weak ones."""
    versions: Any = library.get_section_by_name(".gnu.version")
    symbols: Any = library.get_section_by_name(".dynsym")
    return {
        symbol.name
        for index, symbol in enumerate(symbols.iter_symbols())
        if symbol["st_shndx"] == "SHN_UNDEF"
        and symbol["st_info"]["bind"] != "STB_WEAK"
        and (versions is None or not isinstance(versions.get_symbol(index)["ndx"], int))
    } - {""}


def _folders(data: bytes) -> Iterator[str]:
    # __FILE__ in a header leaves such a path; the build of another machine would differ.
    found = {path.decode() for path in re.findall(rb"[\w./+-]*/site-packages/[\w./+-]+", data)}
    if found:
        yield (
            f"{LIBRARY}: names folders of the machine it was built on ({min(found)}); "
            "map them with -ffile-prefix-map"
        )


def _stable_abi(data: bytes, info: Mapping[str, Any]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "_C.so")
        path.write_bytes(data)
        report = inspect_extension(path)
    if report.error:
        yield f"{LIBRARY}: torch-abi-audit: {report.error}"
    elif not report.torch.stable:
        wrong = ", ".join(report.torch.unstable_symbols) or "no stable shim is used at all"
        yield f"{LIBRARY}: torch-abi-audit: not torch's stable ABI: {wrong}"
    elif report.torch.unknown_shim_symbols:
        names = ", ".join(report.torch.unknown_shim_symbols)
        yield f"{LIBRARY}: torch-abi-audit does not know the shims {names}"
    elif report.torch.min_torch_version and "torch_target" in info:
        least, stated = report.torch.min_torch_version, info["torch_target"]
        if Version(least).release[:2] > Version(stated).release[:2]:
            names = ", ".join(report.torch.version_defining_symbols)
            yield f"{LIBRARY}: needs torch {least} ({names}), but is said to run from {stated}"


def _gpu_code(library: ELFFile, info: Mapping[str, Any]) -> Iterator[str]:
    if not info:
        return
    stated = set()
    for name in info["architectures"]:
        number, _, kind = re.sub(r"[af](?=-|\Z)", "", name).partition("-")
        stated |= {f"{number}-{k}" for k in ([kind] if kind else ["real", "virtual"])}
    found = cubins.architectures(fatbin(library))
    if stated != found:
        yield (
            f"{LIBRARY}: holds GPU code for {', '.join(sorted(found)) or 'nothing'}, "
            f"but _build_info.json states {', '.join(sorted(stated))}"
        )
    if not info["instances"]:
        yield f"{BUILD_INFO}: lists no instance"
    if not info.get("sources"):
        yield f"{BUILD_INFO}: does not say what sources the GPU code is compiled from"


def fatbin(library: ELFFile) -> bytes:
    """Takes the GPU code out of a library, as nvcc laid it out; b"" if it holds none."""
    section = library.get_section_by_name(".nv_fatbin")
    return bytes(section.data()) if section else b""
