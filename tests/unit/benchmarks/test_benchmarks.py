"""The commands that measure and write: tables, evidence, and upstream's kernels as a fixture."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import rank_functions as ranks
from flash_attn_build.files import ROOT
from rank_pool import pool_of

from tests.benchmarks import evidence, tables, vllm
from tests.benchmarks.evidence import STEPS, Step, install, run_all, words_of
from tests.benchmarks.tables import TableError

REAL = tables.read_results(ROOT / "docs" / "results")


def page(name: str, body: str = "") -> str:
    return f"before\n\n<!-- table:{name} -->\n{body}<!-- /table -->\n\nafter\n"


@pytest.mark.parametrize("name", sorted(tables.TABLES))
def test_every_table_is_filled_once_and_for_all(name: str) -> None:
    once = tables.fill(page(name, "old\n"), REAL, "README.md")
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert "old" not in once.splitlines()
    assert tables.fill(once, REAL, "README.md") == once
    assert tables.NOT_MEASURED in tables.fill(page(name), {}, "README.md")


def test_means_are_those_of_the_result() -> None:
    record = {
        "hardware": {"gpu": "H200"}, "versions": {"torch": "2.11"}, "date": "2026-11-20",
        "titles": {"ours": "ours", "fa4": "FlashAttention-4"}, "left_out": ["x"],
        "cases": [{"disturbed": ["fa4"]}, {}],
        "summary": {"all": {"fa4": {"mean": 1.234, "worst": 1.5, "cases": 2},
                            "best": {"mean": 2, "worst": 2, "cases": 1}}},
    }  # fmt: skip
    text = tables.fill(page("decode"), {"decode": record}, "x")
    assert "|  | the best | FlashAttention-4 |" in text
    assert "| all | 2.00 (one shape) | 1.23 (1.50 of 2) |" in text
    assert "H200, torch 2.11, 2026-11-20. " in text
    assert "Not measured, for want of time: 1" in text
    assert "Left out: 1 times whose median" in text


@pytest.mark.parametrize(("text", "results", "message"), [
    (page("nothing"), {}, "no table 'nothing'; there are accuracy"),
    ("<!-- table:summary -->\n", {}, "is not closed"),
    (page("host"), {"host": {"us": 1}}, "host.json is not of the expected form"),
])  # fmt: skip
def test_a_table_that_cannot_be_made_is_named(
    text: str, results: dict[str, Any], message: str
) -> None:
    with pytest.raises(TableError, match=message):
        tables.fill(text, results, "README.md")


def test_check_finds_a_stale_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "README.md").write_text(page("build", "old\n"))
    assert tables.main(["--check", "--root", str(tmp_path)]) == 1
    assert "README.md: stale" in capsys.readouterr().out
    assert tables.main(["--root", str(tmp_path)]) == 0
    assert tables.main(["--check", "--root", str(tmp_path)]) == 0


NAMES = ("fa3", "fa4", "flashmla", "baseline")
GIVEN = {"wheel": "/w.whl", "out": "/out", "sha256": "0", **dict.fromkeys(NAMES)}


def test_an_option_without_a_value_is_left_out() -> None:
    command = '-m x --fa3 {fa3} --wheel {wheel} -m "not slow"'
    assert words_of(command, GIVEN) == ["-m", "x", "--wheel", "/w.whl", "-m", "not slow"]
    assert words_of(command, {**GIVEN, "fa3": "/f"})[2:4] == ["--fa3", "/f"]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: str(step.name))
def test_every_step_names_something_that_exists(step: Step) -> None:
    words = words_of(step.command, GIVEN)
    modules = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m"]
    for word in (*words, *(f"{module.replace('.', '/')}.py" for module in modules)):
        if word.startswith(("tests/", "examples/")) and not (ROOT / word).exists():
            assert (ROOT / word.removesuffix(".py") / "__main__.py").exists(), word


def _steps(*commands: str) -> list[Step]:
    return [Step(f"s{number}", "tests", 2, command, (f"s{number}.json",))
            for number, command in enumerate(commands)]  # fmt: skip


def test_steps_fail_alone_and_leave_no_process(tmp_path: Path) -> None:
    sleeper = "import subprocess,sys;p=subprocess.Popen(['sleep','99'],start_new_session=True);"
    hangs = f'-c "{sleeper}print(p.pid, flush=True);p.wait()"'
    steps = _steps("-c \"print('3 passed, 1 skipped')\"", "-c 1/0", hangs)
    record: dict[str, Any] = {"sources": {"cpp": "a"}, "steps": []}
    given = {**GIVEN, "out": str(tmp_path)}
    begin = time.monotonic()
    run_all(steps, given, 1, record, 60)
    assert time.monotonic() - begin < 20
    assert [one["status"] for one in record["steps"]] == [0, 1, None]
    assert record["steps"][0]["counts"] == {"passed": 3, "skipped": 1}
    assert json.loads((tmp_path / evidence.RECORD).read_text()) == record
    pid = int((tmp_path / "logs" / "s2.log").read_text())
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or ") Z " in stat.read_text()  # killed, if not yet waited for
    # Again: one that may end too late is left out, and the others keep their places.
    run_all(steps, given, 1, record, 0)
    assert len(record["steps"]) == 3


def test_a_step_whose_module_is_missing_is_left_out(tmp_path: Path) -> None:
    steps = [Step("s", "tests", 50, "-c 1", needs="no_such_module"), Step("t", "tests", 50, "-c 1")]
    record: dict[str, Any] = {"steps": []}
    run_all(steps, {**GIVEN, "out": str(tmp_path)}, 1, record, 100)
    assert [one["name"] for one in record["steps"]] == ["t"]


def test_what_needs_all_gpus_keeps_its_time(tmp_path: Path) -> None:
    steps = [Step("alone", "tests", 50, "-c 1"), Step("all", "together", 60, "-c 1")]
    record: dict[str, Any] = {"steps": []}
    run_all(steps, {**GIVEN, "out": str(tmp_path)}, 2, record, 100)
    assert [one["name"] for one in record["steps"]] == ["all"]


def test_ctrl_c_kills_the_step_and_records_it(tmp_path: Path) -> None:
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    step = Step("s", "tests", 60, '-c "import time;time.sleep(60)"')
    outcome = evidence.run_step(step, {**GIVEN, "out": str(tmp_path)}, None, stop)
    assert outcome["status"] is None
    assert outcome["seconds"] < 20


@pytest.mark.parametrize("sources", [{"cpp": "b"}, {}, None], ids=["others", "part", "none"])
def test_results_of_other_kernels_or_of_none_are_not_installed(
    sources: dict[str, str] | None, tmp_path: Path
) -> None:
    out, results = tmp_path / "out", tmp_path / "results"
    out.mkdir()
    results.mkdir()
    steps = [{"name": "host", "status": 0}, {"name": "forward", "status": None}]
    (out / evidence.RECORD).write_text(json.dumps({"sources": {"cpp": "a"}, "steps": steps}))
    (out / "host.json").write_text(json.dumps({"sources": {"cpp": "a"}}))
    (out / "forward.json").write_text("{}")
    assert install(out, results, {"cpp": "a"}) == ["host.json"]
    assert sorted(path.name for path in results.iterdir()) == [evidence.RECORD, "host.json"]
    (out / "host.json").write_text(json.dumps({"sources": sources}))
    with pytest.raises(ValueError, match=r"host\.json: of other kernels, or of none: cpp differ"):
        install(out, results, {"cpp": "a"})


def test_times_over_ranks_are_taken_over_gloo() -> None:
    with pool_of(2) as pool:
        for case in pool.run(ranks.benchmarked, 128):
            assert case["same_bits"] is True
            other = {1: 2, 2: 1}[case["model"]["degree"]]
            assert set(case["seconds"]) == {"planned", "one", f"heads over {other}"}
            assert case["efficiency"].keys() == {"forward", "both"}
            assert case["refused"] == {}


class ServerEngine:
    """Computes one prompt a step, and a token for each request that has begun."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.left: dict[str, int] = {}

    def add_request(self, name: str, prompt: Any, new_tokens: int) -> None:
        assert len(prompt["prompt_token_ids"]) == 7
        self.waiting.append(name)
        self.left[name] = new_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[str]:
        slow = bool(self.waiting)
        time.sleep(0.02 if slow else 0.001)
        self.waiting = self.waiting[1:]
        running = [name for name in self.left if name not in self.waiting]
        self.left = {n: left - (n in running) for n, left in self.left.items()}
        self.left = {n: left for n, left in self.left.items() if left}
        return running


