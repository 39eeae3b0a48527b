"""The wheel's bill of materials (CycloneDX JSON, PEP 770), and what the build took from outside.

It names the code of others that is inside `_C.so`. The same inputs give the same bytes: the serial
number, without which GitHub attests no bill, is made of the content, and the date is that of the
wheel's files. Viewers draw the graph from the wheel down.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ..compile.toolchain import Toolchain
from ..errors import BuildError
from ..files import read_tree, sha256_of, tree_sha256
from .archive import Date

NAME = "flash-attn-deterministic"
FILE_NAME = f"{NAME}.cdx.json"
LICENCE = "BSD-3-Clause AND MIT AND LGPL-2.1-or-later AND LicenseRef-NVIDIA-CUDA-Toolkit-EULA"
# Code of others in the library: its licence, its package URL but for the version, and what it is.
CODE = {
    "flash-attn": (
        "BSD-3-Clause",
        "pkg:pypi/flash-attn@",
        "Device code of its source distribution, whose sha256 this is, with our patches.",
    ),
    "CUTLASS": (
        "BSD-3-Clause",
        "pkg:github/nvidia/cutlass@v",
        "Header templates from the source distribution of flash-attn, whose sha256 this is.",
    ),
    "CUDA Runtime (static)": (
        "LicenseRef-NVIDIA-CUDA-Toolkit-EULA",
        "",
        "libcudart_static.a, whose sha256 this is, linked into the library.",
    ),
    "Zig runtime libraries": (
        "MIT",
        "pkg:pypi/ziglang@",
        "compiler_rt and ubsan_rt, from which the linker takes what it lacks. "
        "The hash is over their sources in the package ziglang.",
    ),
    "glibc (libc_nonshared.a)": (
        "LGPL-2.1-or-later",
        "",
        "The few functions that glibc's licence lets programs link statically; "
        "the rest is the system's. The hash is over their sources in the package ziglang.",
    ),
    "torch headers of the stable ABI": (
        "BSD-3-Clause",
        "",
        "Inline functions. The hash is over torch/csrc/stable and torch/headeronly. "
        "The libraries of torch are not in the wheel.",
    ),
}
LINKED = tuple(CODE)[2:]  # what the linker and compiler of a machine put into the library
# The source distribution holds a copy of CUTLASS, and says its version in a header only
# (csrc/cutlass/include/cutlass/version.h).
CUTLASS_IN = {"2.8.3.post2": "4.0.0"}
_GLIBC = "2.28"  # what cmake/Link.cmake asks zig for


@dataclass(frozen=True)
class Component:
    """Code of others that is in the library."""

    name: str
    version: str
    sha256: str  # of the file, or of the folder of sources (`files.tree_sha256`), it came from
    text: bytes = field(repr=False, default=b"")  # of the licence

    @property
    def text_name(self) -> str:
        """File name of its licence in the wheel's .dist-info/licenses."""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-") + "-LICENSE.txt"


LICENCE_TEXTS = frozenset(Component(name, "", "").text_name for name in LINKED)


def find_components(cuda: Toolchain) -> tuple[Component, ...]:
    """Finds what linker and compiler of this machine put into the library."""
    try:
        zig, torch = map(importlib.metadata.distribution, ("ziglang", "torch"))
        zig_files, headers = (Path(str(p.locate_file(p.name))) for p in (zig, torch))
        glibc, runtime = "lib/libc/glibc", ("compiler_rt.zig", "compiler_rt", "ubsan_rt.zig")
        found = (
            (_cudart_version(cuda), sha256_of(cuda.cudart), _cuda_licence(cuda)),
            (zig.version, _tree(zig_files / "lib", *runtime), (zig_files / "LICENSE").read_bytes()),
            (f"{_GLIBC} (ziglang {zig.version})", _tree(zig_files, glibc),
             (zig_files / glibc / "LICENSES").read_bytes()),
            # A local version ("+cpu") says what torch's libraries can do, not its headers.
            (torch.version.partition("+")[0],
             _tree(headers / "include/torch", "csrc/stable", "headeronly"),
             _package_licence("torch")),
        )  # fmt: skip
        return tuple(Component(name, *each) for name, each in zip(LINKED, found, strict=True))
    except (OSError, importlib.metadata.PackageNotFoundError) as error:
        raise BuildError(
            f"the wheel's bill of materials: {error}. Install the build's packages again: "
            "`nox -s build` does it."
        ) from error


