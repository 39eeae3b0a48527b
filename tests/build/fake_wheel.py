"""Small wheels of the shape of ours, with a library that a C compiler makes in a moment."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli
from flash_attn_build.compile import toolchain
from flash_attn_build.files import ROOT
from flash_attn_build.wheel import archive, check, dist_info, sbom

TAG, ARM_TAG = check.TAGS["EM_X86_64"], check.TAGS["EM_AARCH64"]
INFO: Mapping[str, Any] = {
    "schema": 1,
    "upstream": {"name": "flash-attn", "version": "2.8.3.post2", "sha256": "d0" * 32,
        "patches": [{"name": "0001-a.patch", "sha256": "a1" * 32}]},
    "cuda_toolkit": "13.0.88",
    "architectures": ["80-real", "90-real", "90a-real", "80-virtual"],
    "deterministic": True,
    "torch_target": "2.10",
    "tiles": {},
    "instances": [{"direction": "fwd", "dtype": "bf16", "head_dim": 64},
        {"direction": "bwd", "dtype": "bf16", "head_dim": 64}],
    "sources": {"cpp": "5e" * 32},
    "bits_version": 1,
}  # fmt: skip
GPU_CODE = ((2, 80), (1, 80), (2, 90))
COMPONENTS = (
    sbom.Component("CUDA Runtime (static)", "13.0.96", "c0" * 32, b"eula"),
    sbom.Component("Zig runtime libraries", "0.17.0", "21" * 32, b"mit"),
    sbom.Component("glibc (libc_nonshared.a)", "2.28 (ziglang 0.17.0)", "61" * 32, b"lgpl"),
    sbom.Component("torch headers of the stable ABI", "2.13.0", "70" * 32, b"bsd"),
)
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
# What a wheel is compared with, of the tree.
OF_THE_TREE = ("pyproject.toml", "README.md", *PROJECT["license-files"])
VERSION = PROJECT["version"]
DATE = archive.date_of(0)
SHIMS = ("aoti_torch_get_dtype", "torch_library_impl")


def fatbin(entries: Iterable[tuple[int, int]] = GPU_CODE) -> bytes:
    """A fat binary of (kind, sm) entries, laid out as nvcc 13.0 does, padding included."""
    body = b""
    for kind, sm in entries:
        payload = b"\x7f" * 24
        body += struct.pack("<HHIQ", kind, 0x101, 64, len(payload))
        body += struct.pack("<IIHHI", len(payload), 0, 8, 1, sm) + bytes(32) + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body + bytes(8)


def library(
    folder: Path,
    calls: Iterable[str] = SHIMS,
    code: bytes | None = None,
    needed: Iterable[str] = ("torch_cpu", "torch_cuda", "stdc++", "gcc_s"),
    options: Iterable[str] = ("-s",),
) -> bytes:
    """Links a shared library that calls the given functions and holds the given GPU code."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = toolchain.host_compiler()[0]
    flags = ["-x", "c", "-shared", "-fPIC", "-nostdlib"]
    calls = list(calls)
    for name in needed:
        if name in ("stdc++", "gcc_s"):  # the compiler's own
            continue
        source = "".join(f"void {call}(void) {{}}\n" for call in calls)
        _compile([compiler, *flags, "-", "-o", f"lib{name}.so"], source, folder)
    data = fatbin() if code is None else code
    source = "".join(f"void {call}(void);\n" for call in [*calls, "abort"])
    source += "void run(void) {" + "".join(f"{call}();" for call in calls) + "abort();}\n"
    if data:
        numbers = ",".join(str(byte) for byte in data)
        source += '__attribute__((used, section(".nv_fatbin"), aligned(8)))\n'
        source += f"static const unsigned char code[] = {{{numbers}}};\n"
    links = ["-L.", "-Wl,--no-as-needed", *(f"-l{name}" for name in needed), "-lc"]
    options = ["-Wl,--allow-shlib-undefined", *options]
    command = [compiler, *flags, "-", *options, *links, "-o", "_C.so"]
    _compile(command, source, folder)
    return (folder / "_C.so").read_bytes()


def _compile(command: list[str], source: str, folder: Path) -> None:
    subprocess.run(command, input=source, text=True, cwd=folder, check=True)


def for_arm(binary: bytes) -> bytes:
    """Says of a library that it is for aarch64."""
    return binary[:18] + (183).to_bytes(2, "little") + binary[20:]  # EM_AARCH64


def contents(
    binary: bytes, tag: str = TAG, version: str = VERSION, info: Mapping[str, Any] = INFO
) -> dict[str, bytes]:
    """The files of a wheel that is as it should be, but for the RECORD."""
    folder = dist_info.folder(version)
    return {
        "flash_attn_deterministic/__init__.py": b"",
        "flash_attn_deterministic/py.typed": b"",
        check.LIBRARY: binary,
        check.BUILD_INFO: json.dumps(info).encode(),
        **dict.fromkeys(check.LICENSES, b"text"),
        **dist_info.files(ROOT, version.partition("+")[2], tag),
        **{f"{folder}/licenses/{each.text_name}": each.text for each in COMPONENTS},
        f"{folder}/sboms/{sbom.FILE_NAME}": sbom.describe(version, info, binary, COMPONENTS, DATE),
    }


def plain(binary: bytes) -> dict[str, bytes]:
    """The files of a wheel as scikit-build-core leaves it, before it is repaired."""
    found = contents(binary, "py3-none-linux_x86_64")
    return {n: d for n, d in found.items() if not n.endswith((".json", "-LICENSE.txt"))} | {
        check.BUILD_INFO: found[check.BUILD_INFO],
        check.LICENSES[1]: b"text",
    }


def pack(folder: Path, files: Mapping[str, bytes], tag: str = TAG, version: str = VERSION) -> Path:
    """Packs a wheel as the build does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"flash_attn_deterministic-{version}-{tag}.whl"
    path.write_bytes(archive.pack(files, DATE))
    return path
