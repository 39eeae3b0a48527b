"""The CUDA 12 toolkit is put together from pinned parts, whole or not at all."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from flash_attn_build.compile import debian_cuda
from flash_attn_build.errors import BuildError, RefusedError
from flash_attn_build.files import sha256_of, write_text
from stand_ins import program

SHARE = "usr/lib/nvidia-cuda-toolkit"
HELD = (
    "usr/bin/cudafe++", "usr/bin/fatbinary", "usr/bin/nvlink", "usr/bin/ptxas", f"{SHARE}/bin/nvcc",
    f"{SHARE}/bin/crt/link.stub", f"{SHARE}/bin/cicc", f"{SHARE}/libdevice/libdevice.10.bc",
)  # fmt: skip
PACKAGES = (
    "cuda_runtime/include/cuda_runtime.h", "cuda_runtime/lib/libcudart_static.a",
    "cuda_runtime/lib/libcudart.so.12", "cuda_cccl/include/cuda/std/version",
    "cuda_nvcc/include/crt/host_defines.h",
)  # fmt: skip


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the shape of Debian's, where it is looked for, and taken for the pinned one."""
    for name in (*HELD, "usr/share/doc/x"):
        write_text(tmp_path / "deb" / name, name)
        (tmp_path / "deb" / name).chmod(0o755)
    made = tmp_path / "debian" / f"nvidia-cuda-toolkit_{debian_cuda.VERSION}_all.deb"
    made.parent.mkdir()
    with tarfile.open(tmp_path / "data.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "deb", "./")
    (tmp_path / "debian-binary").write_text("2.0\n")
    command = ["ar", "rc", str(made), "debian-binary", "data.tar.xz"]
    subprocess.run(command, cwd=tmp_path, check=True)
    monkeypatch.setitem(debian_cuda.PACKAGES, platform.machine(), ("all", sha256_of(made)))
    return made


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    for name in PACKAGES:
        write_text(tmp_path / "site" / "nvidia" / name, "")
    return tmp_path / "site"


def test_nvcc_lies_in_a_whole_toolkit(package: Path, packages: Path, tmp_path: Path) -> None:
    write_text(old := tmp_path / "cuda12" / "bin" / "old", "")
    nvcc = debian_cuda.assemble(debian_cuda.fetch(package.parent), tmp_path / "cuda12", packages)
    root = nvcc.parents[1]
    for name in (
        "bin/ptxas", "bin/crt/link.stub", "nvvm/bin/cicc", "nvvm/libdevice/libdevice.10.bc",
        "include/cuda_runtime.h", "include/cuda/std/version", "include/crt/host_defines.h",
        "lib64/libcudart_static.a", "lib64/libcudart.so", "lib64/libcudadevrt.a",
    ):  # fmt: skip
        assert (root / name).is_file(), name
    assert nvcc.read_text() == f"{SHARE}/bin/nvcc"
    assert os.access(nvcc, os.X_OK)
    assert "NVVMIR_LIBRARY_DIR" in (root / "bin" / "nvcc.profile").read_text()
    assert not old.exists()
    assert not list(root.rglob("doc"))


def test_another_package_or_a_missing_part(package: Path, packages: Path, tmp_path: Path) -> None:
    shutil.rmtree(packages / "nvidia" / "cuda_cccl")
    with pytest.raises(BuildError, match=r"cuda_cccl/include: not there; `pip install --group"):
        debian_cuda.assemble(package, tmp_path / "cuda12", packages)
    with package.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(RefusedError, match=r"_all\.deb: expected sha256 .* Remove it"):
        debian_cuda.fetch(package.parent)


@pytest.mark.parametrize("engine", ["podman", ""])
def test_where_apt_has_no_mirror_of_debian(
    package: Path, tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container of Debian fetches the package; without one, the message names it."""
    kept = package.rename(tmp_path / "kept.deb")
    programs = {"apt-get": "echo Ubuntu http://example.org/ubuntu", "docker": "exit 125"}
    if engine:
        # run --rm --volume FOLDER:/out IMAGE sh -c SCRIPT sh /out
        programs[engine] = f'[ "$5" = debian:trixie ] && cp {kept} "${{4%:/out}}/{package.name}"'
    for name, text in programs.items():
        program(tmp_path / "bin" / name, text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    if engine:
        assert debian_cuda.fetch(package.parent) == package
    else:
        with pytest.raises(BuildError, match=r"could not be fetched.*Put nvidia-cuda-toolkit"):
            debian_cuda.fetch(package.parent)
