"""Golden hashes: inputs that never change, and a row that fails where a hash is another."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic import flash_attn_func
from flash_attn_deterministic.build_info import build_info
from flash_attn_deterministic.verify import outcome, tasks
from flash_attn_deterministic.verify.contract import (
    CHECKS,
    Attention,
    Outcome,
    Size,
    run_check,
    size_of,
)
from flash_attn_deterministic.verify.contract import golden as row
from flash_attn_deterministic.verify.contract.call import Call
from flash_attn_deterministic.verify.contract.check import Case
from flash_attn_deterministic.verify.contract.golden import __main__ as command
from flash_attn_deterministic.verify.contract.golden import calls, inputs, record
from flash_attn_deterministic.verify.contract.golden.calls import GoldenCall
from flash_attn_deterministic.verify.contract.golden.record import (
    Entry,
    Evidence,
    Golden,
    GoldenError,
    hashes_of,
)

from verify.samples import forced, other_bits

ROOT = Path(__file__).parents[3]
OURS = Attention.installed()
(CHECK,) = (check for check in CHECKS if check.id == "golden")
ON_GPU = size_of("cuda", quick=False)
VERSION = build_info().bits_version
COMMITTED = record.read(VERSION)


def drawn(case: Case, attention: Attention = OURS) -> tuple[GoldenCall, Call, str]:
    golden = calls.CALLS[case["call"]]
    return golden, *golden.inputs((case.head_dim, case.dtype), attention, "cpu")


# --- inputs ---


def test_inputs_are_those_that_were_hashed() -> None:
    """The committed hashes were made once; no torch, machine or Python may change the inputs."""
    some = dataclasses.replace(ON_GPU, configs=ON_GPU.configs[::4], latent=ON_GPU.latent[:1])
    found = {case.name: drawn(case)[2] for case in row.golden_cases(some)}
    assert found.items() <= COMMITTED.inputs.items()


def test_a_hash_is_that_of_what_a_view_shows() -> None:
    assert inputs.digest([torch.zeros(4, 2)[:, 0]]) == inputs.digest([torch.zeros(4)])


# --- the row ---


@pytest.fixture
def small() -> Size:
    return dataclasses.replace(size_of("cpu", quick=True), configs=((32, "bf16"),))


def evidence_of(agreeing: int = 1, ratio: float = 0.5) -> dict[str, Any]:
    worst = {"case": "a", "tensor": "out", "ratio": ratio}
    families = {"agreeing": agreeing, "differing": []}
    return {"families": families, "accuracy": {"calls": 1, "worst": worst}}


@pytest.fixture
def known(small: Size, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Golden:
    """Puts a file with hashes of a few calls on this machine in the place of the package's."""
    names = ("causal-at-a-boundary", "backward-causal-mha", "packed", "append")
    some = tuple(call for call in calls.CALLS if call.name in names)
    assert len(some) == len(names)
    monkeypatch.setattr(row, "CALLS", some)
    monkeypatch.setattr(calls, "CALLS", some)
    hashes = {}
    for case in row.golden_cases(small):
        golden, call, _ = drawn(case)
        hashes[case.name] = hashes_of(golden.run(call)[1])
    entry = Entry({"gpu": "none"}, evidence_of(), hashes)
    found = Golden(VERSION, COMMITTED.inputs).added({}, "cpu", entry)
    monkeypatch.setattr(record, "PATH", tmp_path / "golden.json")
    record.write(found, record.PATH)
    return found


def rewritten(golden: Golden, **changes: Any) -> None:
    """Puts a file with another entry in the place of the package's."""
    entry = dataclasses.replace(golden.entries["cpu"], **changes)
    record.write(dataclasses.replace(golden, entries={"cpu": entry}), record.PATH)


def run(size: Size, **functions: Callable[..., Any]) -> Outcome:
    return run_check(CHECK, size, dataclasses.replace(OURS, **functions))


def what(found: Outcome) -> str:
    assert found.counter_example is not None
    return str(found.counter_example["what"])


def test_the_same_results_pass(small: Size, known: Golden) -> None:
    assert CHECK.unavailable(small) == ""
    found = run(small)
    assert found.counter_example is None
    assert (found.cases, found.failed) == (4, 0)


