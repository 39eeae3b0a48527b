"""The gate every wheel passes: auditwheel holds it to its tag, and may change nothing else."""

from __future__ import annotations

import argparse
import os
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .errors import BuildError, StepError

PLATFORM = "manylinux_2_28_x86_64"
# These come with torch, which is loaded first.
EXCLUDED = ("libtorch_cpu.so", "libtorch_cuda.so")


def repair(wheel: Path, destination: Path) -> Path:
    """Gives a wheel its platform tag, or refuses.

    Args:
        wheel: The wheel as built.
        destination: Folder for the tagged wheel; SOURCE_DATE_EPOCH in the environment dates
            its files.

    Returns:
        The tagged wheel.

    Raises:
        StepError: The wheel does not meet the platform's rules, or only with libraries copied
            into it.
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
        _without_modes(wheel, plain)
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


def _without_modes(wheel: Path, copy: Path) -> None:
    """Copies a wheel, every file rw-r--r--: modes are those of a checkout, and of its umask."""
    copy.parent.mkdir()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(copy, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            data = old.read(item)
            item.external_attr = (stat.S_IFREG | 0o644) << 16
            if not item.is_dir():
                new.writestr(item, data)


def main() -> int:
    """Repairs the wheel named on the command line, as cibuildwheel asks for.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")  # 1980, where zip files begin
    try:
        from .wheelcheck import check

        repaired = repair(arguments.wheel, arguments.destination)
        try:
            check(repaired)
        except BuildError:
            repaired.unlink()
            raise
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
