from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import tables
from tests.benchmarks.tables import TableError

ENVIRONMENT = {
    "date": "2026-11-20",
    "versions": {"torch": "2.11.0"},
    "hardware": {"gpu": "H200"},
}


def spread(median: float) -> dict[str, float]:
    return {"median": median, "p10": median * 0.99, "p90": median * 1.01}


def case(name: str, dtype: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": dtype,
        "head_dim": 64,
        "tflops": 400.4,
        "ms": {"ours": spread(2.0), "sdpa": spread(2.5)},
        "ratio_to_sdpa": 0.8,
        **more,
    }


def unit(output: str, cpu: float) -> dict[str, Any]:
    return {"output": output, "cpu_seconds": cpu, "wall_seconds": cpu, "peak_rss_bytes": 2.5e9}


def mean(mean: float, worst: float) -> dict[str, Any]:
    return {"mean": mean, "worst": worst, "worst_case": "B1 L1", "cases": 2}


PEERS: dict[str, Any] = {
    **ENVIRONMENT,
    "summary": {
        "dense": {"fa4": mean(1.2, 1.5), "best": mean(1.25, 1.5)},
        "packed": {"best": mean(0.9, 0.95)},
    },
    "cases": [
        {
            "name": "B1 L1",
            "tflops": {"ours": 500.4, "fa4": 600.6},
            "ours_over": {"fa4": 1.2, "best": 1.2},
        },
        {"name": "B2 L2", "tflops": {"ours": 500.4}, "ours_over": {}},
    ],
    "left_out": ["B3 L3"],
    "failed": [],
}

RESULTS: dict[str, Any] = {
    "peers_forward": PEERS,
    "peers_backward": {**PEERS, "left_out": []},
    "decode_peers": {
        **ENVIRONMENT,
        "split_size": 2048,
        "cases": [
            {
                "name": "q1 B1 L1",
                "group": "one query",
                "plan": {"path": "few-rows"},
                "ms": {"ours": spread(0.02), "fa3": spread(0.025), "read": spread(0.016)},
                "ours_over": {"fa3": 0.8, "read": 1.25},
            },
            {
                "name": "q5 B1 L1",
                "group": "several queries",
                "plan": {"path": "few-rows"},
                "ms": {"ours": spread(0.02)},
                "ours_over": {},
            },
        ],
        "means": {"fa3": {"one query": {"mean": 0.8, "worst": 0.8}}},
        "left_out": [],
        "failed": [],
    },
    "host_time": {**ENVIRONMENT, "us": {"dense": {"median": 20.04, "p10": 19.0}}},
    "forward": {
        **ENVIRONMENT,
        "cases": [
            case("B1 L1 bf16", "bf16"),
            case(
                "B2 L2 bf16",
                "bf16",
                ms={"ours": spread(2.0), "fa2": spread(1.6), "sdpa": spread(2.5)},
                ratio_to_fa2=1.25,
            ),
            case("B3 L3 fp16", "fp16"),
            case("B4 L4 bf16", "bf16", feature="softcap", ratio_to_fa2=1.5),
        ],
    },
    "backward": {
        **ENVIRONMENT,
        "cases": [
            case(
                "B1 L1 bf16",
                "bf16",
                ms={"ours": spread(2.0), "ours_atomics": spread(1.8), "sdpa": spread(2.5)},
                scratch_bytes={"ours": 1_500_000, "ours_atomics": 1_500_000, "sdpa": 0},
            ),
            case(
                "B2 L1..5 bf16",
                "bf16",
                ms={
                    "ours": spread(2.0),
                    "ours_atomics": spread(1.8),
                    "fa2": spread(1.6),
                    "fa2_deterministic": spread(4.0),
                },
                scratch_bytes={"ours": 1_500_000, "fa2": 2_000_000, "fa2_deterministic": 9e6},
                ratio_to_fa2=1.25,
                ratio_to_fa2_deterministic=0.5,
            ),
        ],
    },
    "varlen": {
        **ENVIRONMENT,
        "cases": [
            case(
                "B64 L1..5 bf16",
                "bf16",
                ms={"ours": spread(2.0), "fa2": spread(1.6)},
                ratio_to_fa2=1.25,
            )
        ],
    },
    "accuracy": {
        **ENVIRONMENT,
        "rows": [
            {
                "head_dim": d,
                "dtype": "bf16",
                "causal": causal,
                "worst_ratio": {"largest": 1.5, "rmse": 1.001, "lse": 1.0},
            }
            for d, causal in ((128, False), (64, False), (64, True))
        ],
    },
    "verification": {
        "environment": {"gpu": "GPU", "torch": "2.11.0+cu130"},
        "started": "2026-11-22T19:54:38Z",
        "sections": [
            {"id": "contract", "data": {}},
            {
                "id": "accuracy",
                "data": {
                    "rows": [
                        {
                            "head_dim": 64,
                            "dtype": "bf16",
                            "direction": direction,
                            "ratio": ratio,
                            "ours": {"rmse": rmse},
                            "against": {"rmse": 1e-3},
                        }
                        for direction, ratio, rmse in (
                            ("forward", 1.25, 1e-4),
                            ("forward", 1.0, 1e-3),
                            ("backward", 1.75, 3e-3),
                        )
                    ]
                },
            },
        ],
    },
    "startup": {**ENVIRONMENT, "times": {"import_ms": spread(12.3)}},
    "build": {
        "cuda_toolkit": "13.0.88",
        "architectures": ["80-real"],
        "wheel": {"bytes": 7_000_000},
        "totals": {"translation_units": 2, "cpu_seconds": 90.0, "peak_rss_bytes": 3.1e9},
        "translation_units": [unit("a/fwd_bf16_64.cu.o", 50.0), unit("cpp/ops/fwd.cpp.o", 4.0)],
    },
    "matrix": {
        "result": 1,
        "sessions": [{"args": {"toolkit": "13.0", "torch": "2.10"}, "result": "success"}],
    },
    "build_cost_upstream": {
        "architectures": ["80-real"],
        "translation_units": [
            {"name": "fwd_hdim64_bf16", "cpu_seconds": 100.0},
            {"name": "fwd_split_hdim64_bf16_causal", "cpu_seconds": 200.0},
        ],
    },
}


