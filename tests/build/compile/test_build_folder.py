"""A build begins as if its folder were empty, but for objects that are still good."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from flash_attn_build.compile import build_folder
from flash_attn_build.files import ROOT


@pytest.mark.parametrize(
    ("name", "value"),
    [("CXX", "g++ -ffast-math -DX"), ("CXX", "ccache g++ -O0"), ("CXXFLAGS", "-DX"),
     ("NVCC_APPEND_FLAGS", "-G"), ("CMAKE_ARGS", "-DA=1"), ("LD_PRELOAD", "/opt/evil.so"),
     ("SKBUILD_CMAKE_DEFINE", "A=1"), ("CUDAHOSTCXX", "g++"), ("CPATH", "/opt"),
     ("ZIG_LIB_DIR", "/")],
)  # fmt: skip
def test_flags_of_the_environment_are_recorded(name: str, value: str) -> None:
    harmless = {"CC": "ccache gcc-13", "CUDACXX": "/cuda/bin/nvcc", "CFLAGS": " ", "PATH": "-x",
                "CMAKE_BUILD_PARALLEL_LEVEL": "2"}  # fmt: skip
    assert build_folder.influences({**harmless, name: value}) == {name: value}


PROJECT = """
cmake_minimum_required(VERSION 3.20)
project(x LANGUAGES CXX)
add_library(x OBJECT x.cpp)
add_library(left_out OBJECT EXCLUDE_FROM_ALL x.cpp)
"""


@pytest.fixture
def environ() -> dict[str, str]:
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    if not shutil.which("cmake", path=path) or not shutil.which("ninja", path=path):
        pytest.skip("no cmake and ninja")
    return {**os.environ, "PATH": path, "CMAKE_EXPORT_COMPILE_COMMANDS": "ON"}


def make(
    tmp_path: Path, environ: dict[str, str], name: str, *options: str, made_with: str = "g++ 12"
) -> str:
    """Builds with the real cmake and ninja; returns what ninja said."""
    build = tmp_path / "build"
    if not (tmp_path / f"{name}.cpp").exists():  # as new it would be compiled again
        (tmp_path / f"{name}.cpp").touch()
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.replace("x.cpp", f"{name}.cpp"))
    build_folder.drop_stale_state(build, {"tools": made_with})
    assert not list(build.glob("CMakeFiles/[0-9]*"))  # what CMake detected of the compilers
    configure = ["cmake", "-G", "Ninja", "-S", str(tmp_path), "-B", str(build), *options]
    subprocess.run(configure, check=True, env=environ, stdout=subprocess.DEVNULL)
    return subprocess.check_output(["ninja", "-v", "-C", str(build)], text=True, env=environ)


def test_cmake_forgets_options_and_objects_go_where_ninja_would_not_see_a_change(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    assert "-ffast-math" in make(tmp_path, environ, "x", "-DCMAKE_CXX_FLAGS=-ffast-math")
    plain = make(tmp_path, environ, "x")
    assert "x.cpp" in plain
    assert "-ffast-math" not in plain
    assert "no work to do" in make(tmp_path, environ, "x")
    assert "x.cpp" in make(tmp_path, environ, "x", made_with="g++ 13")
    (tmp_path / "build" / build_folder.STAMP).unlink()  # nobody knows what made them
    assert "x.cpp" in make(tmp_path, environ, "x", made_with="g++ 13")


def test_units_are_those_of_this_configuration(tmp_path: Path, environ: dict[str, str]) -> None:
    for name in ("x", "y"):
        make(tmp_path, environ, name)
        (unit,) = build_folder.read_units(tmp_path / "build")
        assert unit["output"] == f"CMakeFiles/x.dir/{name}.cpp.o"
        assert unit["wall_seconds"] > 0
        assert unit["command"][-1] == str(tmp_path / f"{name}.cpp")
    assert (tmp_path / "build/CMakeFiles/x.dir/x.cpp.o").exists()


def test_a_first_build_knows_which_units_take_long(tmp_path: Path, environ: dict[str, str]) -> None:
    """Ninja takes their costs from the log, and none of them for done."""
    build = tmp_path / "build"
    large = build / "generated" / "large.cpp"
    (tmp_path / "small.cpp").touch()
    (tmp_path / "CMakeLists.txt").write_text(
        PROJECT.replace("x.cpp", "small.cpp").replace("add_library(x", "add_library(fad_ops")
        + f'file(WRITE {large} "")\nadd_library(fad_kernels OBJECT {large})\n'
        f"include({ROOT}/cmake/Progress.cmake)\n"
    )
    configure = ["cmake", "-G", "Ninja", "-S", str(tmp_path), "-B", str(build)]
    subprocess.run(configure, check=True, env=environ, stdout=subprocess.DEVNULL)
    environ["NINJA_STATUS"] = "<%P>"
    said = subprocess.check_output(["ninja", "-j1", "-C", str(build)], text=True, env=environ)
    first, last = re.findall(r"< *(\d+)%>Building", said)
    assert int(first) < 20 or int(first) > 80
    assert last == "100"
