from __future__ import annotations

import dataclasses
import itertools
import json
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic.__main__ import main
from flash_attn_deterministic.errors import ArgumentError
from flash_attn_deterministic.verify.scoreboard import attention, drawing, rows, times, trial

SMALL = rows.Sizes("cpu", ((2, 1),), (32,), 130, (2,))


def run_rows(name: str, seconds: float = 600) -> dict[str, dict[str, Any]]:
    (peer,) = attention.find(f"verify.scoreboard_peers:{name}", "cpu")
    return trial.try_rows(peer, attention.ours().attend, SMALL, seconds, lambda row: None)


def statuses(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: result["status"] for name, result in results.items()}


def test_ours_keeps_every_row() -> None:
    own = attention.ours()
    found = statuses(trial.try_rows(own, own.attend, SMALL, 600, lambda row: None))
    assert found.pop("workspace-256MB") == "not-applicable"
    assert set(found.values()) == {"kept"}
    assert list(found) == [row.id for row in rows.ROWS if row.id != "workspace-256MB"]


def test_rows_that_a_function_cannot_be_asked_for_are_marked() -> None:
    results = run_rows("good")
    for name in ("capacity", "neighbour-9-10"):
        assert results[name]["status"] == "not-applicable"
        assert results[name]["reason"] == "its calls take no lengths of keys"
        assert drawing.cell(results[name]) == "n/a"
    assert results["decode"]["status"] == "kept"
    assert drawing.cell(results["decode"]) == "3/3"


def test_a_broken_row_has_a_counter_example() -> None:
    results = run_rows("split_by_batch")
    assert statuses(results)["run-to-run"] == "kept"
    for name in ("batch", "decode-batch", "tile-of-batch"):
        assert results[name]["status"] == "broken", name
        assert results[name]["equal"] < results[name]["cases"]
    example = results["batch"]["counter_example"]
    assert example.startswith("H2/1 D32 B2 q130 k130, sequence 0: ")
    assert "elements differ, the first at [0, " in example


def test_results_in_the_same_memory_are_compared_as_they_were() -> None:
    assert run_rows("same_memory_with_other_bits")["run-to-run"]["status"] == "broken"


def test_a_row_that_raises_says_why() -> None:
    results = run_rows("raises_for_one_query")
    assert results["decode"]["status"] == "raised"
    assert results["decode"]["reason"].endswith("RuntimeError: no kernel for one query")
    assert results["chunk"]["status"] == "kept"


def test_another_function_is_not_judged() -> None:
    results = run_rows("another_function")
    assert set(statuses(results).values()) == {"raised"}
    assert "differs from ours" in results["batch"]["reason"]


def test_time_ends_a_trial() -> None:
    found = statuses(run_rows("good", seconds=-1))
    for name in ("capacity", "neighbour-9-10", "workspace-256MB"):
        assert found.pop(name) == "not-applicable"
    assert set(found.values()) == {"not-run"}


