from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fake_wheel
import pytest
from flash_attn_build.errors import BuildError, RefusedError
from flash_attn_build.files import ROOT
from flash_attn_build.wheel import check, dist_info
from packaging.metadata import Metadata

VERSION = fake_wheel.VERSION
INFO = dist_info.folder(VERSION)


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return fake_wheel.library(tmp_path_factory.mktemp("library"))


def problems(wheel: Path) -> str:
    with pytest.raises(RefusedError) as caught:
        check.check(wheel)
    return str(caught.value)


def test_a_good_wheel_passes_and_tells_what_it_holds(tmp_path: Path, binary: bytes) -> None:
    info = check.check(fake_wheel.pack(tmp_path, fake_wheel.contents(binary)))
    assert info == fake_wheel.INFO


def test_data_of_the_package_belong_into_the_wheel() -> None:
    paths = (ROOT / "python" / dist_info.PACKAGE).rglob("*")
    built = {*check.LICENSES, check.LIBRARY, check.BUILD_INFO}  # in a tree that was tried out
    names = {path.relative_to(ROOT / "python").as_posix() for path in paths if path.is_file()}
    others = {name for name in names if not name.endswith((".py", ".pyc", "py.typed"))}
    assert others - built == check.DATA


TAG, ARM = fake_wheel.TAG, fake_wheel.ARM_TAG


@pytest.mark.parametrize(
    ("tag", "right"),
    [("cp311-cp311-manylinux_2_28_x86_64", TAG), ("py3-none-linux_x86_64", TAG),
     ("py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64", TAG), (TAG, ARM)],
)  # fmt: skip
def test_the_tag_is_that_of_the_librarys_machine(
    tmp_path: Path, binary: bytes, tag: str, right: str
) -> None:
    binary = fake_wheel.for_arm(binary) if right == ARM else binary
    check.check(fake_wheel.pack(tmp_path, fake_wheel.contents(binary, right), right))
    text = problems(fake_wheel.pack(tmp_path, fake_wheel.contents(binary, tag), tag))
    assert f"name: expected flash_attn_deterministic-{VERSION}-{right}.whl" in text
    assert "WHEEL is not the one of this tree" in text


NAMES = [name for name in fake_wheel.contents(b"") if name.endswith(("/LICENSE", "-LICENSE.txt"))]


@pytest.mark.parametrize(
    "name", [check.LIBRARY, check.BUILD_INFO, *check.LICENSES, *NAMES, f"{INFO}/entry_points.txt"]
)
def test_a_missing_file(tmp_path: Path, binary: bytes, name: str) -> None:
    files = fake_wheel.contents(binary)
    del files[name]
    assert f"{name} is missing" in problems(fake_wheel.pack(tmp_path, files))
    if name in NAMES:
        assert f"{name} is missing or empty" in problems(
            fake_wheel.pack(tmp_path, files | {name: b""})
        )


SHIMS = fake_wheel.SHIMS
LIBRARIES: dict[str, tuple[dict[str, Any], str]] = {
    "symbols": ({"options": []}, "not stripped"),
    "rpath": ({"options": ["-s", "-Wl,-rpath,/opt/cuda"]}, "search paths: /opt/cuda"),
    "a runtime linked in": (
        {"needed": ["torch_cpu", "torch_cuda", "stdc++"]},
        "does not name libgcc_s.so.1, which must not be linked in",
    ),
    "torch not named": ({"needed": ["torch_cpu"]}, "does not name libtorch_cuda.so"),
    "CUDA": ({"needed": ["torch_cpu", "torch_cuda", "cudart"]}, "needs libcudart.so"),
    "C++ of torch": (
        {"calls": [*SHIMS, "_ZN3c105ErrorD1Ev"]},
        "torch-abi-audit: not torch's stable ABI: c10::Error::~Error()",
    ),
    "driver": (
        {"calls": [*SHIMS, "cuLaunchKernel"]},
        "imports cuLaunchKernel, which no library is named for",
    ),
    "not torch's": ({"calls": []}, "no stable shim is used at all"),
    "unknown shim": (
        {"calls": [*SHIMS, "torch_from_the_future"]},
        "does not know the shims torch_from_the_future",
    ),
    "PTX missing": (
        {"code": fake_wheel.fatbin([(2, 80), (2, 90)])},
        "holds GPU code for 80-real, 90-real, but _build_info.json states "
        "80-real, 80-virtual, 90-real",
    ),
    "no GPU code": ({"code": b""}, "holds GPU code for nothing"),
}


@pytest.mark.parametrize(("arguments", "expected"), LIBRARIES.values(), ids=LIBRARIES)
def test_a_library_that_is_wrong(tmp_path: Path, arguments: dict[str, Any], expected: str) -> None:
    binary = fake_wheel.library(tmp_path / "library", **arguments)
    assert expected in problems(fake_wheel.pack(tmp_path, fake_wheel.contents(binary)))


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("torch_target", "2.1", "but is said to run from 2.1"),
    ("instances", [], "lists no instance"),
    ("evil", 1, "says more than the build writes: evil"),
    ("sources", {}, "does not say what sources the GPU code is compiled from"),
    ("architectures", ["80-real"], "_build_info.json states 80-real"),
])  # fmt: skip
def test_build_information_that_is_wrong(
    tmp_path: Path, binary: bytes, name: str, value: object, expected: str
) -> None:
    files = fake_wheel.contents(binary)
    files[check.BUILD_INFO] = json.dumps({**fake_wheel.INFO, name: value}).encode()
    assert expected in problems(fake_wheel.pack(tmp_path, files))


def test_an_architecture_without_a_kind_means_both(tmp_path: Path, binary: bytes) -> None:
    files, names = fake_wheel.contents(binary), ["80", "90a-real"]
    files[check.BUILD_INFO] = json.dumps({**fake_wheel.INFO, "architectures": names}).encode()
    assert check.check(fake_wheel.pack(tmp_path, files))["architectures"] == names


def test_a_folder_of_the_machine_in_the_library(tmp_path: Path, binary: bytes) -> None:
    # As __FILE__ leaves it in a header of a package.
    files = fake_wheel.contents(binary + b"\0./env/lib/site-packages/torch/stable/ops.h\0")
    text = problems(fake_wheel.pack(tmp_path, files))
    assert "built on (./env/lib/site-packages/torch/stable/ops.h)" in text


def test_metadata_are_valid_and_say_what_pyproject_says() -> None:
    metadata = Metadata.from_email(fake_wheel.contents(b"")[f"{INFO}/METADATA"], validate=True)
    assert str(metadata.version) == fake_wheel.PROJECT["version"]
    assert list(map(str, metadata.requires_dist or ())) == [
        "torch>=2.10", 'flash-attn-deterministic-lab; extra == "lab"'
    ]  # fmt: skip
    assert metadata.description == (ROOT / "README.md").read_text()


def test_a_value_of_the_project_that_no_file_would_have(tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text().replace("[project]", "[project]\nauthors = []", 1)
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(BuildError, match="no file of the wheel has authors yet"):
        dist_info.files(tmp_path, "", "")
