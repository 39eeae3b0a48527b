"""The wheel's bill of materials: CycloneDX JSON, in .dist-info/sboms/ as PEP 770 asks for.

It names the code of others that is inside `_C.so`. The same inputs give the same bytes: no random
identifier, and no date but SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .errors import StepError
from .toolchain import Toolchain

SPEC_VERSION = "1.6"  # of CycloneDX
NAME = "flash-attn-deterministic"
FILE_NAME = f"{NAME}.cdx.json"
LIBRARY = "flash_attn_deterministic/_C.so"

# The source distribution holds a copy of CUTLASS, and says its version in a header only
# (csrc/cutlass/include/cutlass/version.h).
CUTLASS_IN = {"2.8.3.post2": "4.0.0"}

# Makes the serial number a function of the content.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, f"{NAME}.sbom")
_ZIG_RUNTIME = ("lib/compiler_rt.zig", "lib/compiler_rt", "lib/ubsan_rt.zig")
_ZIG_GLIBC = ("lib/libc/glibc",)
_GLIBC = "2.28"  # what cmake/Link.cmake asks zig for


@dataclass(frozen=True)
class Part:
    """Code of others that the build took from this machine.

    Attributes:
        version: Its version.
        sha256: Of the file, or of the folder of sources (`tree_sha256`), that it came from.
    """

    version: str
    sha256: str


@dataclass(frozen=True)
class Parts:
    """What the linker and the compiler add to the code of the repository and of upstream.

    Attributes:
        cudart: The static CUDA runtime, libcudart_static.a.
        zig: zig's compiler_rt and ubsan_rt, which its linker driver appends to every link.
        glibc: The static part of glibc (libc_nonshared.a), as zig brings it.
        torch: torch's headers of the stable ABI, code of which is compiled in.
    """

    cudart: Part
    zig: Part
    glibc: Part
    torch: Part


def find_parts(cuda: Toolchain) -> Parts:
    """Looks at what a build on this machine puts into the library.

    Args:
        cuda: The CUDA toolkit.

    Returns:
        Versions and hashes.

    Raises:
        StepError: A package that the build uses is not installed, or a file of it is missing.
    """
    zig, torch = _package("ziglang"), _package("torch")
    version = importlib.metadata.version("ziglang")
    try:
        return Parts(
            cudart=Part(
                _cudart_version(cuda), hashlib.sha256(cuda.cudart.read_bytes()).hexdigest()
            ),
            zig=Part(version, tree_sha256(zig, _ZIG_RUNTIME)),
            glibc=Part(f"{_GLIBC} (ziglang {version})", tree_sha256(zig, _ZIG_GLIBC)),
            torch=Part(
                # A local version ("+cpu") says what torch's libraries can do, not its headers.
                importlib.metadata.version("torch").partition("+")[0],
                tree_sha256(torch / "include" / "torch", ("csrc/stable", "headeronly")),
            ),
        )
    except OSError as error:
        raise StepError(
            f"the wheel's bill of materials: {error}. Install the build's packages anew: "
            "`nox -s build` does it."
        ) from error


def tree_sha256(root: Path, starts: Sequence[str]) -> str:
    """Hashes files by name and content.

    Args:
        root: A folder; names are relative to it.
        starts: Files and folders below it.

    Returns:
        Hexadecimal sha256 over each file, in the order of names: name, NUL, size, NUL, bytes.

    Raises:
        FileNotFoundError: One of `starts` holds no file.
    """
    paths = []
    for start in starts:
        at = root / start
        found = [at] if at.is_file() else [path for path in at.rglob("*") if path.is_file()]
        if not found:
            raise FileNotFoundError(2, "no such file", str(at))
        # Whether Python ran something in there is of no account.
        paths += [path for path in found if "__pycache__" not in path.parts]
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        data = path.read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def describe(
    version: str, info: Mapping[str, Any], library: bytes, parts: Parts, epoch: int
) -> bytes:
    """Writes the bill of materials.

    Args:
        version: Version of the wheel.
        info: The build information that the wheel carries.
        library: The wheel's `_C.so`.
        parts: What the build took from this machine.
        epoch: SOURCE_DATE_EPOCH: seconds since 1970.

    Returns:
        CycloneDX JSON.

    Raises:
        StepError: The release of upstream is one whose copy of CUTLASS nobody has looked at.
    """
    components = list(_components(info["upstream"], parts))
    ours = f"pkg:pypi/{NAME}@{version}"
    bom: dict[str, Any] = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC_VERSION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "library",
                "bom-ref": ours,
                "name": NAME,
                "version": version,
                "licenses": [{"license": {"id": "BSD-3-Clause"}}],
                "purl": ours,
                "components": [
                    {
                        "type": "file",
                        "bom-ref": LIBRARY,
                        "name": LIBRARY,
                        "hashes": _hashes(hashlib.sha256(library).hexdigest()),
                    }
                ],
            },
        },
        "components": components,
        "dependencies": [
            {"ref": ours, "dependsOn": [component["bom-ref"] for component in components]},
        ],
    }
    serial = uuid.uuid5(_NAMESPACE, json.dumps(bom, sort_keys=True))
    return (json.dumps({**bom, "serialNumber": f"urn:uuid:{serial}"}, indent=2) + "\n").encode()


def problems(data: bytes, info: Mapping[str, Any], library: bytes) -> Iterator[str]:
    """Holds a wheel's bill of materials to the wheel.

    Args:
        data: The bill of materials.
        info: The build information that the wheel carries.
        library: The wheel's `_C.so`.

    Yields:
        Each thing that is wrong with it.
    """
    try:
        bom = json.loads(data)
        components = {component["name"]: component for component in bom["components"]}
        described = bom["metadata"]["component"]["components"][0]["hashes"][0]["content"]
        patches = {p["name"]: p["value"] for p in components["flash-attn"].get("properties", [])}
        lacking = [
            name for name, component in components.items()
            if not all(component.get(key) for key in ("version", "licenses", "hashes"))
        ]  # fmt: skip
        sources = components["flash-attn"]["hashes"][0]["content"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        yield f"{FILE_NAME}: not the bill of materials of this build ({error!r})"
        return
    if described != hashlib.sha256(library).hexdigest():
        yield f"{FILE_NAME}: describes another {LIBRARY}"
    for name in ("CUTLASS", "CUDA Runtime (static)", "Zig runtime libraries"):
        if name not in components:
            yield f"{FILE_NAME}: does not name {name}"
    for name in lacking:
        yield f"{FILE_NAME}: {name} lacks a version, a licence or a hash"
    upstream = info.get("upstream", {})
    if sources != upstream.get("sha256"):
        yield f"{FILE_NAME}: flash-attn's sha256 is not the one in the build information"
    if patches != {_patch(p["name"]): p["sha256"] for p in upstream.get("patches", [])}:
        yield f"{FILE_NAME}: its patches are not those in the build information"


def _components(upstream: Mapping[str, Any], parts: Parts) -> Iterator[dict[str, Any]]:
    release = upstream["version"]
    if release not in CUTLASS_IN:
        raise StepError(
            f"the wheel's bill of materials: which CUTLASS does flash-attn {release} hold? Its "
            "csrc/cutlass/include/cutlass/version.h says it; add it to CUTLASS_IN in "
            "flash_attn_build/sbom.py."
        )
    source = f"pkg:pypi/{upstream['name']}@{release}"
    yield _component(
        source, upstream["name"], release, "BSD-3-Clause", upstream["sha256"],
        "Device code of its source distribution, whose sha256 this is, with our patches.",
        properties=[
            {"name": _patch(patch["name"]), "value": patch["sha256"]}
            for patch in upstream["patches"]
        ],
        purl=source,
    )  # fmt: skip
    yield _component(
        f"{source}#csrc/cutlass", "CUTLASS", CUTLASS_IN[release], "BSD-3-Clause",
        upstream["sha256"],
        f"Header templates from the source distribution of flash-attn {release}, whose sha256 "
        "this is.",
        purl=f"pkg:github/NVIDIA/cutlass@v{CUTLASS_IN[release]}",
    )  # fmt: skip
    yield _component(
        "cudart-static", "CUDA Runtime (static)", parts.cudart.version,
        "NVIDIA CUDA Toolkit End User License Agreement", parts.cudart.sha256,
        "libcudart_static.a, whose sha256 this is, linked into the library.",
    )  # fmt: skip
    yield _component(
        "zig-runtime", "Zig runtime libraries", parts.zig.version, "MIT", parts.zig.sha256,
        "compiler_rt and ubsan_rt, from which the linker takes what it lacks. The hash is over "
        "their sources in the package ziglang.",
        purl=f"pkg:pypi/ziglang@{parts.zig.version}",
    )  # fmt: skip
    yield _component(
        "glibc-nonshared", "glibc (libc_nonshared.a)", parts.glibc.version, "LGPL-2.1-or-later",
        parts.glibc.sha256,
        "The few functions that glibc's licence lets programs link statically; the rest is the "
        "system's. The hash is over their sources in the package ziglang.",
    )  # fmt: skip
    yield _component(
        "torch-headers", "torch headers of the stable ABI", parts.torch.version, "BSD-3-Clause",
        parts.torch.sha256,
        "Inline functions. The hash is over torch/csrc/stable and torch/headeronly. torch's "
        "libraries are not in the wheel.",
    )  # fmt: skip


def _component(
    ref: str, name: str, version: str, licence: str, sha256: str, description: str, **more: Any
) -> dict[str, Any]:
    # Only SPDX's own identifiers may stand under "id".
    key = "name" if " " in licence else "id"
    return {
        "type": "library",
        "bom-ref": ref,
        "name": name,
        "version": version,
        "description": description,
        "scope": "required",
        "hashes": _hashes(sha256),
        "licenses": [{"license": {key: licence}}],
        **more,
    }


def _hashes(sha256: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": sha256}]


def _patch(name: str) -> str:
    return f"{NAME}:patch:{name}"


def _package(name: str) -> Path:
    """Folder of an installed package, which is not imported for it."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise StepError(
            f"the wheel's bill of materials: the package {name}, code of which is in the wheel, "
            "is not installed. `nox -s build` installs it."
        )
    return Path(found.submodule_search_locations[0])


def _cudart_version(cuda: Toolchain) -> str:
    """Version of the static runtime: the toolkit's list, its package, or else its header."""
    listed = cuda.root / "version.json"
    if listed.exists():
        known = json.loads(listed.read_text())
        if "cuda_cudart" in known:
            return str(known["cuda_cudart"]["version"])
    if "site-packages" in cuda.cudart.parts:
        for name in ("nvidia-cuda-runtime", f"nvidia-cuda-runtime-cu{cuda.version.split('.')[0]}"):
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    for folder in ("include", "targets/x86_64-linux/include"):
        header = cuda.root / folder / "cuda_runtime_api.h"
        if header.exists():
            text = header.read_text(errors="replace")
            if found := re.search(r"#define CUDART_VERSION\s+(\d+)", text):
                number = int(found[1])
                return f"{number // 1000}.{number % 1000 // 10}"
    return cuda.version
