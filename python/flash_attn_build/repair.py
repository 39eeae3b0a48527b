"""The gate every wheel passes: auditwheel holds it to its tag; the bill of materials goes in."""

from __future__ import annotations

import argparse
import json
import os
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from . import sbom, toolchain
from .errors import BuildError, StepError, WheelError

PLATFORM = "manylinux_2_28_x86_64"
EPOCH = "315532800"  # 1980, where zip files begin
# These come with torch, which is loaded first.
EXCLUDED = ("libtorch_cpu.so", "libtorch_cuda.so")
BUILD_INFO = "flash_attn_deterministic/_build_info.json"


def repair(wheel: Path, destination: Path, parts: sbom.Parts) -> Path:
    """Gives a wheel its platform tag and its bill of materials, or refuses.

    Args:
        wheel: The wheel as built.
        destination: Folder for the tagged wheel; SOURCE_DATE_EPOCH in the environment dates
            its files.
        parts: What the build took from this machine.

    Returns:
        The tagged wheel.

    Raises:
        StepError: The wheel does not meet the platform's rules, or only with libraries copied
            into it.
        WheelError: The wheel is not one of ours.
    """
    command = [sys.executable, "-m", "auditwheel", "repair"]
    # No older tags that it happens to meet (torch's own wheels carry this one), and no patcher:
    # a library that would have to be copied in is an error.
    command += ["--plat", PLATFORM, "--only-plat", "--patcher", "none"]
    for name in EXCLUDED:
        command += ["--exclude", name]
    destination.mkdir(parents=True, exist_ok=True)
    # A wheel that auditwheel refuses half-way is left where it writes.
    with tempfile.TemporaryDirectory(dir=destination, prefix=".repair-") as folder:
        plain = Path(folder, "plain", wheel.name)
        _prepare(wheel, plain, parts)
        command += ["--wheel-dir", folder, str(plain)]
        # The mode of folders in the wheel is that of the folders auditwheel unpacks it into.
        done = subprocess.run(command, check=False, umask=0o022)
        made = list(Path(folder).glob("*.whl"))
        if done.returncode == 0 and len(made) == 1:
            return made[0].rename(destination / made[0].name)
        raise StepError(
            f"auditwheel refuses {wheel.name} as {PLATFORM} (exit status {done.returncode}, "
            "see above). `auditwheel show` on the wheel names the symbols and libraries that "
            "are too new; a NotImplementedError means a library that would have to be copied in."
        )


def _prepare(wheel: Path, copy: Path, parts: sbom.Parts) -> None:
    """Copies a wheel, with the bill of materials; auditwheel writes the new RECORD.

    Every file becomes rw-r--r--: modes are those of a checkout, and of its umask.
    """
    copy.parent.mkdir()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(copy, "w", zipfile.ZIP_DEFLATED) as new:
        bill, text = _bill(old, wheel.name, parts)
        for item in old.infolist():
            data = old.read(item)
            item.external_attr = (stat.S_IFREG | 0o644) << 16
            if not item.is_dir() and item.filename != bill:
                new.writestr(item, data)
        new.writestr(bill, text)


def _bill(archive: zipfile.ZipFile, wheel: str, parts: sbom.Parts) -> tuple[str, bytes]:
    names = archive.namelist()
    folders = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    missing = [name for name in (BUILD_INFO, sbom.LIBRARY) if name not in names]
    if missing or len(folders) != 1:
        raise WheelError(
            f"{wheel} is not a wheel of this project: "
            + (f"{' and '.join(missing)} is missing" if missing else "expected one .dist-info")
        )
    (folder,) = folders
    text = sbom.describe(
        folder.removesuffix(".dist-info").rpartition("-")[2],
        json.loads(archive.read(BUILD_INFO)),
        archive.read(sbom.LIBRARY),
        parts,
        int(os.environ.get("SOURCE_DATE_EPOCH", EPOCH)),
    )
    return f"{folder}/sboms/{sbom.FILE_NAME}", text


def main() -> int:
    """Repairs the wheel named on the command line, as cibuildwheel asks for.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("SOURCE_DATE_EPOCH", EPOCH)
    try:
        from .wheelcheck import check

        parts = sbom.find_parts(toolchain.find())
        repaired = repair(arguments.wheel, arguments.destination, parts)
        try:
            check(repaired)
        except BuildError:
            repaired.unlink()
            raise
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}. There is no repaired wheel.", file=sys.stderr)
        return StepError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
