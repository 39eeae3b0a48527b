"""The CUDA 12 toolkit is put together from pinned parts, whole or not at all."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from flash_attn_build.compile import debian_cuda
from flash_attn_build.errors import RefusedError, ToolchainError
from flash_attn_build.files import sha256_of

pytestmark = pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="no dpkg-deb: not a Debian")

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
    """A package of the shape of Debian's, which is taken for the pinned one."""
    for name in (*HELD, "DEBIAN/control"):
        (tmp_path / "deb" / name).parent.mkdir(parents=True, exist_ok=True)
        text = "Package: x\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: x\n"
        (tmp_path / "deb" / name).write_text(text)
    made = tmp_path / "x.deb"
    command = ["dpkg-deb", "--root-owner-group", "--build", str(tmp_path / "deb"), str(made)]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setattr(debian_cuda, "SHA256", sha256_of(made))
    return made


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    for name in PACKAGES:
        path = tmp_path / "site" / "nvidia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return tmp_path / "site"


def test_nvcc_lies_in_a_whole_toolkit(package: Path, packages: Path, tmp_path: Path) -> None:
    nvcc = debian_cuda.assemble(tmp_path / "build" / "cuda12", packages, package)
    root = nvcc.parents[1]
    for name in (
        "bin/ptxas", "bin/crt/link.stub", "nvvm/bin/cicc", "nvvm/libdevice/libdevice.10.bc",
        "include/cuda_runtime.h", "include/cuda/std/version", "include/crt/host_defines.h",
        "lib64/libcudart_static.a", "lib64/libcudart.so", "lib64/libcudadevrt.a",
    ):  # fmt: skip
        assert (root / name).is_file(), name
    assert "NVVMIR_LIBRARY_DIR" in (root / "bin" / "nvcc.profile").read_text()
    package.unlink()  # the second time nothing is fetched
    assert debian_cuda.assemble(root, packages, package) == nvcc
    assert [path.name for path in root.parent.iterdir()] == ["cuda12"]


def test_another_package_or_a_missing_part_leaves_nothing(
    package: Path, packages: Path, tmp_path: Path
) -> None:
    shutil.rmtree(packages / "nvidia" / "cuda_cccl")
    with pytest.raises(ToolchainError, match=r"cuda_cccl/include: not there; `pip install --group"):
        debian_cuda.assemble(tmp_path / "build" / "cuda12", packages, package)
    with package.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(RefusedError, match=r"x\.deb: expected sha256"):
        debian_cuda.assemble(tmp_path / "build" / "cuda12", packages, package)
    assert list((tmp_path / "build").iterdir()) == []


def test_where_apt_has_no_mirror_of_debian(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    apt = tmp_path / "bin" / "apt-get"
    apt.parent.mkdir()
    apt.write_text("#!/bin/sh\necho Ubuntu http://example.org/ubuntu\n")
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(apt.parent))
    monkeypatch.delenv(debian_cuda.VARIABLE, raising=False)
    monkeypatch.setattr("sys.argv", ["debian_cuda", str(tmp_path / "build" / "cuda12")])
    assert debian_cuda.main() == ToolchainError.exit_code
    assert "on a Debian, and set FLASH_ATTENTION_CUDA12 to the file" in capsys.readouterr().err
    monkeypatch.setenv(debian_cuda.VARIABLE, str(tmp_path / "none.deb"))
    assert debian_cuda.main() == ToolchainError.exit_code
    assert "FLASH_ATTENTION_CUDA12: expected a file, got" in capsys.readouterr().err
