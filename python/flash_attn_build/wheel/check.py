"""Checks a finished wheel: archive, name, contents, metadata, licences, stable ABI, GPU code."""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version
from torch_abi_audit import inspect_extension

from ..compile import manifest
from ..errors import RefusedError, first_of
from ..files import ROOT, parse_json
from . import archive, cubins, dist_info, sbom
from .dist_info import PACKAGE

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
    data = contents.get(LIBRARY)
    library = ELFFile(io.BytesIO(data)) if data else None
    tag = TAGS.get(library["e_machine"], "") if library else ""
    ours = dist_info.files(root, version.local or "", tag)
    folder = next(iter(ours)).partition("/")[0]
    bill = f"{folder}/sboms/{sbom.FILE_NAME}"
    # Those of what is linked come from its packages, and are not compared.
    texts = (f"{folder}/licenses/{name}" for name in sbom.LICENCE_TEXTS)
    expected = {LIBRARY, BUILD_INFO, *LICENSES, *ours, bill, *texts, f"{folder}/RECORD"}
    problems += [
        f"contents: {n} is missing or empty" for n in sorted(expected) if not contents.get(n)
    ]
    for name, found in contents.items():
        if name not in expected | DATA and not _PYTHON.fullmatch(name):
            problems.append(f"contents: {name!r} does not belong into the wheel")
        if found != ours.get(name, found):
            problems.append(f"contents: {name} is not the one of this tree")
    info: dict[str, Any] = parse_json(contents.get(BUILD_INFO, b"{}"))
    if library and data:
        problems += [*_library(library), *_stable_abi(data, info), *_gpu_code(library, info)]
        problems += _folders(data)
        if bill in contents and info:
            problems += sbom.problems(contents[bill], str(version), info, data, date)
    full = folder.removesuffix(".dist-info")
    if wheel.name != f"{full}-{tag}.whl":
        problems.append(f"name: expected {full}-{tag}.whl, got {wheel.name}")
    if unknown := {*info} - _INFO:
        problems.append(f"{BUILD_INFO}: says more than the build writes: {first_of(unknown)}")
    if problems:
        raise RefusedError(f"{wheel.name} is not fit to be used:\n  " + "\n  ".join(problems))
    return info


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
