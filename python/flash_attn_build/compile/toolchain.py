"""Finds the compilers. `python -m flash_attn_build.compile.toolchain` prints nvcc's path."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError, exit_status
from ..files import read_tree, tree_sha256

PACKAGES = "cuda-toolkit[nvcc,cccl]"
# Machines that a wheel can be for, and the folder of CUDA's libraries for each.
TARGETS = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}


@dataclass(frozen=True)
class Toolchain:
    """A CUDA toolkit that can build the wheel."""

    nvcc: Path  # the compiler itself, not a wrapper script around it
    root: Path  # holds bin, include and the libraries
    version: str  # such as "13.0.88"
    cudart: Path  # the static CUDA runtime library


def find(
    environ: Mapping[str, str] = os.environ,
    packages: Path | None = None,
    arch: str = platform.machine(),
) -> Toolchain:
    """Finds the CUDA toolkit to build for a machine with.

    That of the first nvcc among CUDACXX, CUDA_HOME, CUDA_PATH, PATH and the packages of this Python
    (or those in a folder). Packages for another machine lie in the folder `arch` of this Python's
    environment.

    Raises:
        BuildError: No nvcc, one that does not run, or a toolkit with parts missing.
    """
    packages = (packages or Path(sysconfig.get_paths()["purelib"])).resolve()
    found = next(_candidates(environ, packages), None)
    if found is None:
        raise BuildError(
            "nvcc: no CUDA compiler found in CUDACXX, CUDA_HOME, CUDA_PATH, PATH or the packages "
            f"of {sys.executable}. Install CUDA 13 from packages (pip install '{PACKAGES}==13.0.*';"
            " nox -s build does it), or set CUDACXX to an nvcc. "
            "CUDA 12 has no nvcc package: `nox -s build -- --cuda 12` takes Debian's."
        )
    # What nvcc itself says it belongs to: the path may lead to a wrapper script.
    plan = _run(found, "-v", "--dryrun", "-x", "cu", os.devnull, "-c", "-o", os.devnull)
    top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    root = Path(top[1]).resolve() if top else found.resolve().parent.parent
    nvcc = root / "bin" / "nvcc"
    nvcc = nvcc if nvcc.exists() else found
    here, target = root, TARGETS.get(arch, "")
    if packages in root.parents:
        # The names that nvcc and CMake look for, and packages leave out.
        links: list[tuple[Path, str | Path]] = [(root / "lib64", "lib")]
        if arch != platform.machine():
            here = root / "targets" / target
            here.parent.mkdir(exist_ok=True)
            links.append((here, Path(sys.prefix, arch, "nvidia", root.name)))
        for link, place in links:
            if not link.is_symlink() and not link.exists():
                link.symlink_to(place)
        for runtime in here.glob("lib/libcudart.so.*"):
            if not (link := runtime.with_suffix("")).exists():
                link.symlink_to(runtime.name)
    version = re.search(r"\bV(\d+\.\d+\.\d+)", _run(nvcc, "--version"))
    if version is None:
        raise BuildError(f"{nvcc}: `nvcc --version` names no version. Is it an nvcc?")

    def there(*names: str) -> Path | None:
        folders = (here, here / "targets" / target)
        return next((f for d in folders for n in names if (f := d / n).exists()), None)

    cudart = there("lib64/libcudart_static.a", "lib/libcudart_static.a")
    parts = {
        "libcudart_static.a": cudart,
        "cuda_runtime.h": there("include/cuda_runtime.h"),
        # Toolkits before 13 have CCCL straight in their include folder.
        "cccl/cuda/std/version": there("include/cccl/cuda/std/version", "include/cuda/std/version"),
    }
    missing = [name for name, path in parts.items() if path is None]
    if missing or cudart is None:
        series = version[1].rpartition(".")[0]
        raise BuildError(
            f"{here}: the CUDA toolkit lacks {', '.join(missing)}. Install the whole toolkit, or "
            f"`pip install '{PACKAGES}=={series}.*'` (13.0 or newer) and unset CUDACXX."
        )
    return Toolchain(nvcc, root, version[1], cudart)


def toolkit_sha256(cuda: Toolchain) -> str:
    """Hashes what of a toolkit decides the bytes of GPU code: its version does not show them."""
    names = ("nvcc", "nvcc.profile", "cudafe++", "fatbinary", "nvlink", "ptxas")
    paths = [*(cuda.root / "bin" / name for name in names), cuda.root / "nvvm"]
    paths += [*cuda.root.glob("include/cuda_*.h*"), cuda.root / "include" / "crt"]
    there = [path.relative_to(cuda.root).as_posix() for path in paths if path.exists()]
    return tree_sha256(read_tree(cuda.root, there))


def host_compiler(
    arch: str = platform.machine(), environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Finds the C++ compiler that CMake uses for host code: the words of its command.

    CXX, which may hold a launcher and options ("ccache g++"), else g++ or c++ on PATH; for another
    machine the cross compiler that cmake/aarch64.cmake names.
    """
    given = shlex.split(environ.get("CXX", ""))
    package = "g++"
    if arch != platform.machine():
        given, package = [f"{arch}-linux-gnu-g++"], f"g++-{arch}-linux-gnu"
    for first, *rest in [given] if given else [["g++"], ["c++"]]:
        if path := shutil.which(first, path=environ.get("PATH")):
            return (path, *rest)
    raise BuildError(
        f"{'CXX' if given else 'g++'}: no C++ compiler found ({' '.join(given) or 'g++, c++'}). "
        f"Install one (Debian, Ubuntu: apt-get install {package}; Fedora: dnf install gcc-c++) "
        "or set CXX to its path."
    )


def compiler_name(command: tuple[str, ...]) -> str:
    """Names a host compiler: the last word of its command that is no option, such as "g++"."""
    return Path([word for word in command if not word.startswith("-")][-1]).name


def _candidates(environ: Mapping[str, str], packages: Path) -> Iterator[Path]:
    for name, tail in (("CUDACXX", ""), ("CUDA_HOME", "bin/nvcc"), ("CUDA_PATH", "bin/nvcc")):
        if value := environ.get(name, "").strip():
            path = shutil.which(str(Path(value) / tail), path=environ.get("PATH"))
            if path is None:
                raise BuildError(
                    f"{name}: expected {'a CUDA toolkit' if tail else 'an nvcc'}, got {value!r}, "
                    "where there is none. Correct it, or unset it to search PATH."
                )
            yield Path(path)
    if environ and (path := shutil.which("nvcc", path=environ.get("PATH"))):
        yield Path(path)
    yield from sorted(packages.glob("nvidia/cu*/bin/nvcc"), reverse=True)


def _run(nvcc: Path, *arguments: str) -> str:
    try:
        done = subprocess.run([nvcc, *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{nvcc}: does not run: {error}") from error
    return done.stdout + done.stderr


def main() -> int:
    """Prints the path of nvcc, or an empty line where a CUDA compiler is still to be installed."""
    packages = Path(sysconfig.get_paths()["purelib"])
    return exit_status(lambda: print(next(_candidates(os.environ, packages), "")))


if __name__ == "__main__":
    sys.exit(main())