def test_another_file_fails(small: Size, known: Golden) -> None:
    hashes = dict(known.entries["cpu"].hashes)
    name = "d32-bf16-backward-causal-mha"
    dq, dk, dv = hashes[name].split()
    changed = dk[:-1] + ("0" if dk[-1] != "0" else "1")
    rewritten(known, hashes={**hashes, name: f"{dq} {changed} {dv}"})
    found = run(small)
    assert found.failed == 1
    assert what(found) == f"dk: the hash of its bits is {dk}, expected {changed}"

    del hashes["d32-bf16-append"]
    rewritten(known, hashes=hashes)
    found = run(small)
    assert found.failed == 1
    assert what(found) == "d32-bf16-append: there is no golden hash of this case"

    rewritten(known, evidence={})
    found = run(small)
    assert found.failed == found.cases
    assert "not accepted: there is no evidence" in what(found)


def test_one_changed_bit_fails(small: Size, known: Golden) -> None:
    def changed(*args: Any, **kwargs: Any) -> Any:
        result = flash_attn_func(*args, **kwargs)
        if isinstance(result, tuple):  # the forward's call
            result[0].view(torch.int16)[0, 3, 0, 5] ^= 1
        return result

    found = run(small, dense=changed)
    assert found.failed == 1
    assert what(found).startswith("out: the hash of its bits is ")


def test_other_inputs_fail_as_such(
    small: Size, known: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "draw", lambda name, *rest: inputs.draw(f"other {name}", *rest))
    found = run(small)
    assert found.failed == found.cases
    assert "inputs are not those that were hashed" in what(found)


@pytest.mark.parametrize(
    ("capability", "version"), [("7.5", VERSION), ("9.0", VERSION + 1)], ids=["gpu", "bits"]
)
def test_without_hashes_the_row_says_so_and_decides_nothing(
    capability: str, version: int, small: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row, "compute_capability", lambda device: "9.0")
    assert CHECK.unavailable(small) == ""
    monkeypatch.setattr(row, "compute_capability", lambda device: capability)
    other = dataclasses.replace(build_info(), bits_version=version)
    monkeypatch.setattr(row, "build_info", lambda: other)
    expected = f"bits_version {version} on compute capability {capability}"
    reason = CHECK.unavailable(small)
    assert reason == f"no golden hashes are known for {expected}"
    answer = tasks.execute(
        tasks.Task("contract", "golden"), tasks.Options("cpu", True), lambda *_: None
    )
    assert answer["status"] == outcome.NOT_APPLICABLE
    assert answer["reason"] == reason
    assert outcome.combined([outcome.PASSED, answer["status"]]) == outcome.PASSED


# --- evidence ---


def without_softcap(*args: Any, **kwargs: Any) -> Any:
    return flash_attn_func(*args, **{**kwargs, "softcap": 0.0})


def examined(*names: str, **functions: Callable[..., Any]) -> Entry:
    found = Evidence({"agreeing": 0, "differing": []})
    attention = dataclasses.replace(OURS, plan=forced, **functions)
    size = dataclasses.replace(size_of("cpu", quick=True), configs=((40, "fp16"),))
    for case in row.golden_cases(size):
        if calls.CALLS[case["call"]].name in names:
            golden, call, _ = drawn(case, attention)
            parts, results = golden.run(call)
            found.add(case.name, golden, call, parts, hashes_of(results))
    return entry_of(evidence=dataclasses.asdict(found))


def test_evidence_of_each_form_of_call() -> None:
    names = ("causal-mqa", "packed-everything", "decode-paged", "append", "backward-packed")
    found = examined(*names, "latent-paged")
    assert found.evidence["families"] == {"agreeing": len(names) + 1, "differing": []}
    assert found.evidence["accuracy"]["calls"] == len(names) + 1
    assert 0 < found.evidence["accuracy"]["worst"]["ratio"] < 1
    assert Golden(VERSION).problem(found) == ""


def test_evidence_sees_families_that_differ() -> None:
    found = examined("causal-mqa", dense=other_bits("sm90"))
    words = "sm80 and sm90 differ in 1 calls, the first d40-fp16-causal-mqa"
    assert Golden(VERSION).problem(found) == words


