from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_wheel
import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from flash_attn_build.compile import toolchain
from flash_attn_build.errors import BuildError, RefusedError
from flash_attn_build.upstream.pin import load_pin
from flash_attn_build.wheel import check, repair, sbom

LINUX = "py3-none-linux_x86_64"
INFO = "flash_attn_deterministic-0.1.0.dist-info"


def bill(epoch: int = 1_700_000_000, **changes: Any) -> Any:
    return json.loads(
        sbom.describe("0.1.0", {**fake_wheel.INFO, **changes}, b"library", fake_wheel.PARTS, epoch)
    )


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repaired")
    binary = fake_wheel.library(folder / "library")
    wheel = fake_wheel.pack(folder, fake_wheel.contents(binary, LINUX), LINUX)
    return repair.repair(wheel, folder / "out", fake_wheel.PARTS, 1_700_000_000)


@pytest.fixture
def contents(repaired: Path) -> dict[str, bytes]:
    """The files of a wheel with a bill of materials."""
    with zipfile.ZipFile(repaired) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}


def test_names_everything_with_version_licence_and_hash() -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill())) is None
    components = {c["name"]: c for c in bill()["components"]}
    assert set(components) == {"flash-attn", "CUTLASS", *(part.name for part in fake_wheel.PARTS)}
    for component in components.values():
        assert component["version"]
        assert component["licenses"]
        assert len(component["hashes"][0]["content"]) == 64
    assert components["flash-attn"]["version"] == "2.8.3.post2"
    assert components["flash-attn"]["properties"] == [
        {"name": "flash-attn-deterministic:patch:0001-a.patch", "value": "a1" * 32}
    ]
    assert components["CUTLASS"]["version"] == "4.0.0"
    assert components["CUDA Runtime (static)"]["version"] == "13.0.96"


def test_the_same_inputs_give_the_same_bytes() -> None:
    assert bill() == bill()
    assert bill()["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    other = {**fake_wheel.INFO["upstream"], "sha256": "e0" * 32}
    assert len({each["serialNumber"] for each in (bill(), bill(1), bill(upstream=other))}) == 3


def test_a_release_of_upstream_that_nobody_looked_at() -> None:
    with pytest.raises(BuildError, match=r"which CUTLASS does flash-attn 9\.9 hold"):
        bill(upstream={**fake_wheel.INFO["upstream"], "version": "9.9"})
    assert load_pin().version in sbom.CUTLASS_IN


def test_lies_in_the_wheel(repaired: Path, contents: dict[str, bytes]) -> None:
    data = contents[f"{INFO}/sboms/flash-attn-deterministic.cdx.json"]
    assert json.loads(data)["metadata"]["component"]["version"] == "0.1.0"
    check.check(repaired)


def component(bill: Any, name: str) -> Any:
    return next(each for each in bill["components"] if each["name"] == name)


def drop(name: str) -> Callable[[Any], object]:
    return lambda bill: bill["components"].remove(component(bill, name))


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "missing component": (drop("CUTLASS"), "does not name CUTLASS"),
    "no licence": (
        lambda bill: component(bill, "Zig runtime libraries").pop("licenses"),
        "Zig runtime libraries lacks a version, a licence or a hash",
    ),
    "other upstream": (
        lambda bill: component(bill, "flash-attn")["hashes"][0].update(content="0" * 64),
        "flash-attn's sha256 is not the one in the build information",
    ),
    "other patches": (
        lambda bill: component(bill, "flash-attn")["properties"].clear(),
        "its patches are not those in the build",
    ),
    "no upstream": (drop("flash-attn"), "not the bill of materials of this"),
}


