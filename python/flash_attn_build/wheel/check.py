"""Checks a finished wheel: name, contents, licences, stable ABI, GPU code."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from elftools.elf.elffile import ELFFile
from packaging.metadata import Metadata
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version
from torch_abi_audit import inspect_extension

from ..errors import RefusedError
from . import cubins, sbom

PACKAGE = "flash_attn_deterministic"
# By the machine that the library is for.
TAGS = {
    "EM_X86_64": "py3-none-manylinux_2_28_x86_64",
    "EM_AARCH64": "py3-none-manylinux_2_28_aarch64",
}
LIBRARY = f"{PACKAGE}/_C.so"
BUILD_INFO = f"{PACKAGE}/_build_info.json"
# The contract's golden results are compared with it.
GOLDEN = f"{PACKAGE}/verify/contract/golden/golden.json"
LICENSES = (
    f"{PACKAGE}/licenses/FlashAttention-LICENSE",
    f"{PACKAGE}/licenses/CUTLASS-LICENSE.txt",
)
# Of code that the linker adds; repair takes them from the machine that links.
LICENCE_TEXTS = (
    "CUDA-Runtime-static-LICENSE.txt",
    "Zig-runtime-libraries-LICENSE.txt",
    "glibc-libc-nonshared-a-LICENSE.txt",
    "torch-headers-of-the-stable-ABI-LICENSE.txt",
)

# These come with torch, which Python loads first.
TORCH = frozenset({"libtorch_cpu.so", "libtorch_cuda.so"})
# Shared, so that exceptions pass between torch and this library, and not linked in.
RUNTIME = frozenset({"libstdc++.so.6", "libgcc_s.so.1"})
_SYSTEM = frozenset(
    {
        "libc.so.6",
        "libm.so.6",
        "libdl.so.2",
        "libpthread.so.0",
        "librt.so.1",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
    }
)
_METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses", "sboms")
_SHIM = re.compile(r"(aoti_)?torch_\w+\Z")


def check(wheel: Path) -> dict[str, Any]:
    """Checks a wheel: name, contents, library, GPU code.

    Args:
        wheel: The wheel, repaired by auditwheel.

    Returns:
        The build information that the wheel carries.

    Raises:
        RefusedError: Everything that is wrong with it.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if not n.endswith("/")]
        problems = [*_contents(names, wheel), *_record(archive, names)]
        tag = ""
        info: dict[str, Any] = {}
        if BUILD_INFO in names:
            info = json.loads(archive.read(BUILD_INFO))
        if LIBRARY in names:
            data = archive.read(LIBRARY)
            library = ELFFile(io.BytesIO(data))
            tag = TAGS.get(library["e_machine"], "")
            problems += [*_library(library), *_stable_abi(data, info), *_gpu_code(library, info)]
            problems += [*_folders(data), *_bill(archive, names, info, data)]
        for name in names:
            if name.endswith(".dist-info/WHEEL"):
                problems += _tags(archive.read(name).decode(), tag)
            elif name.endswith(".dist-info/METADATA"):
                problems += _metadata(archive.read(name), wheel, names)
        problems += _name(wheel, tag)
    if problems:
        raise RefusedError(f"{wheel.name} is not fit to be used:\n  " + "\n  ".join(problems))
    return info


def _name(wheel: Path, tag: str) -> Iterator[str]:
    try:
        name, _, build, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        yield f"name: {error}"
        return
    if name != PACKAGE.replace("_", "-") or build or {str(t) for t in tags} != {tag}:
        yield f"name: expected {PACKAGE}-<version>-{tag}.whl, got {wheel.name}"


def _tags(metadata: str, tag: str) -> Iterator[str]:
    tags = re.findall(r"^Tag: (.+)$", metadata, re.MULTILINE)
    if tags != [tag]:
        yield f"WHEEL: expected the one tag {tag}, got {', '.join(tags) or 'none'}"


def _metadata(data: bytes, wheel: Path, names: list[str]) -> Iterator[str]:
    try:
        metadata = Metadata.from_email(data)
    except Exception as error:  # a group of what is wrong
        yield f"METADATA: not valid ({error}: {getattr(error, 'exceptions', '')})"
        return
    if metadata.version != parse_wheel_filename(wheel.name)[1]:
        yield f"METADATA: says version {metadata.version}, the name says another"
    expression = str(metadata.license_expression or "")
    for licence in sbom.LICENCES:
        if licence not in expression.split(" AND "):
            yield f"METADATA: License-Expression {expression!r} lacks {licence}, which is linked in"
    listed = {str(name) for name in metadata.license_files or ()}
    there = {name.partition(".dist-info/licenses/")[2] for name in names} - {""}
    if listed != there:
        yield f"METADATA: License-File differs from .dist-info/licenses: {sorted(listed ^ there)}"
    for text in LICENCE_TEXTS:
        if text not in there:
            yield f"contents: the licence text {text} is missing"


def _contents(names: list[str], wheel: Path) -> Iterator[str]:
    dist_info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    for name in (LIBRARY, BUILD_INFO, *LICENSES):
        if name not in names:
            yield f"contents: {name} is missing"
    if len(names) != len(set(names)):
        yield "contents: a file is there twice"
    for name in names:
        path = PurePosixPath(name)
        top = path.parts[0]
        known = name in (LIBRARY, BUILD_INFO, GOLDEN) or path.suffix in (".py", ".pyi")
        in_package = top == PACKAGE and (
            known or path.name == "py.typed" or path.parts[1] == "licenses"
        )
        in_metadata = top == dist_info and path.parts[1] in _METADATA
        if not in_package and not in_metadata:
            yield f"contents: {name} does not belong into the wheel"


def _record(archive: zipfile.ZipFile, names: list[str]) -> Iterator[str]:
    """Installers refuse a wheel whose RECORD is not that of its files."""
    (record, *_) = [name for name in names if name.endswith(".dist-info/RECORD")] or [""]
    lines = archive.read(record).decode().splitlines() if record else []
    stated = {row[0]: row[1:] for row in csv.reader(lines) if row}
    for name in sorted({*names, *stated}):
        expected = None
        if name == record:
            expected = ["", ""]
        elif name in names:
            data = archive.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            expected = [f"sha256={digest}", str(len(data))]
        if stated.get(name) != expected:
            yield f"RECORD: what it states of {name} is not what the wheel holds"


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
    """Names the symbols that others must define, without saying which library.

    Args:
        library: A shared library.

    Returns:
        Those that are bound to no version of a library, but for weak ones.
    """
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


def _bill(
    archive: zipfile.ZipFile, names: list[str], info: dict[str, Any], library: bytes
) -> Iterator[str]:
    bills = [name for name in names if ".dist-info/sboms/" in name]
    expected = [name for name in bills if name.endswith(f"/{sbom.FILE_NAME}")]
    if bills != expected or len(bills) != 1:
        yield f"contents: expected one bill of materials, .dist-info/sboms/{sbom.FILE_NAME}"
    elif info:
        yield from sbom.problems(archive.read(bills[0]), info, library)


def _stable_abi(data: bytes, info: dict[str, Any]) -> Iterator[str]:
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


def _gpu_code(library: ELFFile, info: dict[str, Any]) -> Iterator[str]:
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