def describe(
    version: str,
    info: Mapping[str, Any],
    library: bytes,
    components: tuple[Component, ...],
    date: Date,
) -> bytes:
    """Writes the bill of materials of a wheel, as CycloneDX JSON.

    `info` is the build information in the wheel, `library` its `_C.so`, `date` that of its files.
    """
    upstream = info["upstream"]
    release, sha256 = upstream["version"], upstream["sha256"]
    if release not in CUTLASS_IN:
        raise BuildError(
            f"the wheel's bill of materials: which CUTLASS does flash-attn {release} hold? Its "
            "csrc/cutlass/include/cutlass/version.h says it; add it to CUTLASS_IN in "
            "flash_attn_build/wheel/sbom.py."
        )
    # The build itself puts the licences of these two into the package.
    held = [Component("flash-attn", release, sha256)]
    held += [Component("CUTLASS", CUTLASS_IN[release], sha256), *components]
    rows = [_row(component) for component in held]
    rows[0]["properties"] = [
        {"name": f"{NAME}:patch:{patch['name']}", "value": patch["sha256"]}
        for patch in upstream["patches"]
    ]
    purl, library_name = f"pkg:pypi/{NAME}@{version}", "flash_attn_deterministic/_C.so"
    file = {"bom-ref": library_name, "type": "file", "name": library_name,
            "hashes": _hashes(hashlib.sha256(library).hexdigest())}  # fmt: skip
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": f"{datetime(*date).isoformat()}+00:00",
            "component": {
                "bom-ref": purl, "type": "library", "name": NAME, "version": version, "purl": purl,
                "licenses": [{"expression": LICENCE}], "components": [file],
            },
        },
        "components": rows,
        "dependencies": [
            {"ref": purl, "dependsOn": [row["bom-ref"] for row in rows]},
            {"ref": rows[0]["bom-ref"], "dependsOn": [rows[1]["bom-ref"]]},  # CUTLASS
        ],
    }  # fmt: skip
    bill["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bill))}"
    return (json.dumps(bill, indent=2) + "\n").encode()


def problems(
    data: bytes, version: str, info: Mapping[str, Any], library: bytes, date: Date
) -> Iterator[str]:
    """Compares a wheel's bill of materials (`data`) with the one that its own rows give."""
    wrong = f"{FILE_NAME}: is not the one of this library, upstream, patches, version and date"
    try:
        components = tuple(
            Component(name, row["version"], row["hashes"][0]["content"])
            for name, row in zip(LINKED, json.loads(data)["components"][2:], strict=True)
        )
        if data != describe(version, info, library, components, date):
            yield wrong
    except (ValueError, LookupError, TypeError, AttributeError, BuildError) as error:
        yield f"{wrong} ({error!r})"
        return
    for each in components:
        if not re.fullmatch(r"[0-9a-f]{64}", str(each.sha256)) or not each.version:
            yield f"{FILE_NAME}: {each.name} has no version or no hash"


def _row(component: Component) -> dict[str, Any]:
    licence, purl, description = CODE[component.name]
    purl += component.version if purl else ""
    return {
        "bom-ref": purl or component.name, "type": "library", "name": component.name,
        "version": component.version, "description": description, "scope": "required",
        "hashes": _hashes(component.sha256), "licenses": [{"expression": licence}],
        **({"purl": purl} if purl else {}),
    }  # fmt: skip


def _hashes(sha256: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": sha256}]


def _tree(root: Path, *starts: str) -> str:
    return tree_sha256(read_tree(root, starts))


def _package_licence(name: str) -> bytes:
    """The licence file in a package's .dist-info."""
    own = (f for f in importlib.metadata.files(name) or () if ".dist-info" in f.parts[0])
    found = [path for path in own if path.name.upper() in ("LICENSE", "LICENSE.TXT")]
    if not found:
        raise FileNotFoundError(2, "no licence file in the package", name)
    nearest = min(found, key=lambda path: len(path.parts))  # further down: parts of torch's
    return nearest.read_binary()


def _cuda_licence(cuda: Toolchain) -> bytes:
    """The licence of the CUDA runtime: the toolkit's own text, or that of its package."""
    # Without an installer a toolkit may be NVIDIA's packages, unpacked, with their metadata.
    texts = [cuda.root / "EULA.txt"]
    texts += sorted(cuda.root.glob("dist-info/nvidia_cuda_runtime-*.dist-info/**/License.txt"))
    for path in texts:
        if path.is_file():
            return path.read_bytes()
    major = cuda.version.partition(".")[0]
    for name in ("nvidia-cuda-runtime", f"nvidia-cuda-runtime-cu{major}"):
        with suppress(importlib.metadata.PackageNotFoundError, FileNotFoundError):
            return _package_licence(name)
    raise FileNotFoundError(2, "no licence text of the CUDA runtime", str(texts[0]))


def _cudart_version(cuda: Toolchain) -> str:
    """Version of the static runtime, which its header has."""
    for folder in ("include", "targets/x86_64-linux/include"):
        header = cuda.root / folder / "cuda_runtime_api.h"
        if header.exists():
            text = header.read_text(errors="replace")
            if found := re.search(r"#define CUDART_VERSION\s+(\d+)", text):
                return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
    return cuda.version
