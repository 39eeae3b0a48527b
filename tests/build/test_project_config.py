"""Configuration that no session of ours runs is held to the tools' own rules."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import tomli
from cibuildwheel.options import CommandLineArguments, compute_options
from flash_attn_build.compile import build, manifest
from flash_attn_build.files import ROOT
from flash_attn_build.wheel import sbom
from packaging.requirements import Requirement

LOCKS = {path.stem: path.read_text() for path in (ROOT / "locks").glob("*.txt")}


@pytest.fixture(scope="module")
def project() -> Any:
    return tomli.loads((ROOT / "pyproject.toml").read_text())


def names(project: Any, requirements: list[Any]) -> set[str]:
    """Names of packages, of included groups too."""
    found = set()
    for item in requirements:
        if isinstance(item, dict):
            found |= names(project, project["dependency-groups"][item["include-group"]])
        else:
            found.add(re.split(r"[\[<>=]", item)[0])
    return found


def test_build_requirements_are_in_the_build_group(project: Any) -> None:
    # nox builds without isolation, where nothing else installs them; pip installs no group.
    wanted = names(project, project["build-system"]["requires"])
    groups = project["dependency-groups"]
    assert names(project, groups["check"]) <= wanted <= names(project, groups["build"])


def test_the_licence_names_everything_that_is_linked(project: Any) -> None:
    assert project["project"]["license"] == sbom.LICENCE
    assert {licence for licence, _, _ in sbom.CODE.values()} == {*sbom.LICENCE.split(" AND ")}


@pytest.mark.parametrize(
    "group", ["build", "cuda", "cuda12", "dev", "gate", "nox", "publish", "test", "torch"]
)
def test_what_is_installed_is_locked_by_hash(project: Any, group: str) -> None:
    lines = LOCKS[group].splitlines()
    assert all("==" in line and "--hash=sha256:" in line for line in lines)
    locked = {re.split(r"[\[=]", line)[0] for line in lines}
    assert names(project, project["dependency-groups"][group]) <= locked


def test_one_version_of_a_package_is_locked_for_a_python() -> None:
    found: dict[str, set[str]] = {}
    for line in "".join(LOCKS.values()).splitlines():
        each = Requirement(line.partition(" --hash")[0])
        if each.marker is None or each.marker.evaluate():
            version = str(each.specifier).removeprefix("==").partition("+")[0]  # "+cpu"
            found.setdefault(each.name, set()).add(version)
    assert {name: versions for name, versions in found.items() if len(versions) > 1} == {}
    for cuda in ("12.4.131", "13.0.88"):
        locked = {each.name: str(each.specifier) for each in manifest.locked(cuda)}
        assert {f"=={version}" for version in found["ziglang"]} == {locked["ziglang"]}
        assert ("nvidia-cuda-nvcc" in locked) == (cuda == "13.0.88")


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_the_plan_of_release_wheels(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As cibuildwheel reads it: a wheel of each CUDA, from images pinned by digest."""
    monkeypatch.chdir(ROOT)
    for name in [name for name in os.environ if name.startswith("CIBW_")]:
        monkeypatch.delenv(name)
    command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--archs", arch]
    said = subprocess.check_output([*command, "--print-build-identifiers"], text=True).split()
    assert sorted(said) == [f"cp311-manylinux_{arch}", f"cp312-manylinux_{arch}"]
    options = compute_options("linux", CommandLineArguments.defaults(), {})
    for identifier, cuda, local in zip(sorted(said), ("cuda12", "cuda"), ("cu12", ""), strict=True):
        plan = options.build_options(identifier)
        image = (plan.manylinux_images or {})[arch]
        assert re.search(rf"manylinux_2_28_{arch}@sha256:[0-9a-f]{{64}}$", image)
        install = plan.before_build or ""
        assert re.findall(r"-r locks/(\w+)\.txt", install) == ["build", "torch", cuda]
        assert "--require-hashes" in install
        request = build.request_from(shlex.split(plan.config_settings.partition("=")[2].strip("'")))
        assert (request.preset, request.locked, request.local) == ("release", True, local)
        assert request.cuda == ("12" if local else "")


def configure(folder: Path, part: str, program: str, generator: str = "Ninja") -> str:
    """Runs cmake on a small project that includes a part of ours; returns what it printed."""
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    if not shutil.which("cmake", path=path):
        pytest.skip("no cmake")
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.26)\nproject(x LANGUAGES NONE)\n"
        f"set(CMAKE_SOURCE_DIR {ROOT})\nset(Python_EXECUTABLE {sys.executable})\n"
        f'{program}\ninclude({ROOT}/cmake/{part}.cmake)\nmessage(STATUS "{SHOWN}")\n'
    )
    # A new system has no make, which CMake looks for first.
    make = ["-DCMAKE_MAKE_PROGRAM=/bin/true"] if generator == "Unix Makefiles" else []
    done = subprocess.run(
        ["cmake", "-S", str(folder), "-B", str(folder / "b"), "-G", generator, *make],
        capture_output=True, text=True, check=False, env={**os.environ, "PATH": path},
    )  # fmt: skip
    return done.stdout + " ".join(done.stderr.split())