def test_evidence_sees_results_far_from_float64() -> None:
    words = Golden(VERSION).problem(examined("softcap", dense=without_softcap))
    assert "of d40-fp16-softcap is" in words
    assert "as far from float64" in words


@pytest.mark.parametrize(("evidence", "words"), [
    pytest.param({}, "no evidence", id="none"),
    pytest.param(evidence_of(agreeing=0), "no call ran in both", id="one-family-ran"),
    pytest.param(evidence_of(ratio=1.1), "float64", id="inaccurate"),
    pytest.param(evidence_of(ratio=float("nan")), "float64", id="no-number"),
    pytest.param({**evidence_of(), "families": None}, "one family", id="one-family"),
])  # fmt: skip
def test_hashes_need_evidence(evidence: dict[str, Any], words: str) -> None:
    with pytest.raises(GoldenError, match=words):
        Golden(2).added({}, "9.0", entry_of(evidence=evidence), force=True)


def test_a_gpu_of_one_family_follows_one_of_two() -> None:
    ampere = entry_of(evidence={**evidence_of(), "families": None})
    golden = Golden(2).added({}, "9.0", entry_of()).added({}, "8.0", ampere)
    assert golden.entries["8.0"] == ampere


# --- the file ---


def test_what_is_committed_is_whole() -> None:
    names = {case.name for case in row.golden_cases(ON_GPU)}
    assert COMMITTED.inputs.keys() == names
    assert "9.0" in COMMITTED.entries
    for entry in COMMITTED.entries.values():
        assert entry.hashes.keys() == names
        assert {"gpu", "torch", "cuda_toolkit", "sources"} <= entry.origin.keys()
        assert COMMITTED.problem(entry) == ""
    versions = json.loads((ROOT / "cpp" / "instances.json").read_text(encoding="utf-8"))
    assert versions["bits_version"] == VERSION


def entry_of(evidence: dict[str, Any] | None = None, **hashes: str) -> Entry:
    names = {f"d64-bf16-{name}": text for name, text in hashes.items()}
    return Entry({"gpu": "one"}, evidence_of() if evidence is None else evidence, names)


def test_hashes_are_not_written_over_unless_forced() -> None:
    before = {"d64-bf16-a": "0"}
    golden = Golden(2, before).added({}, "9.0", entry_of(a="1", b="2"))
    other = entry_of(a="1", b="3")
    with pytest.raises(GoldenError, match=r"bits_version 2, 9\.0: 1 of 2 .* the first d64-bf16-b"):
        golden.added({}, "9.0", other)
    with pytest.raises(GoldenError, match="inputs"):
        golden.added({"d64-bf16-a": "1"}, "9.0", entry_of())
    assert golden.added({}, "9.0", other, force=True).entries == {"9.0": other}


def test_hashes_are_added_to_those_before_whose_origin_stays(tmp_path: Path) -> None:
    again = dataclasses.replace(entry_of(a="1"), origin={"gpu": "two"})
    golden = Golden(2).added({}, "9.0", entry_of(a="1")).added({}, "9.0", again)
    assert golden.entries == {"9.0": entry_of(a="1")}
    golden = golden.added({"d64-bf16-a": "0"}, "9.0", entry_of(b="2"))
    golden = golden.added({}, "8.0", entry_of(a="8"))
    assert golden.entries["9.0"].hashes == entry_of(a="1", b="2").hashes
    path = tmp_path / "golden.json"
    record.write(golden, path)
    assert record.read(2, path) == golden
    assert record.read(3, path) == Golden(3, golden.inputs)
    assert record.read(2, tmp_path / "none.json") == Golden(2)


@pytest.mark.parametrize("text", ["", "[]", '{"bits_version": 2, "inputs": {}}'])
def test_a_file_of_something_else_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(GoldenError, match=r"golden\.json: "):
        record.read(2, path)


def test_the_command_needs_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "golden.json"
    assert command.main(["--out", str(path)]) == 1
    assert "no CUDA device" in capsys.readouterr().err
    assert not path.exists()
