"""A build begins as if its folder were empty, but for objects that are still good."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from flash_attn_build.compile import build_folder, launcher

MADE_WITH = {"compilers": {"nvcc": "13.0.88", "g++": "12"}, "environment": {}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_folder.renew(tmp_path, MADE_WITH)
    for name in ("CMakeCache.txt", "CMakeFiles/4.1.0/C.cmake", "CMakeFiles/x.dir/a.o", "lib.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


def left(folder: Path) -> list[str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path.relative_to(folder).as_posix() for path in paths]


def test_cmake_forgets_and_objects_stay(folder: Path) -> None:
    build_folder.renew(folder, MADE_WITH)
    assert left(folder) == ["CMakeFiles/x.dir/a.o", "lib.so", build_folder.STAMP]


@pytest.mark.parametrize(
    "other",
    [
        {**MADE_WITH, "environment": {"NVCC_APPEND_FLAGS": "-G"}},
        {**MADE_WITH, "compilers": {"nvcc": "13.0.90", "g++": "12"}},
    ],
    ids=["environment", "compiler"],
)
def test_objects_go_where_ninja_would_not_see_a_change(folder: Path, other: object) -> None:
    build_folder.renew(folder, other)  # type: ignore[arg-type]
    assert left(folder) == ["lib.so", build_folder.STAMP]


def test_objects_that_nothing_is_known_of_go(folder: Path) -> None:
    (folder / build_folder.STAMP).unlink()
    build_folder.renew(folder, MADE_WITH)
    assert left(folder) == ["lib.so", build_folder.STAMP]


@pytest.mark.parametrize(
    "name",
    [
        "CMAKE_ARGS", "CMAKE_CUDA_FLAGS", "SKBUILD_CMAKE_DEFINE", "CFLAGS", "CXXFLAGS", "CUDAFLAGS",
        "LDFLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CUDAHOSTCXX", "CPATH",
        "ZIG_LIB_DIR",
    ],
)  # fmt: skip
def test_what_changes_a_wheel_is_told(name: str) -> None:
    assert build_folder.influences({name: "-x", "HOME": "/h"}) == {name: "-x"}
    assert build_folder.influences({name: " "}) == {}


@pytest.mark.parametrize(
    "name",
    ["PATH", "CXX", "CUDACXX", "MAX_JOBS", "SOURCE_DATE_EPOCH", "CMAKE_BUILD_PARALLEL_LEVEL"],
)
def test_what_does_not_is_passed_over(name: str) -> None:
    assert build_folder.influences({name: "x"}) == {}


def test_a_new_folder(tmp_path: Path) -> None:
    build_folder.renew(tmp_path / "build" / "dev", MADE_WITH)
    assert left(tmp_path / "build" / "dev") == [build_folder.STAMP]


PROJECT = """
cmake_minimum_required(VERSION 3.20)
project(x LANGUAGES CXX)
add_library(x OBJECT x.cpp)
"""


def test_cmake_does_not_go_on_with_the_options_of_the_last_build(tmp_path: Path) -> None:
    """The real cmake and ninja: flags of one build are not those of the next."""
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    if not shutil.which("cmake", path=path) or not shutil.which("ninja", path=path):
        pytest.skip("no cmake and ninja")
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    (tmp_path / "x.cpp").write_text("int x;\n")
    build = tmp_path / "build"

    def made(*options: str) -> str:
        build_folder.renew(build, MADE_WITH)
        configure = ["cmake", "-G", "Ninja", "-S", str(tmp_path), "-B", str(build), *options]
        said = ""
        for command in (configure, ["ninja", "-v", "-C", str(build)]):
            said = subprocess.check_output(command, text=True, env={**os.environ, "PATH": path})
        return said

    assert "-ffast-math" in made("-DCMAKE_CXX_FLAGS=-ffast-math")
    plain = made()
    assert "x.cpp" in plain
    assert "-ffast-math" not in plain
    assert "no work to do" in made()


def test_the_units_of_a_real_build_are_found_and_earlier_ones_are_not(tmp_path: Path) -> None:
    """The real cmake and ninja: what another configuration left is not listed."""
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    if not shutil.which("cmake", path=path) or not shutil.which("ninja", path=path):
        pytest.skip("no cmake and ninja")
    build = tmp_path / "build"
    start = [sys.executable, "-I", "-S", launcher.__file__]
    start += ["--log-dir", str(build / build_folder.LOGS), "--"]
    environ = {**os.environ, "PATH": path, "CMAKE_EXPORT_COMPILE_COMMANDS": "ON"}
    for name in ("x", "y"):
        (tmp_path / f"{name}.cpp").write_text("int a;\n")
        (tmp_path / "CMakeLists.txt").write_text(PROJECT.replace("x.cpp", f"{name}.cpp"))
        build_folder.renew(build, MADE_WITH)
        configure = ["cmake", "-G", "Ninja", "-S", str(tmp_path), "-B", str(build)]
        configure += [f"-DCMAKE_CXX_COMPILER_LAUNCHER={';'.join(start)}"]
        for command in (configure, ["ninja", "-C", str(build)]):
            subprocess.run(command, check=True, env=environ)
        ((output, unit),) = build_folder.read_units(build).items()
        assert output == f"CMakeFiles/x.dir/{name}.cpp.o"
        assert unit is not None
        assert unit["cpu_seconds"] > 0
    assert (build / "CMakeFiles/x.dir/x.cpp.o").exists()
