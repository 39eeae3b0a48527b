from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flash_attn_deterministic import build_info as record
from flash_attn_deterministic.build_info import Instance, Patch, Tile, build_info, parse
from flash_attn_deterministic.errors import BuildInfoError

RECORD: dict[str, Any] = {
    "schema": 1,
    "upstream": {"name": "flash-attn", "version": "2.8.3.post2", "sha256": "aa",
        "patches": [{"name": "0001-x.patch", "sha256": "bb"}]},
    "cuda_toolkit": "13.0.88",
    "architectures": ["80-real", "90-virtual"],
    "deterministic": True,
    "torch_target": "2.10",
    "tiles": {"128": {"block_m": 128, "block_n": 64, "warps": 4},
        "64": {"block_m": 128, "block_n": 128, "warps": 4}},
    "instances": [{"direction": "fwd", "dtype": "bf16", "head_dim": 64}],
    "sources": {"cpp": "cc"},
    "bits_version": 3,
}  # fmt: skip


def test_parse_types_every_field() -> None:
    info = parse(RECORD)
    assert info.upstream.version == "2.8.3.post2"
    assert info.upstream.patches == (Patch("0001-x.patch", "bb"),)
    assert info.architectures == ("80-real", "90-virtual")
    assert info.tiles == {64: Tile(128, 128, 4), 128: Tile(128, 64, 4)}
    assert info.instances == (Instance("fwd", "bf16", 64),)
    assert info.deterministic is True
    assert info.sources == {"cpp": "cc"}
    assert info.bits_version == 3


@pytest.mark.parametrize(
    ("head_dim", "kernel_head_dim"), [(1, 64), (64, 64), (65, 128), (72, 128), (128, 128)]
)
def test_head_dim_rounds_up_to_a_kernel(head_dim: int, kernel_head_dim: int) -> None:
    info = parse(RECORD)
    assert info.kernel_head_dim(head_dim) == kernel_head_dim
    assert info.tile(head_dim) == info.tiles[kernel_head_dim]


def test_head_dim_without_a_tile_is_an_error() -> None:
    with pytest.raises(BuildInfoError, match="head_dim 129"):
        parse(RECORD).kernel_head_dim(129)


@pytest.mark.parametrize("field", sorted(RECORD.keys() - {"schema"}))
def test_missing_field_is_named(field: str) -> None:
    record = {key: value for key, value in RECORD.items() if key != field}
    with pytest.raises(BuildInfoError, match=field):
        parse(record)


@pytest.mark.parametrize("schema", [None, 0, 2, "1"])
def test_other_schema_is_refused(schema: object) -> None:
    with pytest.raises(BuildInfoError, match="expected schema 1"):
        parse({**RECORD, "schema": schema})


@pytest.mark.parametrize(("field", "value", "words"), [
    pytest.param("tiles", {"wide": RECORD["tiles"]["64"]}, "wide", id="tiles"),
    pytest.param("bits_version", "two", "two", id="bits_version"),
    pytest.param("sources", ["a"], "sequence", id="sources"),
])  # fmt: skip
def test_field_of_a_wrong_type_is_an_error(field: str, value: object, words: str) -> None:
    with pytest.raises(BuildInfoError, match=words):
        parse({**RECORD, field: value})


def test_error_of_a_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_PATH", tmp_path / "_build_info.json")
    with pytest.raises(BuildInfoError, match="not an installed wheel; run `nox -s build`"):
        build_info.__wrapped__()


def test_damaged_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "_build_info.json"
    path.write_text(json.dumps(RECORD)[:-1])
    monkeypatch.setattr(record, "_PATH", path)
    with pytest.raises(BuildInfoError, match="not JSON"):
        build_info.__wrapped__()


def test_installed_wheel_has_a_tile_for_every_head_dim() -> None:
    info = build_info()
    assert list(info.tiles) == [32, 64, 96, 128, 192, 256, 576]
    for tile in info.tiles.values():
        assert tile.block_n & (tile.block_n - 1) == 0
    assert {i.head_dim for i in info.instances} <= set(info.tiles)
