from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import time
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flash_attn_deterministic_lab.attentions import ATTENTIONS, find_attention, registry
from flash_attn_deterministic_lab.cli import main
from flash_attn_deterministic_lab.scoreboard import report, rows, trial
from flash_attn_deterministic_lab.shared.document import markdown

SMALL = rows.Sizes("cpu", ((2, 1),), (32,), 130, (2,))


def run_rows(name: str, seconds: float = 600) -> dict[str, dict[str, Any]]:
    peer = find_attention(f"sample_attentions:{name}")
    ours = ATTENTIONS["ours"]
    return {row.id: trial.try_row(row, peer, ours, SMALL, seconds) for row in rows.ROWS}


def statuses(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: result["status"] for name, result in results.items()}


def test_ours_keeps_every_row() -> None:
    own = ATTENTIONS["ours"]
    found = {row: result["status"] for _, row, result in trial.try_all([own], SMALL, 600, 1)}
    assert found.pop("workspace-256MB") == "not-applicable"
    assert set(found.values()) == {"kept"}
    assert list(found) == [row.id for row in rows.ROWS if row.id != "workspace-256MB"]


def test_rows_that_a_function_cannot_be_asked_for_are_marked() -> None:
    results = run_rows("good")
    for name in ("capacity", "neighbour-9-10"):
        assert results[name]["status"] == "not-applicable"
        assert results[name]["reason"] == "its calls take no lengths of keys"
        assert report.cell(results[name]) == "n/a"
    assert results["decode"]["status"] == "kept"
    assert report.cell(results["decode"]) == "3/3"


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


def test_time_ends_a_row_between_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was equal so far is not called kept; one that was not stays broken."""
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    results = run_rows("good", seconds=0.5)
    assert statuses(results)["run-to-run"] == "not-run"
    assert results["run-to-run"]["cases"] == 1
    assert report.cell(results["run-to-run"]) == "1/1*"
    peer = find_attention("sample_attentions:split_by_batch")
    row = next(row for row in rows.ROWS if row.id == "batch")
    clock = itertools.count()
    sizes = dataclasses.replace(SMALL, batches=(2, 3))
    found = trial.try_row(row, peer, ATTENTIONS["ours"], sizes, 0.5)
    assert (found["status"], found["cases"]) == ("broken", 1)
    assert found["counter_example"]


def test_processes_find_what_one_finds() -> None:
    names = ("ours", "sample_attentions:split_by_batch", "sample_attentions:raises_for_one_query")
    attentions = [find_attention(name) for name in names]
    one, two = (
        {(name, row): result for name, row, result in trial.try_all(attentions, SMALL, 600, jobs)}
        for jobs in (1, 2)
    )
    assert one == two
    assert len(one) == len(names) * len(rows.ROWS)


def test_a_call_that_ends_its_process_leaves_rows_that_did_not_run() -> None:
    attentions = [find_attention(name) for name in ("ours", "sample_attentions:ends_the_process")]
    found = list(trial.try_all(attentions, SMALL, 600, 2))
    assert len(found) == 2 * len(rows.ROWS)
    broken = [result for name, _, result in found if name != "ours"]
    assert {result["status"] for result in broken} == {"not-run"}
    assert broken[0]["reason"].startswith("BrokenProcessPool: ")


def test_the_command_writes_table_picture_and_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CPU", SMALL)
    arguments = ["--attention", "sample_attentions:split_by_batch,fa3", "--device", "cpu"]
    assert main(["scoreboard", *arguments, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "scoreboard.json").read_text())
    assert [one["name"] for one in record["attentions"]] == [
        "ours",
        "sample_attentions:split_by_batch",
    ]
    assert record["unavailable"]["fa3"] == "it does not run on cpu"
    assert record["times"] == []
    assert record["complete"] is True
    assert {"date", "command", "wheel", "sources", "versions"} <= set(record)
    table = (tmp_path / "scoreboard.md").read_text()
    assert table in capsys.readouterr().out
    assert "| batch: who else is in the batch (prefill) | 1/1 | 0/1 |" in table
    picture = xml.etree.ElementTree.parse(tmp_path / "scoreboard.svg")
    words = "".join(element.text or "" for element in picture.iter())
    assert "0/1" in words
    assert "flash-attn-" in words
    assert "Quick run" not in table
    assert "Incomplete" not in table
    quick = markdown(report.document({**record, "quick": True}), tmp_path)
    assert quick.splitlines()[2].startswith("Quick run,")


def test_the_command_fails_if_ours_breaks_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = dataclasses.replace(find_attention("sample_attentions:split_by_batch"), name="ours")
    monkeypatch.setattr(registry, "OURS", broken)
    monkeypatch.setattr(rows, "CPU", SMALL)
    arguments = ["scoreboard", "--attention", "sample_attentions:good", "--device", "cpu"]
    assert main([*arguments, "--out", str(tmp_path)]) == 3


def test_the_command_says_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scoreboard", "--attention", "nothing", "--device", "cpu"]) == 2
    assert "error: --attention: expected ours" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_seconds_are_checked(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--attention", "sdpa-math", "--device", "cpu", "--seconds", seconds]
    assert main(["scoreboard", *arguments]) == 2
    assert "error: --seconds: expected 0 or more" in capsys.readouterr().err


def test_an_interrupted_run_leaves_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trial.try_all

    def stopped(*arguments: Any) -> Iterator[Any]:
        yield from itertools.islice(real(*arguments), len(rows.ROWS) + 1)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(trial, "try_all", stopped)
    monkeypatch.setattr(rows, "CPU", SMALL)
    arguments = ["--attention", "sample_attentions:good", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["scoreboard", *arguments]) == 130
    record = json.loads((tmp_path / "scoreboard.json").read_text())
    assert record["complete"] is False
    ours, other = (statuses(one["rows"]) for one in record["attentions"])
    assert set(ours.values()) == {"kept", "not-applicable"}
    assert other.pop("run-to-run") == "kept"
    assert set(other.values()) == {"not-run"}
    table = (tmp_path / "scoreboard.md").read_text()
    assert "Incomplete: the run was interrupted." in table
    assert "the run ended before it" in table
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["scoreboard.json", "scoreboard.md", "scoreboard.svg"]