@pytest.mark.parametrize(("change", "expected"), WRONG.values(), ids=WRONG)
def test_a_wheel_with_a_wrong_bill_is_refused(
    contents: dict[str, bytes], tmp_path: Path, change: Callable[[Any], object], expected: str
) -> None:
    name = f"{INFO}/sboms/{sbom.FILE_NAME}"
    bill = json.loads(contents[name])
    change(bill)
    wheel = fake_wheel.pack(tmp_path, {**contents, name: json.dumps(bill).encode()})
    with pytest.raises(RefusedError, match=expected):
        check.check(wheel)


def test_a_bill_is_there_and_of_this_library(contents: dict[str, bytes], tmp_path: Path) -> None:
    contents[sbom.LIBRARY] += b"\0"
    with pytest.raises(RefusedError, match="describes another"):
        check.check(fake_wheel.pack(tmp_path, contents))
    del contents[f"{INFO}/sboms/{sbom.FILE_NAME}"]
    with pytest.raises(RefusedError, match="expected one bill of materials"):
        check.check(fake_wheel.pack(tmp_path, contents))


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> toolchain.Toolchain:
    for name in (
        "ziglang/lib/compiler_rt.zig", "ziglang/lib/compiler_rt/a.zig", "ziglang/lib/ubsan_rt.zig",
        "ziglang/lib/libc/glibc/LICENSES", "ziglang/__init__.py", "ziglang/LICENSE",
        "ziglang-0.1.2.dist-info/METADATA",
    ):  # fmt: skip
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("Metadata-Version: 2.4\nName: ziglang\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    (tmp_path / "include").mkdir()
    (tmp_path / "lib64").mkdir()
    header = "#define CUDART_VERSION  13020\n"
    (tmp_path / "include" / "cuda_runtime_api.h").write_text(header)
    library = tmp_path / "lib64" / "libcudart_static.a"
    library.write_bytes(b"cudart")
    (tmp_path / "EULA.txt").write_text("terms of the toolkit")
    return toolchain.Toolchain(tmp_path / "bin" / "nvcc", tmp_path, "13.2.77", library)


def test_finds_what_this_machine_builds_with(cuda: toolchain.Toolchain) -> None:
    parts = sbom.find_parts(cuda)
    cudart, zig, glibc, torch = parts
    assert (cudart.version, cudart.sha256) == ("13.2", hashlib.sha256(b"cudart").hexdigest())
    assert cudart.text == b"terms of the toolkit"
    assert zig.version == "0.1.2"
    assert glibc.version == "2.28 (ziglang 0.1.2)"
    assert "+" not in torch.version
    assert b"Redistribution" in torch.text
    assert len({part.sha256 for part in parts}) == 4
    assert parts == sbom.find_parts(cuda)
    assert {part.text_name for part in parts} == set(check.LICENCE_TEXTS)
    assert {part.licence for part in parts} <= set(sbom.LICENCES)


def test_a_full_toolkit_lists_the_version_of_its_runtime(cuda: toolchain.Toolchain) -> None:
    listed = {"cuda_cudart": {"name": "CUDA Runtime (cudart)", "version": "13.2.51"}}
    (cuda.root / "version.json").write_text(json.dumps(listed))
    assert sbom.find_parts(cuda)[0].version == "13.2.51"


def test_a_toolkit_of_unpacked_packages_has_the_licence_in_their_metadata(
    cuda: toolchain.Toolchain,
) -> None:
    info = cuda.root / "dist-info" / "nvidia_cuda_runtime-13.2.51.dist-info" / "licenses"
    info.mkdir(parents=True)
    (info / "License.txt").write_text("terms of the package")
    (cuda.root / "EULA.txt").unlink()
    assert sbom.find_parts(cuda)[0].text == b"terms of the package"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("EULA.txt", "no licence text of the CUDA runtime"),
        ("packages/ziglang/lib/ubsan_rt.zig", r"ubsan_rt\.zig.*Install the build's packages again"),
    ],
)
def test_a_file_that_is_missing(cuda: toolchain.Toolchain, name: str, expected: str) -> None:
    (cuda.root / name).unlink()
    with pytest.raises(BuildError, match=expected):
        sbom.find_parts(cuda)
