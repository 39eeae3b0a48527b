"""Opens the built wheel: it holds what this project says of it, and nothing else."""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from elftools.elf.elffile import ELFFile
from flash_attn_build.compile import manifest
from flash_attn_build.wheel import check, cubins

pytestmark = pytest.mark.build

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel() -> Path:
    return Path(os.environ["FLASH_ATTN_WHEEL"])


@pytest.fixture(scope="module")
def archive(wheel: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(wheel) as opened:
        yield opened


@pytest.fixture(scope="module")
def info(archive: zipfile.ZipFile) -> Any:
    return json.loads(archive.read(check.BUILD_INFO))


@pytest.fixture(scope="module")
def library(archive: zipfile.ZipFile) -> ELFFile:
    return ELFFile(io.BytesIO(archive.read(check.LIBRARY)))


def test_passes_every_check_of_the_build(wheel: Path) -> None:
    """Name, files, metadata, licences, bill, symbols: tests/build has what it refuses."""
    check.check(wheel)


@pytest.mark.parametrize(
    ("name", "holder"),
    [("FlashAttention-LICENSE", "the respective contributors"), ("CUTLASS-LICENSE.txt", "NVIDIA")],
)
def test_holds_the_licences_of_what_it_is_made_of(
    archive: zipfile.ZipFile, name: str, holder: str
) -> None:
    text = archive.read(f"flash_attn_deterministic/licenses/{name}").decode()
    assert holder in text
    assert "Redistribution and use in source and binary forms" in text


def test_bill_of_materials(archive: zipfile.ZipFile, info: Any) -> None:
    (path,) = (n for n in archive.namelist() if n.endswith(".cdx.json"))
    text = archive.read(path).decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    versions = {c["name"]: c["version"] for c in json.loads(text)["components"]}
    toolkit = info["cuda_toolkit"].split(".")[0]
    assert versions["CUDA Runtime (static)"].split(".")[0] == toolkit


def test_library_asks_for_no_glibc_above_its_tag(library: ELFFile) -> None:
    needs: Any = library.get_section_by_name(".gnu.version_r")
    names = [version.name for _, found in needs.iter_versions() for version in found]
    found = (re.fullmatch(r"GLIBC_([\d.]+)", name) for name in names)
    numbers = {tuple(map(int, match[1].split("."))) for match in found if match}
    assert numbers
    assert max(numbers) <= (2, 28)


def test_gpu_code_is_what_the_wheel_says(library: ELFFile, info: Any) -> None:
    # Machine code of 90a is labelled with its number alone.
    stated = {name.replace("90a-", "90-") for name in info["architectures"]}
    # Each instance is a translation unit. Those of the Hopper family hold 90a, others all the rest.
    units = [{name for name, _ in held} for _, held in cubins.entries(check.fatbin(library))]
    hopper = [i for i in info["instances"] if i.get("family") == "sm90"]
    assert units.count(stated) >= len(info["instances"]) - len(hopper)
    assert units.count({"90-real"}) >= len(hopper)


def test_build_info_agrees_with_the_repository(info: Any) -> None:
    table = json.loads((ROOT / "cpp" / "instances.json").read_text())
    block_n = table["keys_per_block"]
    tiles = {**table["fwd_tiles"]["one_cta"], **table["fwd_tiles"]["latent"]}
    assert info["tiles"] == {name: {**tile, "block_n": block_n} for name, tile in tiles.items()}
    pin = json.loads((ROOT / "cpp" / "upstream" / "upstream.json").read_text())
    assert info["upstream"] == {
        "name": pin["name"],
        "version": pin["version"],
        "sha256": pin["sdist"]["sha256"],
        "patches": pin["patches"],
    }


def test_manifest_is_of_this_wheel(wheel: Path, info: Any) -> None:
    beside, written = manifest.path_of(wheel), manifest.read(wheel)
    assert written["wheel"]["bytes"] == wheel.stat().st_size
    assert written["instances"] == info["instances"]
    cuda = [u for u in written["translation_units"] if u["output"].endswith(".cu.o")]
    generated = {Path(u["output"]).name for u in cuda if "/generated/" in u["output"]}
    # Tiles of one instance of the Hopper family are units of their own: fwd_sm90_bf16_192_128_192.
    # So are an instance's kernels for e4m3 keys.
    instances = {
        re.sub(r"(_sm90_[a-z0-9]+_\d+)(_\d+)+", r"\1", name)
        for name in generated
        if "_fp8_" not in name
    }
    assert len(instances) == len(info["instances"])
    assert all(unit["wall_seconds"] > 0 for unit in cuda)
    assert written["totals"]["cpu_seconds"] > 0
    assert str(ROOT) not in beside.read_text()


def test_the_tests_run_against_the_installed_wheel(wheel: Path, archive: zipfile.ZipFile) -> None:
    import flash_attn_deterministic

    folder = Path(flash_attn_deterministic.__file__).parent
    assert not folder.is_relative_to(ROOT / "python")
    assert version("flash-attn-deterministic") == wheel.name.split("-")[1]
    for name in archive.namelist():
        if name.startswith("flash_attn_deterministic/") and not name.endswith("/"):
            installed = folder / name.partition("/")[2]
            assert installed.read_bytes() == archive.read(name)
