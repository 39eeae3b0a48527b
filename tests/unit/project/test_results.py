"""The check of docs/results, on folders made for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import results

SOURCES = {"cpp": "a" * 64, "cmake": "b" * 64}


def record(**changes: Any) -> dict[str, Any]:
    """A result of today's kernels."""
    whole = {
        "date": "2026-11-24", "command": "python -m benchmarks",
        "hardware": {"gpu": "NVIDIA H200"}, "versions": {"torch": "2.13.0"},
        "wheel": {"name": "a.whl", "sha256": "c" * 64},
        "sources": {**SOURCES, "pyproject.toml": "d" * 64}, **changes,
    }  # fmt: skip
    return {name: value for name, value in whole.items() if value is not None}


def found(folder: Path, **texts: dict[str, Any]) -> list[str]:
    for name, content in texts.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return list(results.problems(folder, SOURCES))


def test_results_of_todays_kernels_pass(tmp_path: Path) -> None:
    inner = record(sources={**SOURCES, "pyproject.toml": "other"})
    assert found(tmp_path, forward=record(), report={"provenance": inner}) == []


@pytest.mark.parametrize(("changes", "words"), [
    ({"date": None}, "date: missing"),
    ({"command": ""}, "command: missing"),
    ({"hardware": {}}, "hardware: missing"),
    ({"wheel": None}, "wheel: missing, or without its sha256"),
    ({"wheel": {"name": "a.whl", "sha256": None}}, "wheel: missing, or without its sha256"),
    ({"sources": None}, "sources: missing"),
    ({"sources": {"cpp": "a" * 64}}, "stale: of other kernels (cmake differ)"),
    ({"sources": {**SOURCES, "cpp": "0"}}, "stale: of other kernels (cpp differ)"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_is_missing_or_stale_is_named(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert found(tmp_path, old=record(**changes), new=record()) == [f"old.json: {words}"]


@pytest.mark.parametrize("name", results.OF_BITS)
def test_a_study_of_bits_lasts_as_long_as_they_do(name: str, tmp_path: Path) -> None:
    now = results.bits_version()
    of_bits = record(sources={**SOURCES, "cpp": "0"}, bits_version=now)
    assert found(tmp_path, **{name: of_bits}) == []
    words = f"{name}.json: stale: of bits_version {now - 1}, not {now}"
    assert found(tmp_path, **{name: of_bits | {"bits_version": now - 1}}) == [words]


def test_a_study_without_kernels_says_why(tmp_path: Path) -> None:
    study = record(wheel=None, sources=None, depends_on_kernels=False)
    assert found(tmp_path, a={**study, "reason": "emulated roundings"}) == []
    assert found(tmp_path, a=study)[0].startswith("a.json: reason: missing")


def test_pictures_lie_beside_what_they_are_made_from(tmp_path: Path) -> None:
    (tmp_path / "forward.svg").write_text("<svg/>")
    (tmp_path / "other.svg").write_text("<svg/>")
    (words,) = found(tmp_path, forward=record())
    assert words.startswith("other.svg: there is no other.json")


def test_what_is_no_json_and_what_is_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.json").write_text("[]\n")
    (tmp_path / "cut.json").write_text('{"date"\n')
    monkeypatch.setattr(results, "MOST_LINES", 1)
    words = found(tmp_path)
    assert [one.partition(" ")[0] for one in words] == ["cut.json:", "list.json:", "all"]
    assert words[2] == "all files together: 2 lines, expected at most 1"


def test_results_that_documents_name_are_there(tmp_path: Path) -> None:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "a.json").write_text("{}")
    (tmp_path / "README.md").write_text("`docs/results/a.json`, [b](docs/results/b.svg)")
    (tmp_path / "docs" / "c.md").write_text("[c](results/d/c.md)")
    assert list(results.unnamed(tmp_path)) == [
        "README.md: names docs/results/b.svg, which is not there",
        "docs/c.md: names results/d/c.md, which is not there",
    ]
