"""Small wheels of the shape of ours, with a library that a C compiler makes in a moment."""

from __future__ import annotations

import base64
import hashlib
import json
import stat
import struct
import subprocess
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flash_attn_build.compile import toolchain
from flash_attn_build.wheel import check, sbom

TAG = check.TAGS["EM_X86_64"]
INFO: Mapping[str, Any] = {
    "schema": 1,
    "upstream": {
        "name": "flash-attn",
        "version": "2.8.3.post2",
        "sha256": "d0" * 32,
        "patches": [{"name": "0001-a.patch", "sha256": "a1" * 32}],
    },
    "cuda_toolkit": "13.0.88",
    "architectures": ["80-real", "90-real", "90a-real", "80-virtual"],
    "deterministic": True,
    "torch_target": "2.10",
    "tiles": {},
    "instances": [
        {"direction": "fwd", "dtype": "bf16", "head_dim": 64},
        {"direction": "bwd", "dtype": "bf16", "head_dim": 64},
    ],
    "sources": {"cpp": "5e" * 32},
    "bits_version": 1,
}
GPU_CODE = ((2, 80), (1, 80), (2, 90))
PARTS = (
    sbom.Part("CUDA Runtime (static)", "13.0.96", "c0" * 32, sbom.LICENCES[3], b"eula", "cudart"),
    sbom.Part("Zig runtime libraries", "0.17.0", "21" * 32, "MIT", b"mit", "compiler_rt"),
    sbom.Part(
        "glibc (libc_nonshared.a)", "2.28 (ziglang 0.17.0)", "61" * 32, "LGPL-2.1-or-later", b"lgpl"
    ),
    sbom.Part("torch headers of the stable ABI", "2.13.0", "70" * 32, "BSD-3-Clause", b"bsd"),
)
LICENCE_FILES = ("LICENSE", *(part.text_name for part in PARTS))
METADATA = (
    "Metadata-Version: 2.4\nName: flash-attn-deterministic\nVersion: 0.1.0\n"
    "Requires-Python: >=3.10\nRequires-Dist: torch>=2.10\n"
    f"License-Expression: {' AND '.join(sbom.LICENCES)}\n"
    + "".join(f"License-File: {name}\n" for name in LICENCE_FILES)
)
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


def contents(binary: bytes, tag: str = TAG) -> dict[str, bytes]:
    """The files of a wheel that is as it should be."""
    metadata = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n"
    dist_info = "flash_attn_deterministic-0.1.0.dist-info"
    return {
        "flash_attn_deterministic/__init__.py": b"",
        "flash_attn_deterministic/py.typed": b"",
        check.LIBRARY: binary,
        check.BUILD_INFO: json.dumps(INFO).encode(),
        **dict.fromkeys(check.LICENSES, b"text"),
        **{f"{dist_info}/licenses/{name}": b"text" for name in LICENCE_FILES},
        f"{dist_info}/METADATA": METADATA.encode(),
        f"{dist_info}/WHEEL": metadata.encode(),
        f"{dist_info}/sboms/{sbom.FILE_NAME}": sbom.describe("0.1.0", INFO, binary, PARTS, 0),
    }


def record(files: Mapping[str, bytes], name: str) -> bytes:
    """RECORD of files, under a name."""
    lines = [f"{name},,\n"]
    for each, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{each},sha256={digest},{len(data)}\n")
    return "".join(lines).encode()


def pack(
    folder: Path,
    files: Mapping[str, bytes],
    tag: str = TAG,
    mode: int = 0o644,
    version: str = "0.1.0",
) -> Path:
    """Zips a wheel whose files have a mode; its RECORD is made, unless it is among the files."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"flash_attn_deterministic-{version}-{tag}.whl"
    name = f"flash_attn_deterministic-{version}.dist-info/RECORD"
    files = {name: record(files, name), **files}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            item = zipfile.ZipInfo(name)
            item.external_attr = (stat.S_IFREG | mode) << 16
            archive.writestr(item, data, zipfile.ZIP_DEFLATED)
    return path
