"""A build begins as if its folder were empty, but for objects that are still good."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from flash_attn_build.compile import build_folder, launcher
from flash_attn_build.files import ROOT, write_json

MADE_WITH = {"compilers": {"nvcc": "13.0.88", "g++": "12"}, "environment": {}}
OTHER = {
    "none": None,
    "the same": MADE_WITH,
    "environment": {**MADE_WITH, "environment": {"NVCC_APPEND_FLAGS": "-G"}},
    "compiler": {**MADE_WITH, "compilers": {"nvcc": "13.0.90", "g++": "12"}},
}


@pytest.mark.parametrize("earlier", OTHER.values(), ids=OTHER)
def test_cmake_forgets_and_objects_go_where_ninja_would_not_see_a_change(
    tmp_path: Path, earlier: dict[str, object] | None
) -> None:
    folder = tmp_path / "build" / "dev"
    build_folder.renew(folder, earlier or {})
    if earlier is None:
        (folder / build_folder.STAMP).unlink()
    log = f"{build_folder.LOGS}/a.o.json"
    made = ("CMakeCache.txt", "CMakeFiles/4.1.0/C.cmake", "CMakeFiles/x.dir/a.o", log, "lib.so")
    for name in made:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    build_folder.renew(folder, MADE_WITH)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    kept = {"CMakeFiles/x.dir/a.o", log} if earlier == MADE_WITH else set()
    left = {path.relative_to(folder).as_posix() for path in paths}
    assert left == {*kept, "lib.so", build_folder.STAMP}


@pytest.mark.parametrize(
    "name",
    [
        "CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE", "CFLAGS", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS",
        "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CUDAHOSTCXX", "CPATH", "ZIG_LIB_DIR",
    ],
)  # fmt: skip
def test_variables_that_change_a_wheel(name: str) -> None:
    harmless = ("HOME", "PATH", "CXX", "CUDACXX", "MAX_JOBS", "SOURCE_DATE_EPOCH")
    others = dict.fromkeys((*harmless, "CMAKE_BUILD_PARALLEL_LEVEL"), "x")
    assert build_folder.influences({name: "-x", **others}) == {name: "-x"}
    assert build_folder.influences({name: " "}) == {}


PROJECT = """
cmake_minimum_required(VERSION 3.20)
project(x LANGUAGES CXX)
add_library(x OBJECT x.cpp)
"""


@pytest.fixture
def environ() -> dict[str, str]:
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    if not shutil.which("cmake", path=path) or not shutil.which("ninja", path=path):
        pytest.skip("no cmake and ninja")
    return {**os.environ, "PATH": path, "CMAKE_EXPORT_COMPILE_COMMANDS": "ON"}


def make(tmp_path: Path, environ: dict[str, str], name: str, *options: str) -> str:
    """Builds with the real cmake and ninja; returns what ninja said."""
    build = tmp_path / "build"
    if not (tmp_path / f"{name}.cpp").exists():
        (tmp_path / f"{name}.cpp").touch()
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.replace("x.cpp", f"{name}.cpp"))
    build_folder.renew(build, MADE_WITH)
    configure = ["cmake", "-G", "Ninja", "-S", str(tmp_path), "-B", str(build), *options]
    subprocess.run(configure, check=True, env=environ, stdout=subprocess.DEVNULL)
    return subprocess.check_output(["ninja", "-v", "-C", str(build)], text=True, env=environ)


def test_cmake_does_not_go_on_with_the_options_of_the_last_build(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    assert "-ffast-math" in make(tmp_path, environ, "x", "-DCMAKE_CXX_FLAGS=-ffast-math")
    plain = make(tmp_path, environ, "x")
    assert "x.cpp" in plain
    assert "-ffast-math" not in plain
    assert "no work to do" in make(tmp_path, environ, "x")


def test_units_are_those_of_this_configuration(tmp_path: Path, environ: dict[str, str]) -> None:
    build = tmp_path / "build"
    start = [sys.executable, "-I", "-S", str(Path(launcher.__file__).resolve())]
    start += ["--log-dir", str(build / build_folder.LOGS), "--"]
    for name in ("x", "y"):
        make(tmp_path, environ, name, f"-DCMAKE_CXX_COMPILER_LAUNCHER={';'.join(start)}")
        ((output, unit),) = build_folder.read_units(build).items()
        assert output == f"CMakeFiles/x.dir/{name}.cpp.o"
        assert unit is not None
        assert unit["cpu_seconds"] > 0
    assert (build / "CMakeFiles/x.dir/x.cpp.o").exists()


MEASURED = {"large.o": 90.0, "small.o": 10.0}


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A build folder below a source tree, in which CMake has written its list of units."""
    folder = tmp_path / "build"
    write_json(folder / "compile_commands.json", [{"output": name} for name in MEASURED])
    units = [{"output": name, "cpu_seconds": seconds} for name, seconds in MEASURED.items()]
    write_json(tmp_path / "docs/results/build.json", {"translation_units": units})
    return folder


def add(build: Path, name: str, seconds: float) -> None:
    record = {"output": name, "cpu_seconds": seconds}
    write_json(build / build_folder.LOGS / f"{name}.json", record)


def minutes(build: Path) -> tuple[str, str]:
    """CPU-minutes done and left."""
    words = build_folder.progress(build, 2, 0, build.parent).split()
    return words[5], words[8]


def test_what_is_left_follows_the_measured_costs(build: Path) -> None:
    assert minutes(build) == ("0.0", "1.7")
    add(build, "small.o", 10)
    assert minutes(build) == ("0.2", "1.5")
    add(build, "small.o", 20)  # this machine takes twice as long
    assert build_folder.progress(build, 2, 0, build.parent) == (
        "1 of 2 translation units, 0.3 CPU-minutes; about 3.0 CPU-minutes left, 2 minutes on 2 "
        "cores"
    )
    add(build, "large.o", 100)
    assert minutes(build) == ("2.0", "0.0")


def test_nothing_is_told_before_there_is_a_list_of_units(build: Path) -> None:
    commands = build / "compile_commands.json"
    assert build_folder.progress(build, 2, 0, build) == ""  # nothing was measured
    later = commands.stat().st_mtime + 1  # the list is that of an earlier configuration
    assert build_folder.progress(build, 2, later, build.parent) == ""
    commands.unlink()
    assert build_folder.progress(build, 2, 0, build.parent) == ""


def test_units_that_were_not_measured_count_as_the_mean(build: Path) -> None:
    names = [*MEASURED, "new.o"]
    write_json(build / "compile_commands.json", [{"output": name} for name in names])
    add(build, "of another configuration.o", 70)
    assert minutes(build) == ("0.0", "2.5")


def test_measured_costs_are_those_of_the_release_build(build: Path) -> None:
    recorded = json.loads((ROOT / "docs" / "results" / "build.json").read_text())
    commands = [{"output": unit["output"]} for unit in recorded["translation_units"]]
    write_json(build / "compile_commands.json", commands)
    expected = f"about {recorded['totals']['cpu_seconds'] / 60:.1f} CPU-minutes left"
    assert expected in build_folder.progress(build, 2, 0)
