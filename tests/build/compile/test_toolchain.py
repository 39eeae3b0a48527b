from __future__ import annotations

import os
import platform
import sys
import sysconfig
from pathlib import Path

import pytest
from flash_attn_build.compile import toolchain
from flash_attn_build.errors import BuildError
from flash_attn_build.files import write_text
from stand_ins import program

PARTS = ("lib/libcudart_static.a", "include/cuda_runtime.h", "include/cccl/cuda/std/version")


def toolkit(root: Path, version: str = "13.0.88") -> Path:
    nvcc = program(
        root / "bin" / "nvcc",
        f'case "$1" in --version) echo "Cuda compilation tools, release 13.0, V{version}" ;;\n'
        f'*) echo "#\\$ TOP={root}/bin/.." >&2 ;; esac',
    )
    for name in PARTS:
        write_text(root / name, "")
    return nvcc


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("variable", ["CUDACXX", "CUDA_HOME", "CUDA_PATH", "PATH"])
def test_finds_nvcc_by(variable: str, tmp_path: Path, packages: Path) -> None:
    nvcc, later = toolkit(tmp_path / "cuda"), toolkit(tmp_path / "later", "13.2.1")
    value = {"CUDACXX": nvcc, "PATH": nvcc.parent}.get(variable, tmp_path / "cuda")
    # What stands earlier in the list wins.
    found = toolchain.find({"PATH": str(later.parent), variable: str(value)}, packages)
    assert (found.nvcc, found.root, found.version) == (nvcc, tmp_path / "cuda", "13.0.88")
    assert found.cudart == tmp_path / "cuda/lib/libcudart_static.a"


def test_looks_behind_a_wrapper_script(tmp_path: Path, packages: Path) -> None:
    nvcc = toolkit(tmp_path / "cuda")
    wrapper = program(tmp_path / "bin" / "nvcc", f'exec {nvcc} "$@"')
    assert toolchain.find({"PATH": str(wrapper.parent)}, packages).nvcc == nvcc


def test_a_toolkit_from_packages_gets_the_names_that_cmake_looks_for(packages: Path) -> None:
    root = packages / "nvidia" / "cu13"
    toolkit(root)
    (root / "lib" / "libcudart.so.13").write_text("")
    for _ in range(2):  # the second time they are there
        found = toolchain.find({"PATH": ""}, packages)
    assert found.root == root
    assert (root / "lib64").readlink() == Path("lib")
    assert (root / "lib" / "libcudart.so").readlink() == Path("libcudart.so.13")


def test_libraries_of_another_machine_come_from_its_own_packages(
    tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc is this machine's; `-target-dir` finds the other machine's folder below its toolkit."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    nvcc = toolkit(packages / "nvidia" / "cu13")
    with pytest.raises(BuildError, match=r"targets/sbsa-linux: .* lacks libcudart_static\.a"):
        toolchain.find({"PATH": ""}, packages, "aarch64")
    toolkit(tmp_path / "environment" / "aarch64" / "nvidia" / "cu13")
    found = toolchain.find({"PATH": ""}, packages, "aarch64")
    assert (found.nvcc, found.root) == (nvcc, packages / "nvidia" / "cu13")
    assert found.cudart == found.root / "targets/sbsa-linux/lib/libcudart_static.a"
    assert "environment" in found.cudart.resolve().parts


def test_the_cross_compiler_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    compiler = program(tmp_path / "bin" / "aarch64-linux-gnu-g++", "")
    environ = {"PATH": str(tmp_path / "bin"), "CXX": "clang++"}
    assert toolchain.host_compiler("aarch64", environ) == (str(compiler),)
    compiler.unlink()
    with pytest.raises(BuildError, match="apt-get install g\\+\\+-aarch64-linux-gnu"):
        toolchain.host_compiler("aarch64", environ)


@pytest.mark.parametrize("variable", ["", "CUDACXX", "CUDA_HOME", "CUDA_PATH"])
def test_no_nvcc_where_it_is_looked_for(variable: str, tmp_path: Path, packages: Path) -> None:
    toolkit(tmp_path / "cuda")  # there, but not what was asked for
    environ = {variable: "/nowhere", "PATH": str(tmp_path / "cuda" / "bin")}
    expected = f"{variable}: expected .* got '/nowhere'"
    if not variable:
        environ, expected = {"PATH": ""}, r"cuda-toolkit\[nvcc,cccl\].*CUDA 12 has no nvcc"
    with pytest.raises(BuildError, match=expected):
        toolchain.find(environ, packages)


@pytest.mark.parametrize("name", PARTS)
def test_a_missing_part_is_named(name: str, tmp_path: Path, packages: Path) -> None:
    nvcc = toolkit(tmp_path / "cuda")
    (tmp_path / "cuda" / name).unlink()
    with pytest.raises(BuildError, match=f"lacks .*{Path(name).name}"):
        toolchain.find({"CUDACXX": str(nvcc)}, packages)


def test_the_hash_of_a_toolkit_is_that_of_what_decides_on_gpu_code(
    tmp_path: Path, packages: Path
) -> None:
    nvcc = toolkit(tmp_path / "cuda")
    found = toolchain.find({"CUDACXX": str(nvcc)}, packages)
    hashes = [toolchain.toolkit_sha256(found)]
    decides = ("cudafe++", "fatbinary", "nvlink", "ptxas", "nvcc.profile")
    for name in (
        *(f"bin/{each}" for each in decides), "nvvm/bin/cicc", "nvvm/libdevice/libdevice.10.bc",
        "include/cuda_fp16.h", "include/crt/math_functions.hpp",
    ):  # fmt: skip
        program(tmp_path / "cuda" / name, "")
        hashes.append(toolchain.toolkit_sha256(found))
    assert len({*hashes}) == len(hashes)
    for name in ("bin/cuobjdump", "lib/libcudart_static.a", "include/curand.h"):
        program(tmp_path / "cuda" / name, "")
    assert toolchain.toolkit_sha256(found) == hashes[-1]


def test_something_that_is_no_nvcc(tmp_path: Path, packages: Path) -> None:
    path = program(tmp_path / "bin" / "nvcc", "echo hello")
    with pytest.raises(BuildError, match="names no version"):
        toolchain.find({"CUDACXX": str(path)}, packages)


def test_host_compiler(tmp_path: Path) -> None:
    for name in ("g++", "clang++", "ccache"):
        program(tmp_path / name, "")
    for given, expected in (
        ("", ("g++",)), ("clang++", ("clang++",)), ("ccache g++ -m64", ("ccache", "g++", "-m64")),
    ):  # fmt: skip
        command = toolchain.host_compiler(environ={"PATH": str(tmp_path), "CXX": given})
        assert command == (str(tmp_path / expected[0]), *expected[1:])
    assert toolchain.compiler_name(command) == "g++"


@pytest.mark.parametrize("environ", [{}, {"CXX": "nope++"}], ids=["none", "CXX"])
def test_no_host_compiler(environ: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no C\+\+ compiler found"):
        toolchain.host_compiler(environ={"PATH": str(tmp_path), **environ})


def test_the_command_prints_what_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], packages: Path
) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": str(packages)})
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(packages)})
    assert toolchain.main() == 0
    assert capsys.readouterr().out == "\n"
    nvcc = toolkit(packages / "nvidia" / "cu13")
    assert toolchain.main() == 0
    assert capsys.readouterr().out == f"{nvcc}\n"
