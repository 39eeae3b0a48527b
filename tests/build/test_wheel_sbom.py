from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import fake_wheel
import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from flash_attn_build.compile import toolchain
from flash_attn_build.errors import StepError, WheelError
from flash_attn_build.wheel import check, repair, sbom

LINUX = "py3-none-linux_x86_64"
LIBRARY = b"library"


def bill(epoch: int = 1_700_000_000, **changes: Any) -> Any:
    return json.loads(
        sbom.describe("0.1.0", {**fake_wheel.INFO, **changes}, LIBRARY, fake_wheel.PARTS, epoch)
    )


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repaired")
    binary = fake_wheel.library(folder / "library")
    wheel = fake_wheel.pack(folder, fake_wheel.contents(binary, LINUX), LINUX)
    return repair.repair(wheel, folder / "out", fake_wheel.PARTS, 1_700_000_000)


def test_cyclonedx_own_library_accepts_it() -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill())) is None


def test_names_everything_with_version_licence_and_hash() -> None:
    components = {c["name"]: c for c in bill()["components"]}
    assert set(components) == {
        "flash-attn",
        "CUTLASS",
        "CUDA Runtime (static)",
        "Zig runtime libraries",
        "glibc (libc_nonshared.a)",
        "torch headers of the stable ABI",
    }
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
    serials = {
        bill()["serialNumber"],
        bill(1)["serialNumber"],
        bill(upstream=other)["serialNumber"],
    }
    assert len(serials) == 3


def test_a_release_of_upstream_that_nobody_looked_at() -> None:
    with pytest.raises(StepError, match=r"which CUTLASS does flash-attn 9\.9 hold"):
        bill(upstream={**fake_wheel.INFO["upstream"], "version": "9.9"})


def test_the_pinned_release_is_known() -> None:
    pin = Path(__file__).resolve().parents[2] / "cpp" / "upstream" / "upstream.json"
    assert json.loads(pin.read_text())["version"] in sbom.CUTLASS_IN


def test_lies_in_the_wheel_and_its_record(repaired: Path) -> None:
    name = "flash_attn_deterministic-0.1.0.dist-info/sboms/flash-attn-deterministic.cdx.json"
    with zipfile.ZipFile(repaired) as archive:
        data = archive.read(name)
        record = archive.read("flash_attn_deterministic-0.1.0.dist-info/RECORD").decode()
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(record))}
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    assert rows[name] == [f"sha256={digest}", str(len(data))]
    assert json.loads(data)["metadata"]["component"]["version"] == "0.1.0"


def tampered(repaired: Path, folder: Path, **changes: Any) -> Path:
    with zipfile.ZipFile(repaired) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}
    name = next(name for name in contents if name.endswith(sbom.FILE_NAME))
    text = json.loads(contents[name])
    for key, value in changes.items():
        if key == "drop":
            text["components"] = [c for c in text["components"] if c["name"] != value]
        elif key == "empty":
            next(c for c in text["components"] if c["name"] == value).pop("licenses")
        else:
            next(c for c in text["components"] if c["name"] == "flash-attn")[key] = value
    contents[name] = json.dumps(text).encode()
    return fake_wheel.pack(folder, contents)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"drop": "CUTLASS"}, "does not name CUTLASS", id="missing component"),
        pytest.param(
            {"empty": "Zig runtime libraries"},
            "Zig runtime libraries lacks a version, a licence or a hash",
            id="no licence",
        ),
        pytest.param(
            {"hashes": [{"alg": "SHA-256", "content": "0" * 64}]},
            "flash-attn's sha256 is not the one in the build information",
            id="other upstream",
        ),
        pytest.param(
            {"properties": []}, "its patches are not those in the build", id="other patches"
        ),
        pytest.param({"drop": "flash-attn"}, "not the bill of materials of this", id="no upstream"),
    ],
)
def test_a_wheel_with_a_wrong_bill_is_refused(
    repaired: Path, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(WheelError, match=expected):
        check.check(tampered(repaired, tmp_path, **changes))


def test_a_wheel_without_a_bill_is_refused(repaired: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(repaired) as archive:
        names = [n for n in archive.namelist() if n[-1] != "/" and "/sboms/" not in n]
        contents = {name: archive.read(name) for name in names}
    with pytest.raises(WheelError, match="expected one bill of materials"):
        check.check(fake_wheel.pack(tmp_path, contents))


def test_a_bill_of_another_library_is_refused(repaired: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(repaired) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}
    contents[sbom.LIBRARY] += b"\0"
    with pytest.raises(WheelError, match="describes another"):
        check.check(fake_wheel.pack(tmp_path, contents))


def test_a_foreign_wheel_is_refused(tmp_path: Path) -> None:
    wheel = fake_wheel.pack(tmp_path, {"a.py": b"", "a-1.dist-info/WHEEL": b""}, LINUX)
    with pytest.raises(WheelError, match=r"_build_info\.json and .*_C\.so is missing"):
        repair.repair(wheel, tmp_path / "out", fake_wheel.PARTS, 0)


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> toolchain.Toolchain:
    for name in ("ziglang/lib/compiler_rt.zig", "ziglang/lib/compiler_rt/a.zig",
                 "ziglang/lib/ubsan_rt.zig", "ziglang/lib/libc/glibc/LICENSES",
                 "ziglang/__init__.py", "ziglang/LICENSE",
                 "ziglang-0.1.2.dist-info/METADATA"):  # fmt: skip
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


def test_a_toolkit_without_its_licence(cuda: toolchain.Toolchain) -> None:
    (cuda.root / "EULA.txt").unlink()
    with pytest.raises(StepError, match="no licence text of the CUDA runtime"):
        sbom.find_parts(cuda)


def test_a_full_toolkit_lists_the_version_of_its_runtime(cuda: toolchain.Toolchain) -> None:
    listed = {"cuda_cudart": {"name": "CUDA Runtime (cudart)", "version": "13.2.51"}}
    (cuda.root / "version.json").write_text(json.dumps(listed))
    assert sbom.find_parts(cuda)[0].version == "13.2.51"


def test_a_package_with_files_missing(cuda: toolchain.Toolchain, tmp_path: Path) -> None:
    (tmp_path / "packages" / "ziglang" / "lib" / "ubsan_rt.zig").unlink()
    with pytest.raises(StepError, match=r"ubsan_rt\.zig.*Install the build's packages again"):
        sbom.find_parts(cuda)
