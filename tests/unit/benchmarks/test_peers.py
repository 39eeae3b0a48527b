"""The comparison with the fastest kernels: its shapes, its summary, and its way from end to end."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import peer_samples
import pytest
import torch
from flash_attn_deterministic.bench import measure as measuring
from flash_attn_deterministic.bench.peers import OURS, Peer
from flash_attn_deterministic.bench.problem import Shape
from flash_attn_deterministic.verify.scoreboard import fa3
from flash_attn_deterministic.verify.speed import decode

from tests.benchmarks import decode_peers, host_time, peer_libraries, peers
from tests.benchmarks.shared.decode_cases import Case as DecodeCase
from tests.benchmarks.shared.peer_cases import BACKWARD, FORWARD, HEAD_DIMS, Case
from tests.benchmarks.shared.run import lines


def shapes(cases: tuple[Case, ...], group: str) -> list[Shape]:
    return [case.shape for case in cases if case.group == group]


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_names_of_cases_are_unique(kind: str) -> None:
    cases = peers.CASES[kind]
    assert len({case.name for case in cases}) == len(cases)
    assert {case.shape.kind for case in cases} <= {kind, "step"}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_forward_cases_cover_each_head_dim_and_mask(head_dim: int, causal: bool) -> None:
    own = [c.shape for c in FORWARD if (c.shape.head_dim, c.shape.causal) == (head_dim, causal)]
    assert {shape.seqlen for shape in own} >= {512, 4096, 16_384, 65_536}
    assert any(min(shape.lengths) == 587 and shape.seqlen == 8184 for shape in own if shape.lengths)


def test_forward_cases_cover_the_rest() -> None:
    assert {shape.window for shape in shapes(FORWARD, "window")} == {
        *(128, 256, 512, 1024, 2048, 4096)
    }
    chunks = {(shape.queries, shape.seqlen) for shape in shapes(FORWARD, "chunk")}
    keys = (8192, 16_384, 32_768, 65_536, 131_072)
    assert chunks == set(itertools.product((512, 2048), keys))
    packed = shapes(FORWARD, "packed")
    assert {(len(shape.lengths), min(shape.lengths), shape.seqlen) for shape in packed} == {
        (16, 587, 8184),
        (64, 19, 8087),
    }
    assert {(shape.nheads, shape.nheads_k) for shape in shapes(FORWARD, "GQA")} >= {(32, 8)}
    assert (1024, 77) in {(s.queries, s.seqlen) for s in shapes(FORWARD, "cross attention")}
    assert (64, 577) in {(s.batch, s.seqlen) for s in shapes(FORWARD, "ViT")}


def test_backward_cases_cover_what_they_should() -> None:
    square = [case.shape for case in BACKWARD if not case.shape.lengths]
    for head_dim, causal in itertools.product((64, 96, 128), (False, True)):
        own = [s for s in square if (s.head_dim, s.causal) == (head_dim, causal)]
        assert {shape.seqlen for shape in own} >= {512, 65_536}
    heads = {shape.batch * shape.nheads for shape in square}
    assert (min(heads), max(heads)) == (4, 512)
    assert 256 in heads
    assert shapes(BACKWARD, "training step") == [Shape("step", 8, 4096, 32, 8, 128, True)]
    assert {len(shape.lengths) for shape in shapes(BACKWARD, "packed")} == {16, 64}


@pytest.mark.parametrize(
    "shape",
    [
        Shape("forward", 2, 7, 3, 3, 8),
        Shape("backward", 2, 7, 3, 1, 8, True),
        Shape("step", 1, 9, 2, 2, 8, True, window=3),
        Shape("forward", 1, 12, 2, 2, 8, True, seqlen_q=5),
        Shape("forward", 1, 5, 2, 2, 8, seqlen_q=12),
        Shape("forward", 3, 9, 2, 2, 8, True, lengths=(1, 9, 4)),
    ],
    ids=lambda shape: str(shape.name),
)
def test_operations_are_those_on_visible_keys(shape: Shape) -> None:
    seen = 0
    for length in shape.lengths or [shape.seqlen] * shape.batch:
        queries = length if shape.lengths else shape.queries
        for row, key in itertools.product(range(queries), range(length)):
            own = row + length - queries
            seen += (not shape.causal or key <= own) and (
                shape.window < 0 or key >= own - shape.window
            )
    products = {"forward": 2, "backward": 5, "step": 7}[shape.kind]
    assert shape.flops == 2 * products * shape.nheads * shape.head_dim * seen


def test_a_summary_has_means_and_worst_cases() -> None:
    def result(name: str, group: str, **over: float) -> dict[str, Any]:
        return {"name": name, "group": group, "head_dim": 64, "ours_over": over}

    found = peers.summarise(
        [result("a", "dense", fa4=0.5), result("b", "dense", fa4=2.0, best=1.0), result("c", "GQA")]
    )
    one = {"mean": 1.0, "worst": 2.0, "worst_case": "b", "cases": 2}
    assert found["dense"]["fa4"] == found["all"]["fa4"] == found["D64"]["fa4"] == one
    assert found["dense"]["best"]["cases"] == 1
    assert "GQA" not in found
    assert any("worst 2.000 (b), 2 cases" in line for line in lines(found))


# --- End to end, on the CPU ---------------------------------------------------------------------

SMALL = (
    Case("dense", Shape("forward", 1, 64, 2, 1, 64, True)),
    Case("window", Shape("forward", 1, 64, 2, 1, 64, True, window=9)),
    Case("chunk", Shape("forward", 1, 64, 2, 1, 64, True, seqlen_q=9)),
    Case("packed", Shape("forward", 2, 20, 2, 1, 64, True, lengths=(20, 3))),
)
SMALL_BACKWARD = (
    Case("training step", Shape("step", 1, 64, 2, 1, 64, True)),
    Case("dense", Shape("backward", 1, 64, 2, 1, 64)),
)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases so small that the CPU reference takes no time; peers' libraries have stand-ins."""
    peer_samples.install(monkeypatch)
    peer_samples.install_fa3(monkeypatch)
    monkeypatch.setattr(peers, "CASES", {"forward": SMALL, "backward": SMALL_BACKWARD})
    for name in ("PEERS", "VARIANTS"):
        found = [_everywhere(peer) for peer in getattr(peers, name)]
        monkeypatch.setattr(peers, name, tuple(found))

    def measure(shape: Shape, device: str, sides: list[Peer], *numbers: float) -> Any:
        assert device == "cuda"
        return measuring.measure(shape, "cpu", sides, 2, numbers[1])

    monkeypatch.setattr(peers, "measure", measure)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def _everywhere(peer: Peer) -> Peer:
    return Peer(peer.name, peer.title, peer.forward, ("cuda", "cpu"), peer.backward)


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = peers.main([*arguments, "--out", str(tmp_path / "peers.json"), "--repeats", "2"])
    return status, json.loads((tmp_path / "peers.json").read_text())


