from __future__ import annotations

import copy
import errno
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flash_attn_deterministic.build_info import build_info
from flash_attn_deterministic.verify import environment, outcome, report, tasks
from flash_attn_deterministic.verify.contract import golden
from flash_attn_deterministic.verify.contract.golden.record import Entry, Golden
from flash_attn_deterministic.verify.report import document
from flash_attn_deterministic.verify.run import Run
from flash_attn_deterministic.verify.shared.files import ReportError, finite, write_files

from verify.samples import cuda_run, read


@pytest.fixture(autouse=True)
def release_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reports are those of a wheel with every kernel; the one under test may be small."""
    monkeypatch.setattr(tasks, "holds", lambda device: lambda config: True)
    monkeypatch.setattr(
        environment, "architectures", functools.partial(_release, environment.architectures)
    )
    monkeypatch.setattr(environment, "missing_kernels", lambda info: [])


def _release(real: Callable[..., Any], names: Iterable[str], *args: Any, **kwargs: Any) -> Any:
    return real(("80-real", "90-real", "80-virtual"), *args, **kwargs)


def written(run: Run) -> dict[str, Any]:
    run.write()
    return read(run.out)


def status_of(record: dict[str, Any], section: str) -> str:
    return str(next(s["status"] for s in record["sections"] if s["id"] == section))


def test_a_passing_report(tmp_path: Path) -> None:
    record = written(cuda_run(tmp_path))
    assert (record["status"], record["complete"]) == ("passed", True)
    assert record["architectures"]["ran"] == ["sm_90"]
    assert record["digest"] == report.canonical_digest(record)
    assert record["digest"] != report.canonical_digest({**record, "status": "passed!"})
    assert record["build"]["missing_kernels"] == []
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(report.NAMES)
    for name in report.NAMES[1:]:
        assert "Not in the wheel" not in (tmp_path / name).read_text()


def test_a_failed_row_is_shown_in_full(tmp_path: Path) -> None:
    run = cuda_run(tmp_path, failed=3)
    record = written(run)
    assert (record["status"], status_of(record, "contract")) == ("failed", "failed")
    assert record["sections"][1]["reason"] == "batch: 3 of 120 cases"
    for name in report.NAMES[1:]:
        text = (tmp_path / name).read_text()
        for fact in ("0x3f80", "0x3f81", "12345", "d128-bf16-causal-q1", "3/20"):
            assert fact in text, name


def test_a_crash_is_shown(tmp_path: Path) -> None:
    run = cuda_run(tmp_path)
    run.results[tasks.Task("contract", "schedule")] = {
        "status": outcome.ERROR,
        "data": {"stderr": "an illegal memory access <was> encountered"},
        "reason": "the process was killed by SIGABRT",
        "seconds": 1.0,
    }
    record = written(run)
    assert record["status"] == "failed"
    page = (tmp_path / "verification.html").read_text()
    assert "killed by SIGABRT" in page
    assert "access &lt;was&gt; encountered" in page


def test_every_failed_section_says_why(tmp_path: Path) -> None:
    run = cuda_run(tmp_path, ratio=2.5)
    for key in run.results:
        if key.section in tasks.TIMED:
            run.results[key]["status"] = outcome.FAILED
    sections = {s["id"]: s["reason"] for s in run.sections() if s["status"] == "failed"}
    assert sections["accuracy"] == "24 of 24 errors are above the limit"
    assert sections["decode"] == "not met: a limit"
    assert None not in sections.values()
    run.write()
    assert "✗ 2.50" in (tmp_path / "verification.md").read_text()


def test_an_unfinished_run_is_incomplete(tmp_path: Path) -> None:
    run = cuda_run(tmp_path)
    run.complete = False
    for key in list(run.results)[5:]:
        del run.results[key]
    record = written(run)
    assert (record["status"], record["complete"]) == ("incomplete", False)
    assert status_of(record, "decode") == "not-run"
    for name in report.NAMES[1:]:
        assert "ncomplete" in (tmp_path / name).read_text()
    run.results.clear()  # nothing has run yet
    written(run)


def test_a_report_keeps_the_worst_errors_and_those_that_failed(tmp_path: Path) -> None:
    run = cuda_run(tmp_path)
    rows = run.results[tasks.Task("accuracy", "64 bf16")]["data"]["rows"]
    softcap = {**rows[0], "feature": "softcap", "name": "forward out softcap"}
    rows += [{**softcap, "ratio": 0.4}, {**softcap, "ratio": 1.2, "passed": False}]
    rows += [{**softcap, "ratio": 1.1, "passed": False}]
    data = next(s["data"] for s in run.sections() if s["id"] == "accuracy")
    assert (data["count"], data["failed"], len(data["rows"])) == (27, 2, 25)
    assert data["by_feature"] == {"causal": 0.55, "softcap": 1.2}
    assert {row["ratio"] for row in data["rows"] if not row["passed"]} == {1.1, 1.2}


def numbers_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where the measured numbers of a section's data are: containers, each with a key."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, float):
            yield value, key
        elif isinstance(item, (dict, list)):
            yield from numbers_of(item)


@pytest.mark.parametrize(
    "section", [name for name in outcome.SECTIONS if name not in ("environment", "contract")]
)
def test_any_number_may_be_missing(section: str, tmp_path: Path) -> None:
    run = cuda_run(tmp_path)
    for (own, _), result in run.results.items():
        if own == section:
            result |= {"status": outcome.FAILED, "data": copy.deepcopy(result["data"])}
            for container, key in numbers_of(result["data"]):
                container[key] = float("nan")
    written(run)
    assert run.unrendered == ""
    for name in report.NAMES[1:]:
        text = (tmp_path / name).read_text()
        assert "None" not in text
        assert "not finite" in text


def test_kernels_that_the_wheel_lacks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_dims = {("fwd", "bf16"): (192, 256, 576), ("fwd", "fp16"): (576,), ("bwd", "fp16"): (96,)}
    missing = [(*kind, head_dim) for kind, own in head_dims.items() for head_dim in own]
    monkeypatch.setattr(
        environment,
        "missing_kernels",
        lambda info: [
            dict(zip(("direction", "dtype", "head_dim"), m, strict=True)) for m in missing
        ],
    )
    run = cuda_run(tmp_path)
    record = written(run)
    assert record["status"] == "passed"
    words = (
        "Not in the wheel, and so not tested: forward bf16, head_dim up to: 192, 256; "
        "576 alone; forward fp16, head_dim 576 alone; backward fp16, head_dim up to: 96."
    )
    for name in report.NAMES[1:]:
        assert words in (tmp_path / name).read_text()


@pytest.mark.parametrize("failed", [0, 2])
def test_the_page_needs_nothing_else(tmp_path: Path, failed: int) -> None:
    cuda_run(tmp_path, failed=failed).write()
    text = (tmp_path / "verification.html").read_text()
    for tag in {*re.findall(r"<([a-z0-9]+)", text)} - {"meta", "li"}:
        assert len(re.findall(rf"<{tag}\b", text)) == text.count(f"</{tag}>"), tag
    references = set(re.findall(r'(?:src|href)="([^"]*)"', text))
    assert references == {f"#{section}" for section in outcome.SECTIONS}
    assert "url(" not in text
    assert "width=device-width" in text


def test_accuracy_shows_torchs_errors_where_it_has_the_call(tmp_path: Path) -> None:
    (found,) = (s for s in document(cuda_run(tmp_path).record()).sections if s.key == "accuracy")
    assert found.header[-3:] == ("ours", "torch", "of what passes")
    assert {(row[2], row[-2] != "") for row in found.rows if row[0] != "all"} == {
        ("out", True), ("dq", False), ("dk", False), ("dv", False),
    }  # fmt: skip


def test_the_report_says_what_golden_hashes_rest_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worst = {"case": "d64-bf16-softcap", "tensor": "out", "ratio": 0.75}
    evidence = {
        "families": {"agreeing": 300, "differing": []}, "accuracy": {"calls": 450, "worst": worst}
    }  # fmt: skip
    entry = Entry({"gpu": "NVIDIA H200"}, evidence, {"a": "1"})
    monkeypatch.setattr(golden.record, "read", lambda version: Golden(version, {}, {"9.0": entry}))
    record = written(cuda_run(tmp_path))
    assert record["build"]["golden"] == {"origin": entry.origin, "evidence": evidence}
    page = (tmp_path / "verification.md").read_text()
    for words in (
        "origin gpu | NVIDIA H200",
        "evidence families agreeing | 300",
        "evidence accuracy calls | 450",
        "evidence accuracy worst ratio | 0.75",
    ):
        assert f"| build golden {words} |" in page


def test_markdown_tables_are_tables(tmp_path: Path) -> None:
    cuda_run(tmp_path, failed=1).write()
    text = (tmp_path / "verification.md").read_text()
    for block in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1, block


def test_times_are_shown_beside_the_last_release(tmp_path: Path) -> None:
    (found,) = (s for s in document(cuda_run(tmp_path).record()).sections if s.key == "decode")
    first, second = found.rows
    assert first[3:] == ["1.110", "1.050", "1.134", "", "1.67"]
    assert second[3:6] == ["1.110", "", "none"]


def test_a_report_has_the_provenance_of_every_result(tmp_path: Path) -> None:
    record = written(cuda_run(tmp_path))
    found = record["provenance"]
    assert found["hardware"]["gpu"] == "NVIDIA H200"
    assert found["versions"]["driver"] == "580.159.04"
    assert found["wheel"]["sha256"] == "ab" * 32
    assert found["sources"] == record["build"]["sources"] == dict(build_info().sources)
    assert "/" not in found["command"]


def test_finite() -> None:
    values = {"a": [1.0, float("nan"), (float("-inf"),)], "b": "inf"}
    assert finite(values) == {"a": [1.0, None, [None]], "b": "inf"}


# --- Writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "caught"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ReportError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["full-disk", "interrupted"],
)
def test_what_was_there_is_left(
    raised: BaseException,
    caught: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_files(tmp_path, {"a": "old", "b": "old"})
    synced = []

    def failing(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise raised

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(caught, match=str(raised).partition("] ")[2] or None):
        write_files(tmp_path, {"a": "new", "b": "new"})
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "old", "b": "old"}