def test_steps_of_a_server_count_while_all_its_requests_run() -> None:
    found = vllm.measure(ServerEngine(), 12, 3, 7)
    assert found["prefill"] >= 60
    assert 1 <= found["decode"] < 20


def test_a_worker_that_fails_or_hangs_is_left_out() -> None:
    workers = {"fails": vllm.Worker(ranks.answer, 1), "hangs": vllm.Worker(ranks.answer)}
    failed: dict[str, str] = {}
    end = time.monotonic() + 300
    assert vllm.next_answer(workers, "fails", end, failed) == 1
    workers["fails"].ask("why")
    assert vllm.next_answer(workers, "fails", end, failed) is None
    assert vllm.next_answer(workers, "hangs", 0, failed) is None
    assert vllm.next_answer(workers, "hangs", end, failed) is None
    assert failed == {"fails": "ValueError: why", "hangs": "no answer in time"}
    assert not workers


def test_times_of_a_server_stand_beside_each_other() -> None:
    case = {"head_dim": 128, "requests": 4, "tokens": 32000}
    check = {"check": "decode, prefill", "requests": 16, "equal": 15}
    record = {
        "hardware": {"gpu": "H100"}, "date": "2026-11-25", "layers": 16,
        "versions": {"torch": "2.11", "vllm": "0.26.0"},
        "checks": {"norm repaired": {"checks": [check]}, "vLLM's norm": {"status": None}},
        "failed": {"vLLM's norm": "no answer in time"},
        "cases": [{**case, "ours": {"prefill": 9, "decode": 3}, "FLASH_ATTN": {"prefill": 10,
                  "decode": 6}}, {**case, "ours": None, "FLASH_ATTN": None}],
    }  # fmt: skip
    text = tables.fill(page("vllm"), {"vllm": record}, "x")
    assert "| D128, 4 x 32,000 | 3.00 | 6.00 | 0.50 | 9.00 | 10.00 | 0.90 |" in text
    assert "| D128, 4 x 32,000 | - | - | - | - | - | - |" in text
    assert "norm repaired: decode, prefill 15/16. vLLM's norm: no answer in time." in text


def test_python_mirrors_the_c_structs() -> None:
    """ctypes takes field names and order on trust."""
    from flash_attn_deterministic_lab.attentions import baseline as api

    header = (ROOT / "cpp" / "baseline" / "api.h").read_text()
    assert f"#define FA2_BASELINE_VERSION {api.VERSION}\n" in header
    for struct, name in ((api._Tensor, "fa2_tensor"), (api._Problem, "fa2_problem")):
        match = re.search(rf"typedef struct {{([^}}]*)}} {name};", header)
        assert match is not None
        fields = re.findall(r"(\w+)\s*[,;]", match[1])
        assert fields == [field[0] for field in struct._fields_]
