from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import fake_wheel
import pytest
from cyclonedx.model.bom import Bom
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from flash_attn_build.compile import toolchain
from flash_attn_build.errors import BuildError
from flash_attn_build.files import write_text
from flash_attn_build.upstream.pin import load_pin
from flash_attn_build.wheel import archive, sbom

DATE = archive.date_of(1_700_000_000)


def describe(date: archive.Date = DATE, **changes: Any) -> bytes:
    info = {**fake_wheel.INFO, **changes}
    return sbom.describe("0.1.0", info, b"library", fake_wheel.COMPONENTS, date)


def test_names_everything_with_version_licence_and_hash() -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(describe().decode()) is None
    bill = json.loads(describe())
    assert [each["name"] for each in bill["components"]] == [*sbom.CODE]
    assert all(each["version"] and each["licenses"] for each in bill["components"])
    assert all(len(each["hashes"][0]["content"]) == 64 for each in bill["components"])
    assert bill["components"][0]["properties"] == [
        {"name": "flash-attn-deterministic:patch:0001-a.patch", "value": "a1" * 32}
    ]


def test_only_the_same_inputs_give_the_same_bytes() -> None:
    assert json.loads(describe())["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    other = {**fake_wheel.INFO["upstream"], "sha256": "e0" * 32}
    bills = [describe(), describe(archive.date_of(9)), describe(upstream=other)]
    assert len({json.loads(bill)["serialNumber"] for bill in bills}) == 3
    for library in (b"library", b"another"):
        found = [*sbom.problems(describe(), "0.1.0", fake_wheel.INFO, library, DATE)]
        assert bool(found) == (library == b"another")


def test_a_reader_of_bills_finds_every_component_below_the_wheel() -> None:
    bill = Bom.from_json(json.loads(describe()))  # type: ignore[attr-defined]
    bill.validate()  # every reference of the graph is that of a component
    below = {each.ref: {one.ref for one in each.dependencies} for each in bill.dependencies}
    assert below[bill.metadata.component.bom_ref] == {each.bom_ref for each in bill.components}
    (upstream,) = (each.bom_ref for each in bill.components if each.name == "flash-attn")
    assert [each.value for each in below[upstream]] == ["pkg:github/nvidia/cutlass@v4.0.0"]


def test_a_release_of_upstream_that_nobody_looked_at() -> None:
    with pytest.raises(BuildError, match=r"which CUTLASS does flash-attn 9\.9 hold"):
        describe(upstream={**fake_wheel.INFO["upstream"], "version": "9.9"})
    assert load_pin().version in sbom.CUTLASS_IN


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> toolchain.Toolchain:
    for name in (
        "ziglang/lib/compiler_rt.zig", "ziglang/lib/compiler_rt/a.zig", "ziglang/lib/ubsan_rt.zig",
        "ziglang/lib/libc/glibc/LICENSES", "ziglang/__init__.py", "ziglang/LICENSE",
        "ziglang-0.1.2.dist-info/METADATA",
    ):  # fmt: skip
        metadata = "Metadata-Version: 2.4\nName: ziglang\nVersion: 0.1.2\n"
        write_text(tmp_path / "packages" / name, metadata)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    write_text(tmp_path / "include/cuda_runtime_api.h", "#define CUDART_VERSION  13020\n")
    write_text(library := tmp_path / "lib64" / "libcudart_static.a", "cudart")
    write_text(tmp_path / "EULA.txt", "terms of the toolkit")
    return toolchain.Toolchain(tmp_path / "bin" / "nvcc", tmp_path, "13.2.77", library)


def test_finds_what_this_machine_builds_with(cuda: toolchain.Toolchain) -> None:
    components = sbom.find_components(cuda)
    cudart, zig, glibc, torch = components
    assert (cudart.version, cudart.sha256) == ("13.2", hashlib.sha256(b"cudart").hexdigest())
    assert cudart.text == b"terms of the toolkit"
    assert zig.version == "0.1.2"
    assert glibc.version == "2.28 (ziglang 0.1.2)"
    assert "+" not in torch.version
    assert b"Redistribution" in torch.text
    assert len({each.sha256 for each in components}) == 4
    assert components == sbom.find_components(cuda)
    assert {each.text_name for each in components} == sbom.LICENCE_TEXTS


def test_a_toolkit_of_unpacked_packages_has_the_licence_in_their_metadata(
    cuda: toolchain.Toolchain,
) -> None:
    info = cuda.root / "dist-info" / "nvidia_cuda_runtime-13.2.51.dist-info"
    write_text(info / "licenses" / "License.txt", "terms of the package")
    (cuda.root / "EULA.txt").unlink()
    assert sbom.find_components(cuda)[0].text == b"terms of the package"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("EULA.txt", "no licence text of the CUDA runtime"),
        ("packages/ziglang/lib/ubsan_rt.zig", r"ubsan_rt\.zig.*Install the build's packages again"),
    ],
)
def test_a_file_that_is_missing(
    cuda: toolchain.Toolchain, name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_packages = sbom._package_licence

    def without_cuda(package: str) -> bytes:  # a torch for CUDA brings the runtime's package
        if package.startswith("nvidia"):
            raise importlib.metadata.PackageNotFoundError(package)
        return of_packages(package)

    monkeypatch.setattr(sbom, "_package_licence", without_cuda)
    (cuda.root / name).unlink()
    with pytest.raises(BuildError, match=expected):
        sbom.find_components(cuda)