SHOWN = "<$ENV{CUDAHOSTCXX}|${CMAKE_CUDA_FLAGS}|$ENV{NVCC_PREPEND_FLAGS}>"
COMPRESS = """add_library(fad_kernels INTERFACE)
function(target_compile_options target kind option)
  message(STATUS ${{option}})
endfunction()
set(CMAKE_CUDA_COMPILER_VERSION {})
set(FLASH_ATTENTION_COMPRESS_MODE "{}")"""


@pytest.mark.parametrize(("part", "program", "expected"), [
    ("Jobs", "", "CMake Error at .*expected Ninja"),
    ("Link", "set(CMAKE_SYSTEM_PROCESSOR ppc64le)", "CMake Error at .*got Linux on ppc64le"),
    # What the oldest driver of the toolkit reads.
    ("Compress", COMPRESS.format("12.4.131", ""), ":-Xfatbin=-compress-all>"),
    ("Compress", COMPRESS.format("12.9.86", ""), ":--compress-mode=speed>"),
    ("Compress", COMPRESS.format("13.0.88", ""), ":--compress-mode=size>"),
    ("Compress", COMPRESS.format("12.9.86", "size"), ":--compress-mode=size>"),
    ("Compress", COMPRESS.format("12.4.131", "size"), "CMake Error at .*no --compress-mode"),
])  # fmt: skip
def test_what_cmake_says_at_configure(
    tmp_path: Path, part: str, program: str, expected: str
) -> None:
    generator = "Unix Makefiles" if part == "Jobs" else "Ninja"
    assert re.search(expected, configure(tmp_path, part, program, generator))


ARCHITECTURES = """set(FAD_SM90_SOURCES sm90.cu)
set(FAD_FP8_SOURCES fp8.cu)
add_library(fad_kernels INTERFACE)
foreach(name IN ITEMS add_library set_target_properties target_link_libraries)
  cmake_language(EVAL CODE "function(${{name}})\nendfunction()")
endforeach()
function(target_compile_options target kind option)
  message(STATUS "${{target}}: ${{option}}")
endfunction()
set(CMAKE_CUDA_ARCHITECTURES {})"""


@pytest.mark.parametrize(
    ("architectures", "every_gpu", "fp8"),
    [
        pytest.param("80-real 90-real 90a-real 80-virtual", ["compute_80: sm_80 sm_90 compute_80"],
                     ["compute_80: sm_80 compute_80", "compute_90: sm_90"], id="release"),
        pytest.param("90-real 90a-real", ["compute_90: sm_90"], ["compute_90: sm_90"], id="hopper"),
        pytest.param("89-real 80 120-real",
                     ["compute_80: sm_89 sm_80 compute_80 sm_120"],
                     ["compute_80: sm_80 compute_80", "compute_89: sm_89", "compute_120: sm_120"],
                     id="others"),
    ],
)  # fmt: skip
def test_kernels_for_e4m3_keys_are_compiled_for_gpus_with_instructions_for_them(
    tmp_path: Path, architectures: str, every_gpu: list[str], fp8: list[str]
) -> None:
    """From 8.9 on from PTX of their own; all others from that of the lowest architecture."""
    program = ARCHITECTURES.format(architectures)
    said = configure(tmp_path, "Architectures", program)
    assert "CMake Error" not in said
    found: dict[str, list[str]] = {}
    option = r"-- (\w+): .*--generate-code=arch=(\w+),code=\[([\w,]+)\]>$"
    for target, arch, codes in re.findall(option, said, re.MULTILINE):
        found.setdefault(target, []).append(f"{arch}: {codes.replace(',', ' ')}")
    assert found == {
        "fad_kernels": every_gpu,
        "fad_kernels_sm90": ["compute_90a: sm_90a"],
        "fad_kernels_fp8": fp8,
    }


@pytest.mark.parametrize("version", ["12.2.0", "16.2.0"])
def test_nvcc_compiles_host_code_with_cxx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """With a g++ that CUDA 13.0 does not name, too; what the user sets stays."""
    headers = tmp_path / "cuda" / "include"
    headers.mkdir(parents=True)
    (headers / "cuda_runtime.h").touch()
    monkeypatch.setenv("CUDACXX", str(tmp_path / "cuda" / "bin" / "nvcc"))
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "--given")
    monkeypatch.delenv("CUDAHOSTCXX", raising=False)
    said = configure(
        tmp_path,
        "HostCompiler",
        f"set(CMAKE_CXX_COMPILER /g++)\nset(CMAKE_CXX_COMPILER_VERSION {version})\n"
        "set(CMAKE_CXX_COMPILER_ID GNU)",
    )
    assert "CMake Error" not in said
    host, flags, trials = said.partition("<")[2].partition(">")[0].split("|")
    assert host == "/g++"
    assert f"-isystem {headers}" in flags
    assert ("-allow-unsupported-compiler" in flags) == (version == "16.2.0")
    assert trials.split() == [*flags.split(), "--given"]
