"""The kernel hub's layout of a wheel: its library and Python files, for `kernels.get_kernel`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import parse_wheel_filename

from ..errors import RefusedError
from ..files import replacing, write_json
from ..wheel.check import BUILD_INFO, PACKAGE

_LICENSES = re.compile(r"[^/]+\.dist-info/licenses/(.+)")


def write(wheel: Path, out: Path) -> Path:
    """Lays out one build variant, of torch's stable ABI and the wheel's CUDA toolkit.

    Args:
        wheel: The wheel, checked.
        out: Folder of the hub's repository, made if need be.

    Returns:
        The variant's folder, out/build/torch-stable-abi210-cu130-x86_64-linux for torch 2.10 and
        CUDA 13.0. It holds the package's files, the licences and metadata.json, with their hashes.

    Raises:
        RefusedError: Two files of the wheel would be one.
    """
    hashes: dict[str, str] = {}
    with zipfile.ZipFile(wheel) as archive:
        info = json.loads(archive.read(BUILD_INFO))
        torch, cuda = (
            "".join(info[key].split(".")[:2]) for key in ("torch_target", "cuda_toolkit")
        )
        folder = out / "build" / f"torch-stable-abi{torch}-cu{cuda}-x86_64-linux"
        for name in archive.namelist():
            target = _target(name)
            if target in hashes:
                raise RefusedError(f"{wheel.name}: two files would be {target} in the hub's layout")
            if target:
                data = archive.read(name)
                with replacing(folder / target) as file:
                    file.write(data)
                hashes[target] = base64.b64encode(hashlib.sha256(data).digest()).decode()
    write_json(
        folder / "metadata.json",
        {
            "name": PACKAGE.replace("_", "-"),
            # The name of the ops' namespace, which is compiled into the library.
            "id": PACKAGE,
            "version": parse_wheel_filename(wheel.name)[1].major,
            "license": "bsd-3-clause",
            "python-depends": [],
            "backend": {"type": "cuda", "archs": archs(info["architectures"])},
            "digest": {"algorithm": "sha256", "files": dict(sorted(hashes.items()))},
        },
    )
    return folder


def archs(architectures: Iterable[str]) -> list[str]:
    """Writes CMake's architectures as the hub does.

    Args:
        architectures: Such as "80-real", "90a-real", "80-virtual".

    Returns:
        Such as "8.0", "9.0a", "8.0+PTX".
    """
    written = []
    for name in architectures:
        number, _, kind = name.partition("-")
        major, minor = re.sub(r"(\d)([af]?)$", r" \1\2", number).split()
        written.append(f"{major}.{minor}{'' if kind == 'real' else '+PTX'}")
    return written


def _target(name: str) -> str:
    """Where a file of the wheel lies in the variant; "": it is left out."""
    if licence := _LICENSES.fullmatch(name):
        return f"licenses/{licence[1]}"
    package, _, rest = name.partition("/")
    return rest if package == PACKAGE and not name.endswith("/") else ""