@pytest.mark.usefixtures("on_cpu")
def test_a_forward_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, record = run(tmp_path, "--kind", "forward")
    assert status == 0, record["failed"]
    assert record["failed"] == record["left_out"] == []
    assert record["peers"]["fa3"] == "FA3 of a sample"
    assert record["kind"] == "forward"
    by_group = {case["group"]: case for case in record["cases"]}
    assert list(by_group) == ["dense", "window", "chunk", "packed"]
    everybody = {"ours", "fa4", "fa3-one-split"}
    assert set(by_group["dense"]["ms"]) >= {*everybody, "sdpa-flash"}
    assert set(by_group["packed"]["ms"]) == everybody
    assert set(by_group["chunk"]["ms"]) >= {*everybody, "fa3"}
    assert by_group["window"]["failed"]["sdpa-cudnn"] == "Unavailable: has no windows"
    for case in record["cases"]:
        over = case["ours_over"]
        assert over["best"] == max(over[side] for side in peers.RIVALS["forward"] if side in over)
        assert set(case["tflops"]) == set(case["ms"])
    assert record["summary"]["all"]["fa4"]["cases"] == 4
    assert "all                  fa4" in capsys.readouterr().out


@pytest.mark.usefixtures("on_cpu")
def test_a_backward_run(tmp_path: Path) -> None:
    status, record = run(tmp_path, "--kind", "backward", "--groups", "training step", "dense")
    assert status == 0, record["failed"]
    for case in record["cases"]:
        assert set(case["ms"]) >= {"ours", "ours-atomics", "fa4-deterministic", "fa3-deterministic"}


