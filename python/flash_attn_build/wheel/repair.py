"""Completes the compiled wheel: platform tag, licences, bill of materials, one way to pack it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..errors import BuildError, RefusedError
from . import archive, sbom
from .check import BUILD_INFO, LIBRARY, TORCH

# Its command line takes tags of the machine it runs on only, though it can repair those of others.
_AUDITWHEEL = (
    "import platform, sys; arch = sys.argv.pop(1); platform.machine = lambda: arch; "
    "from auditwheel.main import main; sys.exit(main())"
)


def repair(
    wheel: Path,
    destination: Path,
    components: tuple[sbom.Component, ...],
    epoch: int,
    local: str = "",
) -> Path:
    """Gives a built wheel its platform tag, licences and bill of materials, in `destination`.

    `components` are what the build took from this machine, `epoch` dates the files, and `local` is
    a label to add to the version: "cu130" makes 0.1.0+cu130 of 0.1.0. Returns the tagged wheel.

    Raises:
        BuildError: It does not meet the platform's rules, or only with libraries copied into it.
        RefusedError: It is not one of ours.
    """
    arch = wheel.stem.rpartition("linux_")[2]
    platform = f"manylinux_2_28_{arch}"
    auditwheel = [sys.executable, "-c", _AUDITWHEEL, arch]
    # No older tags that it happens to meet (torch's own wheels carry this one), and no patcher:
    # a library that would have to be copied in is an error.
    command = [*auditwheel, "repair", "--plat", platform, "--only-plat", "--patcher", "none"]
    command += [word for name in sorted(TORCH) for word in ("--exclude", name)]
    destination.mkdir(parents=True, exist_ok=True)
    # auditwheel may leave an unfinished wheel in the folder it writes to.
    with tempfile.TemporaryDirectory(dir=destination, prefix=".repair-") as folder:
        plain = _complete(wheel, Path(folder, "plain"), components, epoch, local)
        done = subprocess.run([*command, "--wheel-dir", folder, str(plain)], check=False)
        made = list(Path(folder).glob("*.whl"))
        if done.returncode or len(made) != 1:
            subprocess.run([*auditwheel, "show", str(plain)], check=False)
            raise BuildError(
                f"auditwheel refuses {wheel.name} as {platform} (exit status {done.returncode}). "
                "Above it names the symbols and libraries that are too new, which headers of a "
                "newer C or C++ library bring in (docs/adr/0004); a NotImplementedError means a "
                "library that would have to be copied in."
            )
        # auditwheel compresses; its archive is packed again.
        made[0].write_bytes(archive.pack(_files(made[0]), archive.date_of(epoch)))
        return made[0].rename(destination / made[0].name)


def _files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as found:
        return {item.filename: found.read(item) for item in found.infolist() if not item.is_dir()}


def _complete(
    wheel: Path, folder: Path, components: tuple[sbom.Component, ...], epoch: int, local: str
) -> Path:
    """Copies a wheel and adds what it lacks."""
    contents = _files(wheel)
    infos = {name.partition("/")[0] for name in contents if ".dist-info/" in name}
    missing = [name for name in (BUILD_INFO, LIBRARY) if name not in contents]
    if missing or len(infos) != 1:
        raise RefusedError(
            f"{wheel.name} is not a wheel of this project: "
            + (f"{' and '.join(missing)} is missing" if missing else "expected one .dist-info")
        )
    (info,) = infos
    version = info.removesuffix(".dist-info").rpartition("-")[2]
    full = f"{version}+{local}" if local else version
    metadata = contents[f"{info}/METADATA"].decode()
    metadata = re.sub(r"^Version: .+$", f"Version: {full}", metadata, count=1, flags=re.M)
    listed = "".join(f"License-File: {each.text_name}\n" for each in components)
    metadata = re.sub(r"(^License-File: .+\n)+", rf"\g<0>{listed}", metadata, count=1, flags=re.M)
    contents[f"{info}/METADATA"] = metadata.encode()
    contents |= {f"{info}/licenses/{each.text_name}": each.text for each in components}
    contents[f"{info}/sboms/{sbom.FILE_NAME}"] = sbom.describe(
        full, json.loads(contents[BUILD_INFO]), contents[LIBRARY], components,
        archive.date_of(epoch),
    )  # fmt: skip
    renamed = info.replace(f"-{version}.dist-info", f"-{full}.dist-info")
    moved = {name.replace(f"{info}/", f"{renamed}/", 1): data for name, data in contents.items()}
    folder.mkdir()
    copy = folder / wheel.name.replace(f"-{version}-", f"-{full}-", 1)
    copy.write_bytes(archive.pack(moved, archive.date_of(epoch)))
    return copy
