"""The bench command on the CPU, with torch's own attention as the peer."""

from __future__ import annotations

import errno
import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic.__main__ import main
from flash_attn_deterministic.bench import measure as measuring
from flash_attn_deterministic.bench import peers, problem
from flash_attn_deterministic.bench.problem import Problem, Shape

SHAPE = Shape("forward", 1, 64, 2, 1, 64, causal=True)


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


def run_with(peer: peers.Peer) -> dict[str, Any]:
    return measuring.measure(SHAPE, "cpu", [peers.OURS, peer], 2)


def test_a_peer_that_fails_is_listed_with_its_reason() -> None:
    def forward(one: Problem) -> peers.Call:
        raise RuntimeError("no kernel for this GPU\nwith a long trace")

    found = run_with(peers.Peer("sdpa", "broken", forward, ("cpu",)))
    assert found["failed"] == {"sdpa": "RuntimeError: no kernel for this GPU"}
    assert set(found["ms"]) == {"ours"}


def test_a_peer_that_computes_something_else_is_no_peer() -> None:
    found = run_with(peers.Peer("sdpa", "other", lambda p: lambda: p.q + 1, ("cpu",)))
    assert "differs from ours" in found["failed"]["sdpa"]


def test_a_nan_differs() -> None:
    found = run_with(peers.Peer("sdpa", "nan", lambda p: lambda: p.q * torch.nan, ("cpu",)))
    assert "differs from ours" in found["failed"]["sdpa"]


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
def test_what_is_not_installed_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    (peer,) = (one for one in peers.PEERS if one.name == name)
    with pytest.raises(peers.Unavailable, match=f"{name} cannot be imported"):
        peer.forward(Problem.draw(SHAPE, "cpu"))


def test_a_peer_without_backward() -> None:
    shape = Shape("backward", 1, 64, 2, 2, 64)
    peer = peers.Peer("sdpa", "no backward", peers._sdpa, ("cpu",), backward=False)
    found = measuring.measure(shape, "cpu", [peers.OURS, peer], 2)
    assert found["failed"] == {"sdpa": "Unavailable: has no backward"}
    assert "ours" in found["ms"]


def test_peers_have_names_of_their_own() -> None:
    assert len({peer.name for peer in peers.PEERS}) == len(peers.PEERS)


def test_shapes_have_names_of_their_own() -> None:
    for device in ("cpu", "cuda"):
        found = problem.shapes(device, ("forward", "decode", "backward"))
        assert len({shape.name for shape in found}) == len(found)
        assert {shape.kind for shape in found} == {"forward", "decode", "backward"}


def test_ours_failing_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(one: Problem) -> peers.Call:
        raise RuntimeError("no kernel")

    ours = peers.Peer("ours", "broken", forward, ("cpu",))
    monkeypatch.setattr(peers, "OURS", ours)
    monkeypatch.setattr(measuring, "OURS", ours)
    monkeypatch.setattr(peers, "PEERS", (ours, *peers.PEERS[1:]))
    assert bench(tmp_path, "--peers", "sdpa", "--kinds", "forward") == 1
    assert read(tmp_path)["cases"][0]["failed"] == {"ours": "RuntimeError: no kernel"}


def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "measure", stopped)
    assert bench(tmp_path) == 130
    assert read(tmp_path)["complete"] is False


def test_unknown_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--peers", "xformers") == 2
    assert "--peers: no xformers; known: ours, sdpa-flash" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--repeats", "1"], ["--kinds", "training"], ["--fast"]])
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2


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