@pytest.mark.parametrize(
    ("name", "status"),
    [pytest.param("good", "not-run", id="kept"), pytest.param("split_by_batch", "broken", id="no")],
)
def test_time_ends_a_row(name: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is cut off after some cases is not kept, but may be broken."""
    clock = itertools.chain((0.0, 0.0, 0.0), itertools.repeat(100.0))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    monkeypatch.setattr(trial, "ROWS", [row for row in rows.ROWS if row.id == "batch"])
    (peer,) = attention.find(f"verify.scoreboard_peers:{name}", "cpu")
    sizes = dataclasses.replace(SMALL, batches=(2, 3, 4))
    result = trial.try_rows(peer, attention.ours().attend, sizes, 50, lambda row: None)["batch"]
    assert (result["status"], result["cases"]) == (status, 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "nothing", "expected sdpa-flash, .* or MODULE:FUNCTION, .* 'nothing'", id="name"
        ),
        pytest.param("no_such_module:f", "no_such_module cannot be imported", id="module"),
        pytest.param(":f", "expected MODULE:FUNCTION, got ':f'", id="no-module"),
        pytest.param(".x:f", "expected MODULE:FUNCTION, got '.x:f'", id="relative"),
        pytest.param("verify.scoreboard_peers:no", "has no function 'no'", id="function"),
    ],
)
def test_unknown_attention_is_named(name: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        attention.find(name, "cpu")


def test_function_without_a_signature_takes_no_lengths() -> None:
    (peer,) = attention.find("builtins:dict", "cpu")
    assert not peer.lengths


@pytest.mark.parametrize("name", ["fa3", "sdpa-cudnn", "sdpa-efficient"])
def test_what_needs_a_gpu_says_so(name: str) -> None:
    with pytest.raises(attention.UnavailableError, match="CUDA devices only"):
        attention.find(name, "cpu")


@pytest.mark.parametrize("name", ["sdpa-math", "sdpa-flash"])
def test_sdpa_comes_in_two_settings_and_computes_the_function(name: str) -> None:
    peers = attention.find(name, "cpu")
    assert [peer.setting for peer in peers] == ["default", "use_deterministic_algorithms"]
    shape = rows.Shape(4, 2, 32, "cpu")
    inputs = shape.inputs(2, 20, 33)
    expected = attention.ours().attend(*inputs, causal=True)
    for peer in peers:
        with peer.inside():
            assert torch.are_deterministic_algorithms_enabled() == (peer.setting != "default")
            out = peer.attend(*inputs, causal=True)
        torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths_mean_the_same_as_in_ours(causal: bool) -> None:
    inputs = rows.Shape(4, 2, 32, "cpu").inputs(2, 3, 33)
    lengths = torch.tensor([9, 30], dtype=torch.int32)
    (peer, _) = attention.find("sdpa-math", "cpu")
    out = peer.attend(*inputs, causal=causal, seqlens_k=lengths)
    expected = attention.ours().attend(*inputs, causal=causal, seqlens_k=lengths)
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)


def test_the_command_writes_table_picture_and_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CPU", SMALL)
    arguments = ["--attention", "verify.scoreboard_peers:split_by_batch,fa3", "--device", "cpu"]
    assert main(["verify", *arguments, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "scoreboard.json").read_text())
    assert [one["name"] for one in record["attentions"]] == [
        "ours",
        "verify.scoreboard_peers:split_by_batch",
    ]
    assert record["unavailable"] == {"fa3": "it runs on CUDA devices only"}
    assert record["times"] == {}
    assert record["complete"]
    table = (tmp_path / "scoreboard.md").read_text()
    assert table in capsys.readouterr().out
    assert "| batch: who else is in the batch (prefill) | 1/1 | 0/1 |" in table
    picture = xml.etree.ElementTree.parse(tmp_path / "scoreboard.svg")
    words = [element.text for element in picture.iter() if element.text]
    assert "0/1" in words
    assert "ours" in words
    settings = [{**one, "setting": "use_deterministic_algorithms"} for one in record["attentions"]]
    drawn = drawing.svg({**record, "attentions": settings})
    assert ">use_<" in drawn
    assert ">deterministic_<" in drawn
    assert "Quick run" not in table
    assert drawing.markdown({**record, "quick": True}).splitlines()[2].startswith("Quick run,")


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("an illegal access")], ids=["cut", "error"]
)
def test_what_was_found_before_an_end_is_on_disk(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trial.try_rows

    def try_rows(peer: attention.Attention, *arguments: Any) -> Any:
        if peer.name != "ours":
            raise error
        return real(peer, *arguments)

    monkeypatch.setattr(trial, "try_rows", try_rows)
    monkeypatch.setattr(rows, "CPU", SMALL)
    arguments = ["verify", "--attention", "sdpa-math", "--device", "cpu", "--out", str(tmp_path)]
    if isinstance(error, KeyboardInterrupt):
        assert main(arguments) == 130
    else:
        with pytest.raises(RuntimeError, match="illegal access"):
            main(arguments)
    record = json.loads((tmp_path / "scoreboard.json").read_text())
    assert [one["name"] for one in record["attentions"]] == ["ours"]
    assert not record["complete"]
    assert "Incomplete: the run was cut off. CPU" in (tmp_path / "scoreboard.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the calls would run")
def test_times_of_a_gpu_that_is_broken_say_why() -> None:
    own = attention.ours()
    found = dict(times.measure([own, own], repeats=1))
    assert len(found) == 3
    for one in found.values():
        assert one["ms"] == one["ratio"] == [None, None]
        assert all(one["failed"])


def test_the_command_fails_if_ours_breaks_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (broken,) = attention.find("verify.scoreboard_peers:split_by_batch", "cpu")
    monkeypatch.setattr(attention, "ours", lambda: broken)
    monkeypatch.setattr(rows, "CPU", SMALL)
    arguments = ["verify", "--attention", "verify.scoreboard_peers:good", "--device", "cpu"]
    assert main([*arguments, "--out", str(tmp_path)]) == 3


def test_the_command_says_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--attention", "nothing", "--device", "cpu"]) == 2
    assert "error: --attention: expected sdpa-flash" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_seconds_are_checked(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--attention", "sdpa-math", "--device", "cpu", "--seconds", seconds]
    assert main(["verify", *arguments]) == 2
    assert "error: --seconds: expected 0 or more" in capsys.readouterr().err
