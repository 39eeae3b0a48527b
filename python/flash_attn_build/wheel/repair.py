"""Completes the compiled wheel: platform tag, licences, bill of materials, one way to pack it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..errors import BuildError, RefusedError
from ..files import ROOT
from . import archive, dist_info, sbom
from .check import BUILD_INFO, LIBRARY, TORCH

# Its command line takes tags of the machine it runs on only, though it can judge those of others.
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
    with zipfile.ZipFile(wheel) as built:
        names = [name for name in built.namelist() if name.startswith(f"{dist_info.PACKAGE}/")]
        contents = {name: built.read(name) for name in names}
    if missing := [name for name in (BUILD_INFO, LIBRARY) if name not in contents]:
        raise RefusedError(f"{wheel.name} is not of this project: {' and '.join(missing)} missing")
    arch = wheel.stem.rpartition("linux_")[2]
    _audit(wheel, arch)
    tag = f"py3-none-manylinux_2_28_{arch}"
    made = dist_info.files(ROOT, local, tag)
    folder = next(iter(made)).partition("/")[0]
    version = folder.removesuffix(".dist-info").rpartition("-")[2]
    made |= {f"{folder}/licenses/{each.text_name}": each.text for each in components}
    date, info = archive.date_of(epoch), json.loads(contents[BUILD_INFO])
    made[f"{folder}/sboms/{sbom.FILE_NAME}"] = sbom.describe(
        version, info, contents[LIBRARY], components, date
    )
    destination.mkdir(parents=True, exist_ok=True)
    path = destination / f"{dist_info.PACKAGE}-{version}-{tag}.whl"
    path.write_bytes(archive.pack(contents | made, date))
    return path


def _audit(wheel: Path, arch: str) -> None:
    """Lets auditwheel refuse what manylinux_2_28 does not allow; its own wheel is not kept."""
    command = [sys.executable, "-c", _AUDITWHEEL, arch]
    # No patcher: a library that would have to be copied in is an error.
    options = ["--plat", f"manylinux_2_28_{arch}", "--only-plat", "--patcher", "none"]
    options += [word for name in sorted(TORCH) for word in ("--exclude", name)]
    with tempfile.TemporaryDirectory() as folder:
        words = [*command, "repair", *options, "--wheel-dir", folder, str(wheel)]
        done = subprocess.run(words, check=False)
        if done.returncode or len([*Path(folder).glob("*.whl")]) != 1:
            subprocess.run([*command, "show", str(wheel)], check=False)
            raise BuildError(
                f"auditwheel refuses {wheel.name} as {options[1]} (exit status {done.returncode}). "
                "Above it names the symbols and libraries that are too new, which headers of a "
                "newer C or C++ library bring in (docs/adr/0004); a NotImplementedError means a "
                "library that would have to be copied in."
            )