@pytest.mark.usefixtures("on_cpu")
def test_time_leaves_cases_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, record = run(tmp_path, "--kind", "forward", "--seconds", "-1", "--only", "window")
    assert status == 0
    assert record["cases"] == []
    assert record["left_out"] == [SMALL[1].name]
    assert "left out, after -1 seconds: 1 cases" in capsys.readouterr().out


@pytest.mark.usefixtures("on_cpu")
def test_ours_must_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: object) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(peers, "OURS", Peer(OURS.name, OURS.title, broken, ("cpu",)))
    status, record = run(tmp_path, "--kind", "forward", "--only", "window")
    assert status == 1
    assert record["failed"] == [
        {"name": SMALL[1].name, "error": "RuntimeError: RuntimeError: no kernel"}
    ]


def test_a_list_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "none.json"
    assert peers.main(["--kind", "backward", "--list", "--out", str(out)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(BACKWARD)
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["--groups", "nothing"], "no nothing; there are dense, GQA", id="group"),
        pytest.param(["--fa3", "nowhere"], "fa3.so, found no such file", id="fa3"),
        pytest.param(["--fa4", "nowhere"], "cute, found no such file", id="fa4"),
    ],
)
def test_wrong_words_end_the_command(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        peers.main(["--kind", "forward", "--out", str(tmp_path / "x.json"), *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_folders_of_libraries_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (fa3.VARIABLE, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "fa3.so").touch()
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    folders = argparse.Namespace(fa3=tmp_path, fa4=tmp_path)
    peer_libraries.find(folders, argparse.ArgumentParser())
    assert os.environ[fa3.VARIABLE] == str(tmp_path / "fa3.so")
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(tmp_path / "cache")
    assert sys.path[0] == str(tmp_path)
    with pytest.raises(ImportError, match=r"fa3\.so cannot be loaded"):
        fa3.load()


# --- Decode and host time -----------------------------------------------------------------------


class Graph:
    def __init__(self, step: Any, calls: int) -> None:
        self.replay = functools.partial(self._run, step, calls)

    @staticmethod
    def _run(step: Any, calls: int) -> None:
        for _ in range(calls):
            step(0)


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(2, 1, 40, 4, 2, 64),
        DecodeCase(2, 3, 40, 4, 2, 64),
        DecodeCase(2, 1, 40, 4, 2, 64, 16),
    ],
    ids=lambda case: str(case.name),
)
def test_a_decode_case(case: DecodeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    peer_samples.install_fa3(monkeypatch)
    monkeypatch.setattr(decode_peers, "_DEVICE", "cpu")
    monkeypatch.setattr(decode, "_ROTATED_BYTES", 1)
    monkeypatch.setattr(decode, "capture", lambda step, sets, calls: Graph(step, calls))
    monkeypatch.setattr(
        decode_peers,
        "within",
        lambda calls, budget_ms, most: {n: [c() or 8.0] * most for n, c in calls.items()},
    )
    found = decode_peers.measure(case, None, True, 2, 1.0)
    sides = {"ours", "few_rows", "scores_first", "parts", "fa3", "read"}
    assert set(found["ms"]) == sides | ({"contiguous"} if case.page_block_size else set())
    assert set(found["ours_over"]) == set(found["ms"]) - {"ours"}
    json.dumps(found)
    assert set(decode_peers.measure(case, None, True, 2, 1.0, ["fa3"])["ms"]) == {"ours", "fa3"}


def test_decode_cases_are_unique() -> None:
    names = [case.name for case in decode_peers.CASES]
    assert len(set(names)) == len(names)


def test_host_times(monkeypatch: pytest.MonkeyPatch) -> None:
    peer_samples.install_fa3(monkeypatch)
    monkeypatch.setattr(host_time, "_DEVICE", "cpu")
    monkeypatch.setattr(host_time, "_CALLS", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = host_time.calls_to_time(with_fa3=True)
    found = host_time.microseconds(calls, 2)
    assert {"dense", "packed", "cache", "sdpa", "fa3", "forward and backward"} <= set(found)
    assert all(0 < one["p10"] <= one["median"] for one in found.values())
