"""The bench command on the CPU, with torch's own attention as the peer."""

from __future__ import annotations

import errno
import json
import os
import xml.etree.ElementTree as ET
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic import deterministic_mode
from flash_attn_deterministic.__main__ import main
from flash_attn_deterministic.bench import measure as measuring
from flash_attn_deterministic.bench import peers, problem
from flash_attn_deterministic.bench.problem import Problem
from flash_attn_deterministic.info import build_info as record
from flash_attn_deterministic.verify import environment


def bench(out: Path, *arguments: str) -> int:
    words = ["--device", "cpu", "--out", str(out), "--repeats", "2", *arguments]
    return main(["bench", *words])


def read(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / "bench.json").read_text())
    return record


def test_ours_beside_sdpa(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--peers", "sdpa") == 0
    record = read(tmp_path)
    assert record["complete"] is True
    assert {case["kind"] for case in record["cases"]} == {"forward", "decode", "backward"}
    for case in record["cases"]:
        assert case["failed"] == {}
        assert set(case["ms"]) == set(case["ratio"]) == {"ours", "sdpa"}
        assert case["ratio"]["ours"] == 1.0
        assert case["ms"]["sdpa"]["median"] > 0
    table = (tmp_path / "bench.md").read_text()
    printed = capsys.readouterr().out
    for text in (table, printed):
        assert "torch SDPA, default" in text
        assert "decode B2 L256 H4/2 D64 bf16" in text
    plot = ET.fromstring((tmp_path / "bench.svg").read_text())
    assert plot.tag.endswith("svg")


def test_one_kind(tmp_path: Path) -> None:
    assert bench(tmp_path, "--peers", "sdpa", "--kinds", "decode") == 0
    assert [case["kind"] for case in read(tmp_path)["cases"]] == ["decode"]


def test_shapes_have_names_of_their_own() -> None:
    for device in ("cpu", "cuda"):
        found = problem.shapes(device, ("forward", "decode", "backward"))
        assert len({shape.name for shape in found}) == len(found)
        assert {shape.kind for shape in found} == {"forward", "decode", "backward"}


def test_the_mode_is_that_of_the_caller(tmp_path: Path) -> None:
    with deterministic_mode(split_size=128):
        assert bench(tmp_path, "--peers", "sdpa", "--kinds", "decode") == 0
    found = read(tmp_path)
    assert found["split_size"] == 128
    assert found["sources"] == dict(record.build_info().sources)
    with deterministic_mode(False):
        assert bench(tmp_path, "--peers", "sdpa", "--kinds", "decode") == 0
    assert read(tmp_path)["split_size"] is None
    assert ", not deterministic. Median" in (tmp_path / "bench.md").read_text()


def test_ours_failing_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(one: Problem) -> peers.Forward:
        raise RuntimeError("no kernel")

    ours = peers.Peer("ours", "broken", forward, ("cpu",))
    monkeypatch.setattr(peers, "OURS", ours)
    monkeypatch.setattr(measuring, "OURS", ours)
    monkeypatch.setattr(peers, "PEERS", (ours, *peers.PEERS[1:]))
    assert bench(tmp_path, "--peers", "sdpa", "--kinds", "forward") == 1
    assert read(tmp_path)["cases"][0]["failed"] == {"ours": "RuntimeError: no kernel"}


def test_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*arguments: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    assert bench(tmp_path, "--peers", "sdpa", "--kinds", "decode") == 0
    for name in ("bench.md", "bench.svg"):
        assert "ncomplete" not in (tmp_path / name).read_text()
    monkeypatch.setattr(measuring, "measure", stopped)
    assert bench(tmp_path) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert read(tmp_path)["complete"] is False
    # Nor do the others look whole, though nothing was measured yet.
    assert "Incomplete: the run did not come to its end" in (tmp_path / "bench.md").read_text()
    assert "(incomplete)" in "".join(ET.fromstring((tmp_path / "bench.svg").read_text()).itertext())


def test_interrupted_before_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(device: str) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "collect", stopped)
    assert bench(tmp_path / "out") == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not (tmp_path / "out").exists()


def test_unwritable_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert bench(tmp_path / "file" / "out") == 7
    assert "choose another folder with --out" in capsys.readouterr().err


def test_unknown_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--peers", "xformers") == 2
    assert "--peers: no xformers; known: ours, sdpa-flash" in capsys.readouterr().err


def test_too_few_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--repeats", "1") == 2
    assert "--repeats: expected 2 or more, got 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--repeats", "abc"], "--repeats: invalid int value: 'abc'"),
        (["--repeats", "2.5"], "--repeats: invalid int value: '2.5'"),
        (["--kinds", "training"], "invalid choice: 'training'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--out"], "expected one argument"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for word in ("--repeats N", "exit status: 0 done", "7 the results cannot be written"):
        assert word in printed


@pytest.fixture
def source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as it is in a source tree: nothing was built, nothing is installed."""

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(record, "_PATH", Path("nowhere") / "_build_info.json")
    record.build_info.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--device", "cpu"], 6, "this is the source tree, not an installed wheel"),
        (["--device", "cpu", "--peers", "nope"], 2, "--peers: no nope"),
        (["--device", "cuda"], 6, "use a machine with an NVIDIA GPU"),
    ],
)
@pytest.mark.usefixtures("source_tree")
def test_source_tree(
    arguments: list[str],
    status: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "out"
    try:
        assert main(["bench", "--out", str(out), *arguments]) == status
    finally:
        record.build_info.cache_clear()
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_files_without_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert bench(tmp_path / "out") == 6
    assert "flash-attn-deterministic is not installed" in capsys.readouterr().err


def test_a_peer_asked_for_is_listed_even_where_it_does_not_run(tmp_path: Path) -> None:
    assert bench(tmp_path, "--peers", "flash_attn", "flash_attn", "--kinds", "decode") == 0
    (case,) = read(tmp_path)["cases"]
    assert case["failed"] == {"flash_attn": "Unavailable: does not run on cpu"}
    assert set(case["ms"]) == {"ours"}


def test_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--out", str(tmp_path / "out")]) == 6
    assert "--device cpu" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert bench(tmp_path / "out", "--peers", "sdpa") == 7
    assert list((tmp_path / "out").iterdir()) == []
