"""A CUDA 12 toolkit of Debian's compiler and NVIDIA's packages, in build/cuda12.

NVIDIA's Python packages of CUDA 12 have headers, ptxas and the static runtime, but no nvcc; the
component non-free of Debian has it. This module, run, fetches that package: from apt's mirror on a
Debian, elsewhere in a container of Debian. Nothing is installed.
"""

from __future__ import annotations

import io
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from ..errors import BuildError, RefusedError, exit_status
from ..files import ROOT, sha256_of

SUITE = "trixie"
VERSION = "12.4.131~12.4.1-2"
# Debian's name of a machine, and the package's hash.
PACKAGES = {
    "x86_64": ("amd64", "cd5fe85aee38d108b315f408a688641478f2402622a10c677478eb7a6c4e5319"),
    "aarch64": ("arm64", "34c1018e03a87493e2bac39dbb7ca7cff2ca84e64f4556089672ba09c8025858"),
}
# Downloads into the folder $1, past the machine's own list of sources, which may lack non-free.
_FETCH = f"""set -e
mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' | sed -n 's/^Debian //p' | head -n 1)
[ "$mirror" ] || {{ echo "apt knows no mirror of Debian's" >&2; exit 1; }}
work=$(mktemp -d); trap 'rm -r "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"; touch "$work/status"
key=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$key] $mirror {SUITE} non-free" > "$work/list"
set -- "$1" -o Dir::Etc::sourcelist="$work/list" -o Dir::Etc::sourceparts=none \\
  -o Dir::State::lists="$work/lists" -o Dir::State::status="$work/status" \\
  -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root
cd "$1"; shift
apt-get "$@" update >&2
apt-get "$@" download nvidia-cuda-toolkit={VERSION} >&2
"""
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


def fetch(folder: Path = ROOT / "build" / "debian") -> Path:
    """Fetches Debian's package for this machine into a folder, unless it is there, by its hash."""
    name, wanted = PACKAGES[platform.machine()]
    package = folder / f"nvidia-cuda-toolkit_{VERSION}_{name}.deb"
    if not package.exists():
        folder.mkdir(parents=True, exist_ok=True)
        ways = [["sh", "-c", _FETCH, "sh", str(folder)]]
        for engine in filter(shutil.which, ("docker", "podman")):
            way = [engine, "run", "--rm", "--volume", f"{folder}:/out", f"debian:{SUITE}"]
            ways.append([*way, "sh", "-c", f"apt-get update >&2\n{_FETCH}", "sh", "/out"])
        if all(subprocess.run(way, check=False).returncode for way in ways):
            raise BuildError(
                f"{package}: could not be fetched by apt, nor in a container of Debian (see "
                f"above). Put nvidia-cuda-toolkit {VERSION} ({SUITE}, non-free, {name}) there"
            )
    if (found := sha256_of(package)) != wanted:
        raise RefusedError(f"{package}: expected sha256 {wanted}, found {found}. Remove it")
    return package


def assemble(package: Path, dest: Path, packages: Path | None = None) -> Path:
    """Makes the toolkit's folder anew, of Debian's package and NVIDIA's; returns nvcc's path.

    `packages`: a folder with those of dependency group "cuda12"; this Python's own if None.
    """
    packages = packages or Path(sysconfig.get_paths()["purelib"])
    shutil.rmtree(dest, ignore_errors=True)
    _unpack(package, dest)
    (dest / "bin" / "nvcc.profile").write_text(_PROFILE)
    for part in ("cuda_runtime", "cuda_cccl", "cuda_nvcc"):
        headers = packages / "nvidia" / part / "include"
        if not headers.is_dir():
            raise BuildError(f"{headers}: not there; `pip install --group cuda12` brings it")
        shutil.copytree(headers, dest / "include", dirs_exist_ok=True)
    (dest / "lib64").mkdir()
    for library in ("libcudart_static.a", "libcudart.so.12"):
        shutil.copy(packages / "nvidia/cuda_runtime/lib" / library, dest / "lib64")
    (dest / "lib64" / "libcudart.so").symlink_to("libcudart.so.12")
    # nvcc names it at every link. It serves kernels that launch kernels; there are none here.
    (dest / "lib64" / "libcudadevrt.a").write_bytes(b"!<arch>\n")
    return dest / "bin" / "nvcc"


def _unpack(package: Path, dest: Path) -> None:
    """Takes the compiler out of a package, which is an `ar` archive of tar archives."""
    data = subprocess.run(["ar", "p", package, "data.tar.xz"], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(data.stdout)) as archive:
        for member in filter(tarfile.TarInfo.isfile, archive):
            name = member.name.removeprefix("./")
            place = next((p for p in _COPIES if name == p or name.startswith(f"{p}/")), None)
            if place:
                target = dest / (_COPIES[place] + name.removeprefix(place))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.extractfile(member).read())  # type: ignore[union-attr]
                target.chmod(member.mode)


if __name__ == "__main__":
    sys.exit(exit_status(lambda: print(fetch())))
