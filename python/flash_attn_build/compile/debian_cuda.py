"""A CUDA 12 toolkit of Debian's compiler and NVIDIA's packages, in a folder of its own.

NVIDIA's Python packages of CUDA 12 have headers, ptxas and the static runtime, but no nvcc. The
component non-free of Debian has all of CUDA 12.4's compiler.
`python -m flash_attn_build.compile.debian_cuda DIR` unpacks it beside the packages that are
installed for this Python (dependency group "cuda12"), without root and without installing it, and
prints the path of nvcc.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from ..errors import RefusedError, ToolchainError, exit_status
from ..files import sha256_of

SUITE = "trixie"
PACKAGE = "nvidia-cuda-toolkit=12.4.131~12.4.1-2"
SHA256 = "cd5fe85aee38d108b315f408a688641478f2402622a10c677478eb7a6c4e5319"
VARIABLE = "FLASH_ATTENTION_CUDA12"
_ELSEWHERE = f"fetch {PACKAGE} ({SUITE}, non-free) on a Debian, and set {VARIABLE} to the file"
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_SHARE = "usr/lib/nvidia-cuda-toolkit"  # of the package
_COPIES = {
    **{f"usr/bin/{name}": f"bin/{name}" for name in ("cudafe++", "fatbinary", "nvlink", "ptxas")},
    f"{_SHARE}/bin/nvcc": "bin/nvcc",
    f"{_SHARE}/bin/crt": "bin/crt",
    f"{_SHARE}/bin/cicc": "nvvm/bin/cicc",
    f"{_SHARE}/libdevice": "nvvm/libdevice",
}
_PROFILE = """TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
"""


def assemble(dest: Path, packages: Path, package: Path | None = None) -> Path:
    """Makes the toolkit's folder, unless it is there.

    Args:
        dest: The folder.
        packages: Folder of installed Python packages, with `nvidia/cuda_*` in it.
        package: Debian's package (FLASH_ATTENTION_CUDA12 names it); None: apt fetches it.

    Returns:
        Path of nvcc.

    Raises:
        ToolchainError: A part is missing, or apt cannot fetch it.
        RefusedError: Debian's package is not the pinned one.
    """
    nvcc = dest / "bin" / "nvcc"
    if nvcc.exists():
        return nvcc
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dest.parent, prefix=f".{dest.name}.") as name:
        work = Path(name)
        package = package or _fetch(work)
        if not package.is_file():
            raise ToolchainError(f"{VARIABLE}: expected a file, got {package}")
        if (found := sha256_of(package)) != SHA256:
            raise RefusedError(f"{package.name}: expected sha256 {SHA256}, found {found}")
        _run("dpkg-deb", "--extract", str(package), str(work / "package"))
        root = work / "root"
        for source, target in _COPIES.items():
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(work / "package" / source, root / target)
        (root / "bin" / "nvcc.profile").write_text(_PROFILE)
        for part in ("cuda_runtime", "cuda_cccl", "cuda_nvcc"):
            headers = packages / "nvidia" / part / "include"
            if not headers.is_dir():
                raise ToolchainError(
                    f"{headers}: not there; `pip install --group cuda12` brings it"
                )
            shutil.copytree(headers, root / "include", dirs_exist_ok=True)
        (root / "lib64").mkdir()
        for library in ("libcudart_static.a", "libcudart.so.12"):
            shutil.copy(packages / "nvidia/cuda_runtime/lib" / library, root / "lib64")
        (root / "lib64" / "libcudart.so").symlink_to("libcudart.so.12")
        # nvcc names it at every link. It serves kernels that launch kernels; there are none here.
        (root / "lib64" / "libcudadevrt.a").write_bytes(b"!<arch>\n")
        root.rename(dest)
    return nvcc


def _fetch(work: Path) -> Path:
    """Fetches Debian's package from the mirror that this machine's apt uses."""
    if not shutil.which("apt-get"):
        raise ToolchainError(f"apt-get: not on PATH; {_ELSEWHERE}")
    targets = _run("apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)")
    mirrors = re.findall(r"^Debian (\S+)$", targets, re.MULTILINE)
    if not mirrors:
        raise ToolchainError(
            f"apt knows no mirror of Debian's; {_ELSEWHERE}, or set CUDACXX to an nvcc of CUDA 12"
        )
    for folder in ("lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    (work / "status").touch()
    (work / "list").write_text(f"deb [signed-by={_KEYS}] {mirrors[0]} {SUITE} non-free\n")
    options = []
    for key, value in {
        "Dir::Etc::sourcelist": "list", "Dir::Etc::sourceparts": "none", "Dir::Cache": "cache",
        "Dir::State::lists": "lists", "Dir::State::status": "status",
    }.items():  # fmt: skip
        options += ["-o", f"{key}={work / value}"]
    _run("apt-get", *options, "update")
    _run("apt-get", *options, "download", PACKAGE, folder=work)
    return next(work.glob("*.deb"))


def _run(*command: str, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise ToolchainError(f"{command[0]}: not on PATH; it comes with Debian") from error
    except subprocess.CalledProcessError as error:
        raise ToolchainError(f"{' '.join(command)}: {error.stderr.strip()}") from error
    return done.stdout


def main() -> int:
    """Makes the toolkit's folder and prints the path of its nvcc.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dest", type=Path, metavar="DIR")
    given = parser.parse_args()
    package = os.environ.get(VARIABLE)
    packages = Path(sysconfig.get_paths()["purelib"])
    return exit_status(
        lambda: print(assemble(given.dest.absolute(), packages, Path(package) if package else None))
    )


if __name__ == "__main__":
    sys.exit(main())
