from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.differences import FILE, Difference, load
from tests.conformance.drawing import count, draw

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = """\
import os

import flash_attn
import pytest

def twice(value, factor=2):
    return factor * value

@pytest.mark.parametrize("dtype", [1, 2])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 2), (3, 4), (5, 6)])
@pytest.mark.parametrize("d", [32, 64])
def test_first(seqlen_q, seqlen_k, d, dtype):
    assert flash_attn.__version__.endswith("deterministic")
    if d == 32 and os.environ.get("HELPER") == "passed over":
        assert twice(d, factor=3) == d
    if d == 64:
        raise RuntimeError(f"no such kernel {seqlen_k}")

@pytest.mark.parametrize("n", range(1000000))
def test_second(n):
    if n % 2:
        pytest.skip("odd")
"""


def sample_function() -> Any:
    @pytest.mark.parametrize("dtype", ["torch.float16", "torch.bfloat16"])
    # In one string, as upstream writes it.
    @pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 2), (3, 4), (5, 6)])  # noqa: PT006
    @pytest.mark.parametrize("d", list(range(100)))
    def test_something(dtype: str, seqlen_q: int, seqlen_k: int, d: int) -> None:
        pass

    return test_something


def drawn(number: int, seed: int) -> Any:
    function: Any = sample_function()
    draw(function, number, seed)
    (mark,) = function.pytestmark
    return mark


def test_cases_are_counted() -> None:
    assert count(sample_function()) == 600
    assert count(print) == 1


def test_drawn_cases_are_cases_of_the_test() -> None:
    mark = drawn(50, seed=1)
    names, cases = mark.args
    assert sorted(names) == ["d", "dtype", "seqlen_k", "seqlen_q"]
    assert len(cases) == len(set(cases)) == len(set(mark.kwargs["ids"])) == 50
    for case in cases:
        values = dict(zip(names, case, strict=True))
        assert (values["seqlen_q"], values["seqlen_k"]) in [(1, 2), (3, 4), (5, 6)]
        assert values["d"] in range(100)
    assert "dtype=bfloat16" in " ".join(mark.kwargs["ids"])


def test_the_seed_decides_on_the_cases() -> None:
    assert drawn(50, seed=1).args == drawn(50, seed=1).args
    assert drawn(50, seed=1).args != drawn(50, seed=2).args


def test_all_cases_are_there_where_there_are_fewer() -> None:
    assert len(set(drawn(601, seed=0).args[1])) == 600


def test_a_difference_covers_its_own_failures_only() -> None:
    difference = Difference("test_a", {"causal": "True", "dtype": "float16"}, "rotary", "because")
    parameters = {"causal": True, "dtype": "torch.float16", "d": 64}
    assert difference.covers("test_a", parameters, "ValueError: rotary_cos: expected")
    assert not difference.covers("test_b", parameters, "rotary")
    assert not difference.covers("test_a", {**parameters, "causal": False}, "rotary")
    assert not difference.covers("test_a", {"causal": True}, "rotary")
    assert not difference.covers("test_a", parameters, "assert 1 < 2")


def test_listed_differences_have_reasons(tmp_path: Path) -> None:
    assert load(FILE).helpers
    bad = tmp_path / "differences.json"
    failure = {"test": "test_a", "when": {}, "message": "", "reason": " "}
    for listed, name in (
        ({"failures": [failure], "helpers": []}, "test_a"),
        ({"failures": [], "helpers": [{"name": "normalize", "reason": ""}]}, "normalize"),
    ):
        bad.write_text(json.dumps(listed))
        with pytest.raises(ValueError, match=f"{name}: expected a reason"):
            load(bad)


def command(*arguments: str) -> tuple[int, str]:
    """Exit status and all that is printed."""
    words = [sys.executable, "-m", "tests.conformance", *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def run(
    tmp_path: Path, *arguments: str, sample_text: str = SAMPLE
) -> tuple[int, dict[str, Any], str]:
    sample = tmp_path / "test_sample.py"
    sample.write_text(sample_text)
    out = tmp_path / "out.json"
    status, text = command("--file", str(sample), "--json", str(out), *arguments)
    return status, json.loads(out.read_text()) if out.exists() else {}, text


def test_a_run_fails_on_what_is_not_listed(tmp_path: Path) -> None:
    status, record, text = run(tmp_path, "--seed", "3", "--cases-per-test", "12")
    assert status == 1, text
    assert record["possible"] == 12 + 10**6
    assert record["by_test"]["test_first"] == {"passed": 6, "failed": 6}
    assert sum(record["by_test"]["test_second"].values()) == 12
    assert "RuntimeError: no such kernel" in record["failed"][0]["message"]
    assert "d=64" in record["failed"][0]["case"]
    assert "seed 3: 24 of 1000012 cases" in text


def test_a_run_passes_if_every_failure_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tmp_path / "differences.json"
    entry = {"test": "test_first", "when": {"d": "64"}, "message": "kernel", "reason": "no 64"}
    helper = {"name": "twice", "reason": "ours is doubled"}
    listed.write_text(json.dumps({"failures": [entry], "helpers": [helper]}))
    monkeypatch.setenv("HELPER", "passed over")
    status, record, text = run(tmp_path, "--cases-per-test", "12", "--differences", str(listed))
    assert status == 0, text
    assert record["listed"] == {"no 64": 6}
    assert record["helpers"] == {"twice": "ours is doubled"}
    assert not record["failed"]


def test_a_run_ends_when_its_time_is_up(tmp_path: Path) -> None:
    status, record, text = run(tmp_path, "--seconds", "0", "--cases-per-test", "500")
    assert sum(record["outcomes"].values()) == 1, text
    assert status in (0, 1)


def test_without_a_gpu_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    status, text = command()
    assert status == 2
    assert "need a CUDA device" in text


def test_what_was_run_before_an_end_is_written(tmp_path: Path) -> None:
    sample = (
        "import os, signal\n\ndef test_one(): pass\n\n"
        "def test_two(): os.kill(os.getpid(), signal.SIGTERM)\n\ndef test_three(): pass\n"
    )
    status, record, text = run(tmp_path, sample_text=sample)
    assert status == 130, text
    assert not record["complete"]
    assert sum(record["outcomes"].values()) < 3  # in a mixed order
