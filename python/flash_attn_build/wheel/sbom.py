"""The wheel's bill of materials (CycloneDX JSON, PEP 770), and what the build took from outside.

It names the code of others that is inside `_C.so`. The same inputs give the same bytes: no random
identifier, and no date but SOURCE_DATE_EPOCH.
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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..compile.toolchain import Toolchain
from ..errors import BuildError
from ..files import read_tree, sha256_of, tree_sha256

NAME = "flash-attn-deterministic"
FILE_NAME = f"{NAME}.cdx.json"
LIBRARY = "flash_attn_deterministic/_C.so"

# The source distribution holds a copy of CUTLASS, and says its version in a header only
# (csrc/cutlass/include/cutlass/version.h).
CUTLASS_IN = {"2.8.3.post2": "4.0.0"}

# Makes the serial number a function of the content.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, f"{NAME}.sbom")
_GLIBC = "2.28"  # what cmake/Link.cmake asks zig for
_EULA = "LicenseRef-NVIDIA-CUDA-Toolkit-EULA"
# What pyproject.toml states as the wheel's License-Expression, part by part.
LICENCES = ("BSD-3-Clause", "MIT", "LGPL-2.1-or-later", _EULA)


@dataclass(frozen=True)
class Part:
    """Code of others that the build took from this machine.

    Attributes:
        name: Of the component.
        version: Its version.
        sha256: Of the file, or of the folder of sources (`files.tree_sha256`), that it came from.
        licence: SPDX expression.
        text: The licence's text.
        description: What of it is in the library.
        purl: Package URL, or "".
    """

    name: str
    version: str
    sha256: str
    licence: str
    text: bytes = field(repr=False)
    description: str = ""
    purl: str = ""

    @property
    def text_name(self) -> str:
        """File name of its licence in the wheel's .dist-info/licenses."""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-") + "-LICENSE.txt"


def find_parts(cuda: Toolchain) -> tuple[Part, ...]:
    """Finds what the linker and the compiler of this machine put into the library.

    Args:
        cuda: The CUDA toolkit.

    Returns:
        The CUDA runtime, zig's run-time parts, glibc's static part, torch's headers.

    Raises:
        BuildError: A package that the build uses is not installed, or a file of it is missing.
    """
    try:
        zig, torch = (
            Path(str(importlib.metadata.distribution(name).locate_file(name)))
            for name in ("ziglang", "torch")
        )
        version = importlib.metadata.version("ziglang")
        return (
            Part(
                "CUDA Runtime (static)", _cudart_version(cuda), sha256_of(cuda.cudart), _EULA,
                _cuda_licence(cuda),
                "libcudart_static.a, whose sha256 this is, linked into the library.",
            ),
            Part(
                "Zig runtime libraries", version,
                _tree(zig, "lib/compiler_rt.zig", "lib/compiler_rt", "lib/ubsan_rt.zig"), "MIT",
                (zig / "LICENSE").read_bytes(),
                "compiler_rt and ubsan_rt, from which the linker takes what it lacks. The hash is "
                "over their sources in the package ziglang.",
                f"pkg:pypi/ziglang@{version}",
            ),
            Part(
                "glibc (libc_nonshared.a)", f"{_GLIBC} (ziglang {version})",
                _tree(zig, "lib/libc/glibc"), "LGPL-2.1-or-later",
                (zig / "lib/libc/glibc/LICENSES").read_bytes(),
                "The few functions that glibc's licence lets programs link statically; the rest is "
                "the system's. The hash is over their sources in the package ziglang.",
            ),
            Part(
                "torch headers of the stable ABI",
                # A local version ("+cpu") says what torch's libraries can do, not its headers.
                importlib.metadata.version("torch").partition("+")[0],
                _tree(torch / "include/torch", "csrc/stable", "headeronly"), "BSD-3-Clause",
                _package_licence("torch"),
                "Inline functions. The hash is over torch/csrc/stable and torch/headeronly. The "
                "libraries of torch are not in the wheel.",
            ),
        )  # fmt: skip
    except (OSError, importlib.metadata.PackageNotFoundError) as error:
        raise BuildError(
            f"the wheel's bill of materials: {error}. Install the build's packages again: "
            "`nox -s build` does it."
        ) from error