def page(name: str, body: str = "") -> str:
    return f"before\n\n<!-- table:{name} -->\n{body}<!-- /table -->\n\nafter\n"


def filled(name: str) -> str:
    return tables.fill(page(name, "old\n"), RESULTS, "README.md")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    for name, record in RESULTS.items():
        path = folder / f"{name}.json"
        if name == "verification":  # lies in a folder of its own
            path = folder / name / path.name
            path.parent.mkdir()
        path.write_text(json.dumps(record))
    (tmp_path / "README.md").write_text(page("startup") + page("accuracy"))
    (tmp_path / "docs" / "cost.md").write_text(page("build-units"))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("forward", "| B1 L1 bf16 | 2 (1.98 to 2.02) | - | 2.5 (2.48 to 2.52) | - | 0.80 | 400 |"),
        (
            "forward-all",
            "| B3 L3 fp16 | 2 (1.98 to 2.02) | - | 2.5 (2.48 to 2.52) | - | 0.80 | 400 |",
        ),
        ("accuracy-all", "| 128 | 1.50 / 1.00 | - | - | - |"),
        ("accuracy", "| 64 | 1.25 | 1.75 | - | - |"),
        ("accuracy", "| 32 | - | - | - | - |"),
        (
            "accuracy",
            "GPU, torch 2.11.0+cu130, 2026-11-22. Our largest error over that of torch's flash "
            "attention, the worst of all shapes; backward: of dq, dk and dv. Root mean square, the "
            "worst: 1.00 forward, 3.00 backward.",
        ),
        (
            "backward",
            "| B1 L1 bf16 | 2 (1.98 to 2.02) | 1.8 (1.78 to 1.82) | - | - | 2.5 (2.48 to 2.52) | - "
            "| - | 1.5 | - | - | 400 |",
        ),
        (
            "backward",
            "| B2 L1..5 bf16 | 2 (1.98 to 2.02) | 1.8 (1.78 to 1.82) | 1.6 (1.58 to 1.62) "
            "| 4 (3.96 to 4.04) | - | 1.25 | 0.50 | 1.5 | 2.0 | 9.0 | 400 |",
        ),
        ("varlen", "| B64 L1..5 bf16 | 2 (1.98 to 2.02) | 1.6 (1.58 to 1.62) | 1.25 | 400 |"),
        ("by-head-dim", "| head dim 64 | 1.25 | 1.25 | 1.25 | 1.25 | 0.50 | 0.50 |"),
        ("by-head-dim", "| softcap | 1.50 | 1.50 | - | - | - | - |"),
        ("startup", "| import, on top of torch | 12.3 (12.2 to 12.4) |"),
        ("build", "| CPU time, minutes | 1.5 |"),
        ("build", "| CPU time of 1 of upstream's files, over ours | 2.0 |"),
        ("build-cost", "| fwd_split_hdim64_bf16_causal | 200 | fwd_bf16_64 | 50 | 4.0 |"),
        ("build-cost", "| sum without split | 100 |  | 50 | 2.0 |"),
        ("matrix", "| 13.0 | success |"),
        ("peers-forward", "|  | the best | FA4 |"),
        ("peers-forward", "| dense | 1.25 (1.50) | 1.20 (1.50) |"),
        ("peers-backward", "| packed | 0.90 (0.95) | - |"),
        (
            "peers-forward",
            "H200, torch 2.11.0, 2026-11-20. Our time over theirs, geometric mean (worst) of the "
            "cases that they can run. Not measured, for want of time: 1 cases, named in the JSON.",
        ),
        ("peers-forward-all", "| B1 L1 | 500 | 601 | 1.20 |"),
        ("peers-backward-all", "| B2 L2 | 500 | - | - |"),
        ("decode-peers", "| q1 B1 L1 | few-rows | 20.0 | 25.0 | 16.0 | 0.80 | 1.25 |"),
        ("decode-peers", "| q5 B1 L1 | few-rows | 20.0 | - | - | - | - |"),
        ("decode-peers", "| one query: mean (worst) |  |  |  |  | 0.80 (0.80) | - |"),
        ("host-time", "| dense | 20.0 | 19.0 |"),
        ("build-units", "| fwd_bf16_64 | 50.0 | 50.0 | 2.50 |"),
    ],
)
def test_rows(name: str, line: str) -> None:
    lines = filled(name).splitlines()
    assert line in lines
    assert "old" not in lines


