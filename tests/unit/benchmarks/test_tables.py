"""Tables of README.md and docs/; that the committed ones are up to date is for `nox -s lint`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flash_attn_build.files import ROOT

from tests.benchmarks import tables
from tests.benchmarks.tables import TableError

REAL = tables.read_results(ROOT / "docs" / "results")


def page(name: str, body: str = "") -> str:
    return f"before\n\n<!-- table:{name} -->\n{body}<!-- /table -->\n\nafter\n"


def rows(name: str, results: Any) -> list[str]:
    return tables.fill(page(name, "old\n"), results, "README.md").splitlines()


@pytest.mark.parametrize("name", sorted(tables.TABLES))
def test_every_table_is_filled_from_results_that_are_there(name: str) -> None:
    needed = tables.TABLES[name][0]
    once = tables.fill(page(name, "old\n"), REAL, "README.md")
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert "old" not in once.splitlines()
    assert (tables.NOT_MEASURED in once) == (needed not in REAL)
    assert tables.fill(once, REAL, "README.md") == once
    assert tables.NOT_MEASURED in rows(name, {})


def spread(median: float) -> dict[str, float]:
    return {"median": median, "p10": median * 0.99, "p90": median * 1.01}


def case(name: str, dtype: str = "bf16", **more: Any) -> dict[str, Any]:
    ms = {"ours": spread(2.0), "sdpa": spread(2.5)}
    given = {"name": name, "dtype": dtype, "head_dim": 64, "tflops": 400.4, "ms": ms}
    return {**given, "ratio_to_sdpa": 0.8, **more}


ENVIRONMENT = {
    "date": "2026-11-20", "versions": {"torch": "2.11.0"}, "hardware": {"gpu": "H200"}
}  # fmt: skip
FA2 = {"ours": spread(2.0), "fa2": spread(1.6), "sdpa": spread(2.5)}
DETERMINISTIC = {"ours": spread(2.0), "fa2": spread(1.6), "fa2_deterministic": spread(4.0)}
SAMPLES: dict[str, Any] = {
    "forward": {
        **ENVIRONMENT,
        "cases": [
            case("B1"),
            case("B2", ms=FA2, ratio_to_fa2=1.25),
            case("B3", "fp16"),
            case("B4", feature="softcap", ratio_to_fa2=1.5),
        ],
    },
    "backward": {
        **ENVIRONMENT,
        "cases": [
            case("B1", scratch_bytes={"ours": 1_500_000, "sdpa": 0}),
            case(
                "B2",
                ms=DETERMINISTIC,
                scratch_bytes={"ours": 1_500_000, "fa2": 2_000_000, "fa2_deterministic": 9e6},
                ratio_to_fa2=1.25,
                ratio_to_fa2_deterministic=0.5,
            ),
        ],
    },
    "varlen": {**ENVIRONMENT, "cases": [case("B64", ms=FA2, ratio_to_fa2=1.25)]},
    "startup": {**ENVIRONMENT, "times": {"import_ms": spread(12.3)}},
    "peers_forward": {
        **ENVIRONMENT,
        "summary": {"packed": {"best": {"mean": 0.9, "worst": 0.95, "cases": 2}}},
        "cases": [{"name": "B2", "tflops": {"ours": 500.4}, "ours_over": {}}],
        "left_out": ["B3"],
        "failed": [],
    },
}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("forward", "| B1 | 2 (1.98 to 2.02) | - | 2.5 (2.48 to 2.52) | - | 0.80 | 400 |"),
        (
            "forward",
            "| B2 | 2 (1.98 to 2.02) | 1.6 (1.58 to 1.62) | 2.5 (2.48 to 2.52) | 1.25 | 0.80 | "
            "400 |",
        ),
        ("forward-all", "| B3 | 2 (1.98 to 2.02) | - | 2.5 (2.48 to 2.52) | - | 0.80 | 400 |"),
        (
            "backward",
            "| B2 | 2 (1.98 to 2.02) | - | 1.6 (1.58 to 1.62) | 4 (3.96 to 4.04) | - | 1.25 | 0.50 "
            "| 1.5 | 2.0 | 9.0 | 400 |",
        ),
        ("by-head-dim", "| head dim 64 | 1.25 | 1.25 | 1.25 | 1.25 | 0.50 | 0.50 |"),
        ("by-head-dim", "| softcap | 1.50 | 1.50 | - | - | - | - |"),
        ("startup", "| import, on top of torch | 12.3 (12.2 to 12.4) |"),
        ("peers-forward", "| packed | 0.90 (0.95) |"),
        ("peers-forward-all", "| B2 | 500 | - |"),
        ("summary", "| prefill | FA2 | 1.25 | 1.25 | none |"),
        ("summary", "| prefill: window, softcap, ALiBi, dropout | FA2 | 1.50 | 1.50 | none |"),
        ("summary", "| prefill, packed sequences | FA2 | 1.25 | 1.25 | none |"),
        ("summary", "| backward | FA2, atomics | 1.25 | 1.25 | at most 0.75 x |"),
        ("summary", "| backward | FA2, deterministic | 0.50 | 0.50 | at most 0.17 x |"),
    ],
)
def test_rows_of_what_was_measured_in_part(name: str, line: str) -> None:
    assert line in rows(name, SAMPLES)


def test_what_is_left_out() -> None:
    assert not [line for line in rows("forward", SAMPLES) if "B3" in line]  # fp16
    alone = rows("summary", {"forward": SAMPLES["forward"]})
    assert not [line for line in alone if "backward" in line]
    assert any("1 cases, named in the JSON" in line for line in rows("peers-forward", SAMPLES))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (page("nothing"), r"README.md: no table 'nothing'; there are accuracy"),
        ("<!-- table:forward -->\n", "not closed"),
        ("<!-- /table -->\n", "not closed"),
        ("<!-- table:forward -->\n" + page("build"), "not closed"),
        (page("startup"), r"docs/results/startup.json is not of the expected form"),
    ],
    ids=["unknown", "no end", "no start", "nested", "other form"],
)
def test_a_page_that_cannot_be_filled(text: str, expected: str) -> None:
    with pytest.raises(TableError, match=expected):
        tables.fill(text, {"startup": {"times": {}}}, "README.md")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*options: str) -> int:
        return tables.main([*options, "--root", str(tmp_path)])

    (tmp_path / "docs" / "results").mkdir(parents=True)
    result = tmp_path / "docs" / "results" / "startup.json"
    result.write_text(json.dumps(SAMPLES["startup"]))
    readme, other = tmp_path / "README.md", tmp_path / "docs" / "other.md"
    readme.write_text(page("startup"))
    assert run("--check") == 1
    assert "README.md: stale" in capsys.readouterr().out
    # One bad page, or a result that cannot be read, leaves the others alone.
    other.write_text(page("nothing"))
    assert run() == TableError.exit_code
    other.unlink()
    result.write_text("{")
    assert run() == TableError.exit_code
    assert "startup.json: not JSON" in capsys.readouterr().err
    assert readme.read_text() == page("startup")
    result.write_text(json.dumps(SAMPLES["startup"]))
    assert run() == 0
    assert "12.3" in readme.read_text()
    assert run("--check") == 0