def describe(
    version: str, info: Mapping[str, Any], library: bytes, parts: tuple[Part, ...], epoch: int
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
        BuildError: This project has not recorded which CUTLASS the release of upstream holds.
    """
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentScope, ComponentType
    from cyclonedx.model.license import LicenseExpression
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    def hashes(sha256: str) -> list[HashType]:
        return [HashType(alg=HashAlgorithm.SHA_256, content=sha256)]

    def component(part: Part, properties: list[Property]) -> Component:
        return Component(
            bom_ref=part.purl or part.name,
            type=ComponentType.LIBRARY,
            name=part.name,
            version=part.version,
            description=part.description,
            scope=ComponentScope.REQUIRED,
            hashes=hashes(part.sha256),
            licenses=[LicenseExpression(part.licence)],
            purl=PackageURL.from_string(part.purl) if part.purl else None,
            properties=properties,
        )

    upstream, cutlass = _upstream(info["upstream"])
    patches = [
        Property(name=_patch(patch["name"]), value=patch["sha256"])
        for patch in info["upstream"]["patches"]
    ]
    ours = f"pkg:pypi/{NAME}@{version}"
    digest = hashlib.sha256(library).hexdigest()
    root = Component(
        bom_ref=ours,
        type=ComponentType.LIBRARY,
        name=NAME,
        version=version,
        licenses=[LicenseExpression(" AND ".join(LICENCES))],
        purl=PackageURL.from_string(ours),
        components=[
            Component(bom_ref=LIBRARY, type=ComponentType.FILE, name=LIBRARY, hashes=hashes(digest))
        ],
    )
    components = [component(upstream, patches)]
    components += [component(part, []) for part in (cutlass, *parts)]
    bom = Bom(
        components=components,
        metadata=BomMetaData(component=root, timestamp=datetime.fromtimestamp(epoch, timezone.utc)),
        serial_number=uuid.UUID(int=0),
    )
    bom.register_dependency(root, components)
    text = JsonV1Dot6(bom).output_as_string()
    bom.serial_number = uuid.uuid5(_NAMESPACE, text)
    return (JsonV1Dot6(bom).output_as_string(indent=2) + "\n").encode()


def problems(data: bytes, info: Mapping[str, Any], library: bytes) -> Iterator[str]:
    """Compares a wheel's bill of materials with the wheel.

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


def _upstream(upstream: Mapping[str, Any]) -> tuple[Part, Part]:
    """flash-attn and the CUTLASS in it. The build itself puts their licences into the package."""
    release, sha256 = upstream["version"], upstream["sha256"]
    if release not in CUTLASS_IN:
        raise BuildError(
            f"the wheel's bill of materials: which CUTLASS does flash-attn {release} hold? Its "
            "csrc/cutlass/include/cutlass/version.h says it; add it to CUTLASS_IN in "
            "flash_attn_build/wheel/sbom.py."
        )
    return (
        Part(
            upstream["name"], release, sha256, "BSD-3-Clause", b"",
            "Device code of its source distribution, whose sha256 this is, with our patches.",
            f"pkg:pypi/{upstream['name']}@{release}",
        ),
        Part(
            "CUTLASS", CUTLASS_IN[release], sha256, "BSD-3-Clause", b"",
            f"Header templates from the source distribution of flash-attn {release}, whose sha256 "
            "this is.",
            f"pkg:github/NVIDIA/cutlass@v{CUTLASS_IN[release]}",
        ),
    )  # fmt: skip


def _patch(name: str) -> str:
    return f"{NAME}:patch:{name}"


def _tree(root: Path, *starts: str) -> str:
    return tree_sha256(read_tree(root, starts))


def _package_licence(name: str) -> bytes:
    """The licence file in a package's .dist-info."""
    found = [
        path
        for path in importlib.metadata.files(name) or ()
        if ".dist-info" in path.parts[0] and path.name.upper() in ("LICENSE", "LICENSE.TXT")
    ]
    if not found:
        raise FileNotFoundError(2, "no licence file in the package", name)
    nearest = min(found, key=lambda path: len(path.parts))  # further down: parts of torch's
    return Path(str(nearest.locate())).read_bytes()


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
    """Version of the static runtime: the toolkit's list, or else its header."""
    listed = cuda.root / "version.json"
    if listed.exists():
        known = json.loads(listed.read_text())
        if "cuda_cudart" in known:
            return str(known["cuda_cudart"]["version"])
    for folder in ("include", "targets/x86_64-linux/include"):
        header = cuda.root / folder / "cuda_runtime_api.h"
        if header.exists():
            text = header.read_text(errors="replace")
            if found := re.search(r"#define CUDART_VERSION\s+(\d+)", text):
                number = int(found[1])
                return f"{number // 1000}.{number % 1000 // 10}"
    return cuda.version