def test_ratio_to_the_baseline_is_shown_where_there_is_one() -> None:
    (row,) = (line for line in filled("forward").splitlines() if line.startswith("| B2"))
    assert "| 1.6 (1.58 to 1.62) |" in row
    assert "| 1.25 | 0.80 |" in row


def test_short_table_has_no_fp16() -> None:
    assert "fp16" not in filled("forward")


@pytest.mark.parametrize("name", sorted(tables.TABLES))
def test_filling_twice_changes_nothing(name: str) -> None:
    once = filled(name)
    assert tables.fill(once, RESULTS, "README.md") == once
    assert once.startswith("before\n")
    assert once.endswith("after\n")


@pytest.mark.parametrize("name", sorted(tables.TABLES))
def test_without_results(name: str) -> None:
    assert tables.NOT_MEASURED in tables.fill(page(name), {}, "README.md").splitlines()


def test_unknown_table() -> None:
    with pytest.raises(TableError, match=r"README.md: no table 'nothing'; there are accuracy"):
        tables.fill(page("nothing"), RESULTS, "README.md")


@pytest.mark.parametrize(
    "text",
    ["<!-- table:forward -->\n", "<!-- /table -->\n", "<!-- table:forward -->\n" + page("build")],
    ids=["no-end", "no-start", "nested"],
)
def test_region_without_a_partner(text: str) -> None:
    with pytest.raises(TableError, match="not closed"):
        tables.fill(text, RESULTS, "README.md")


def test_results_of_another_form() -> None:
    with pytest.raises(TableError, match=r"docs/results/startup.json is not of the expected form"):
        tables.fill(page("startup"), {"startup": {"times": {}}}, "README.md")


def test_check_reports_and_writes_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (tree / "README.md").read_text()
    assert tables.main(["--check", "--root", str(tree)]) == 1
    assert "README.md: stale" in capsys.readouterr().out
    assert (tree / "README.md").read_text() == before


def test_update_then_check(tree: Path) -> None:
    assert tables.main(["--root", str(tree)]) == 0
    assert "12.3" in (tree / "README.md").read_text()
    assert "fwd_bf16_64" in (tree / "docs" / "cost.md").read_text()
    assert tables.main(["--check", "--root", str(tree)]) == 0


def test_broken_json(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "docs" / "results" / "forward.json").write_text("{")
    assert tables.main(["--root", str(tree)]) == TableError.exit_code
    assert "forward.json: not JSON" in capsys.readouterr().err


def test_one_bad_page_leaves_the_others_alone(tree: Path) -> None:
    (tree / "docs" / "cost.md").write_text(page("nothing"))
    before = (tree / "README.md").read_text()
    assert tables.main(["--root", str(tree)]) == TableError.exit_code
    assert (tree / "README.md").read_text() == before


def test_summary_has_a_line_for_each_use() -> None:
    page = tables.fill("<!-- table:summary -->\n<!-- /table -->\n", RESULTS, "page")
    assert "| prefill | FA2 | 1.25 | 1.25 | none |" in page
    assert "| prefill: window, softcap, ALiBi, dropout | FA2 | 1.50 | 1.50 | none |" in page
    assert "| prefill, packed sequences | FA2 | 1.25 | 1.25 | none |" in page
    assert "| backward | FA2, atomics | 1.25 | 1.25 | at most 0.75 x |" in page
    assert "| backward | FA2, deterministic | 0.50 | 0.50 | at most 0.17 x |" in page


def test_summary_of_the_forward_alone() -> None:
    page = tables.fill(
        "<!-- table:summary -->\n<!-- /table -->\n", {"forward": RESULTS["forward"]}, "page"
    )
    assert "backward" not in page
    assert "| prefill | FA2 | 1.25 | 1.25 | none |" in page
