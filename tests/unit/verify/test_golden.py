"""Golden hashes: inputs that never change, and a row that fails where a hash is another."""

from __future__ import annotations

import dataclasses
import json
import os
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
from flash_attn_deterministic.verify.contract.golden import __main__ as command
from flash_attn_deterministic.verify.contract.golden import calls, inputs, record
from flash_attn_deterministic.verify.contract.golden.evidence import Evidence, problem
from flash_attn_deterministic.verify.contract.golden.record import Entry, Golden, GoldenError

ROOT = Path(__file__).parents[3]
(CHECK,) = (check for check in CHECKS if check.id == "golden")
ON_GPU = size_of("cuda", quick=False)


# --- inputs ---


def test_inputs_are_those_that_were_hashed() -> None:
    """The committed hashes were made once; no torch, machine or Python may change the inputs."""
    found = {
        case.name: row.draw_case(case, Attention.installed(), "cpu")[2]
        for case in row.golden_cases(ON_GPU)
    }
    assert found == record.read().inputs


def test_numbers_are_drawn_as_they_should_be() -> None:
    drawn = inputs.draw("q", (500, 7, 300), torch.float32)  # more than the pool holds
    assert drawn.shape == (500, 7, 300)
    assert abs(float(drawn.mean())) < 0.01
    assert float(drawn.std()) == pytest.approx(2 / 3**0.5, rel=0.01)
    assert float(drawn.abs().max()) < 4
    assert torch.equal(drawn * 2.0**15, (drawn * 2.0**15).round())  # exact, nothing was rounded
    assert not torch.equal(drawn, inputs.draw("k", (500, 7, 300), torch.float32))
    assert torch.equal(drawn[:2], inputs.draw("q", (2, 7, 300), torch.float32))


def test_neighbours_do_not_follow_from_each_other() -> None:
    drawn = inputs.draw("v", (100_000,), torch.float32)
    for distance in (1, 2, 32, 64, 128, 256):
        both = torch.stack([drawn[:-distance], drawn[distance:]])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.02


def test_a_hash_sees_bits_shapes_and_dtypes() -> None:
    one = torch.zeros(4)
    others = (-one, one.view(2, 2), one.half(), torch.zeros(5), torch.tensor([0, 0, 0, 1e-45]))
    assert len({inputs.digest([one]), *(inputs.digest([other]) for other in others)}) == 6
    strided = torch.zeros(4, 2)[:, 0]
    assert inputs.digest([strided]) == inputs.digest([one])


def test_calls_cover_what_decides_bits() -> None:
    assert len({call.name for call in calls.CALLS}) == len(calls.CALLS)
    features = {call.feature for call in calls.CALLS}
    assert {"full", "causal", "window", "softcap", "alibi", "everything"} <= features
    assert {call.split_size for call in calls.CALLS} >= {0, 64, 2048}
    assert {call.page_size for call in calls.CALLS} >= {0, 16, 48}
    assert {call.heads[0] // call.heads[1] for call in calls.CALLS} >= {1, 2, 4}
    for call in calls.CALLS:
        if call.split_size and "packed" not in call.name:
            assert max(seqlen_k for _, seqlen_k in call.lengths) > call.split_size


# --- the row ---


@pytest.fixture
def small() -> Size:
    return dataclasses.replace(size_of("cpu", quick=True), configs=((32, "bf16"),))


def hashed(size: Size) -> Entry:
    """The hashes of this machine's reference, which stands in for a GPU."""
    hashes = {}
    for case in row.golden_cases(size):
        call, drawn, _ = row.draw_case(case, Attention.installed(), "cpu")
        hashes[case.name] = row.hashes_of(call.results(drawn))
    return Entry(build_info().bits_version, "cpu", {"gpu": "none"}, hashes, evidence_of())


@pytest.fixture
def known(small: Size, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Golden:
    """Puts a file with hashes of a few calls on this machine in the place of the package's."""
    names = ("causal-at-a-boundary", "backward-causal-mha", "packed", "append")
    some = tuple(call for call in calls.CALLS if call.name in names)
    assert len(some) == len(names)
    monkeypatch.setattr(row, "CALLS", some)
    golden = Golden(record.read().inputs).added({}, hashed(small))
    monkeypatch.setattr(record, "PATH", tmp_path / "golden.json")
    record.write(golden, record.PATH)
    return golden


def run(size: Size, **functions: Callable[..., Any]) -> Outcome:
    attention = dataclasses.replace(Attention.installed(), **functions)
    return run_check(CHECK, size, attention)


def what(found: Outcome) -> str:
    assert found.counter_example is not None
    return str(found.counter_example["what"])


def test_the_same_results_pass(small: Size, known: Golden) -> None:
    assert CHECK.unavailable(small) == ""
    found = run(small)
    assert found.counter_example is None
    assert (found.cases, found.failed) == (4, 0)


def test_a_changed_hash_fails_and_names_the_tensor(small: Size, known: Golden) -> None:
    (entry,) = known.entries
    name = "d32-bf16-backward-causal-mha"
    dq, dk, dv = entry.hashes[name].split()
    changed = dk[:-1] + ("0" if dk[-1] != "0" else "1")
    other = dataclasses.replace(entry, hashes={**entry.hashes, name: f"{dq} {changed} {dv}"})
    record.write(dataclasses.replace(known, entries=(other,)), record.PATH)
    found = run(small)
    assert found.failed == 1
    assert what(found) == f"dk: the hash of its bits is {dk}, expected {changed}"


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


def test_a_case_without_a_hash_fails(small: Size, known: Golden) -> None:
    (entry,) = known.entries
    hashes = {name: text for name, text in entry.hashes.items() if not name.endswith("append")}
    fewer = dataclasses.replace(entry, hashes=hashes)
    record.write(dataclasses.replace(known, entries=(fewer,)), record.PATH)
    found = run(small)
    assert found.failed == 1
    assert what(found) == "d32-bf16-append: there is no golden hash of this case"


@pytest.mark.parametrize("missing", ["capability", "bits_version"])
def test_without_hashes_the_row_says_so_and_decides_nothing(
    missing: str, small: Size, known: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "capability":
        monkeypatch.setattr(row, "compute_capability", lambda device: "7.5")
        expected = f"bits_version {build_info().bits_version} on compute capability 7.5"
    else:
        version = build_info().bits_version + 1
        other = dataclasses.replace(build_info(), bits_version=version)
        monkeypatch.setattr(row, "build_info", lambda: other)
        expected = f"bits_version {version} on compute capability cpu"
    reason = CHECK.unavailable(small)
    assert reason == f"no golden hashes are known for {expected}"
    answer = tasks.execute("contract", "golden", tasks.Options("cpu", True), lambda *_: None)
    assert answer["status"] == outcome.NOT_APPLICABLE
    assert answer["reason"] == reason
    assert outcome.combined([outcome.PASSED, answer["status"]]) == outcome.PASSED


# --- evidence ---


def forced_family(*args: Any, **kwargs: Any) -> str:
    return os.environ["FLASH_ATTENTION_TEST_DEVICE"].removeprefix("family=")


def other_bits_on_hopper(*args: Any, **kwargs: Any) -> Any:
    result = flash_attn_func(*args, **kwargs)
    if os.environ.get("FLASH_ATTENTION_TEST_DEVICE") == "family=sm90":
        result[0].view(torch.int16)[0, 3, 0, 5] ^= 1
    return result


def without_softcap(*args: Any, **kwargs: Any) -> Any:
    return flash_attn_func(*args, **{**kwargs, "softcap": 0.0})


def examined(*names: str, **functions: Callable[..., Any]) -> dict[str, Any]:
    found = Evidence(two_families=True)
    attention = dataclasses.replace(Attention.installed(), family=forced_family, **functions)
    size = dataclasses.replace(size_of("cpu", quick=True), configs=((40, "fp16"),))
    for case in row.golden_cases(size):
        call, drawn, _ = row.draw_case(case, attention, "cpu")
        if call.name in names:
            results = call.results(drawn)
            found.add(case.name, call, drawn, results, row.hashes_of(results))
    return found.record()


def test_evidence_of_each_form_of_call() -> None:
    names = ("causal-mqa", "packed-everything", "decode-paged", "append", "backward-packed")
    found = examined(*names)
    assert found["families"] == {"agreeing": len(names), "differing": []}
    assert found["accuracy"]["calls"] == len(names)
    assert 0 < found["accuracy"]["worst"]["ratio"] < 1
    assert problem(2, found, others=False) == ""


def test_evidence_sees_families_that_differ() -> None:
    found = examined("causal-mqa", dense=other_bits_on_hopper)
    assert problem(2, found, others=False) == (
        "sm80 and sm90 differ in 1 calls, the first d40-fp16-causal-mqa"
    )


def test_evidence_sees_results_far_from_float64() -> None:
    words = problem(2, examined("softcap", dense=without_softcap), others=False)
    assert "of d40-fp16-softcap is" in words
    assert "as far from float64" in words


def evidence_of(agreeing: int = 1, ratio: float = 0.5) -> dict[str, Any]:
    worst = {"case": "a", "tensor": "out", "ratio": ratio}
    families = {"agreeing": agreeing, "differing": []}
    return {"families": families, "accuracy": {"calls": 1, "worst": worst}}


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        pytest.param(None, "no evidence", id="none"),
        pytest.param(evidence_of(agreeing=0), "no call ran in both", id="one-family-ran"),
        pytest.param(evidence_of(ratio=1.1), "float64", id="inaccurate"),
        pytest.param(evidence_of(ratio=float("nan")), "float64", id="no-number"),
        pytest.param({**evidence_of(), "families": None}, "one family", id="one-family"),
    ],
)
def test_hashes_of_a_new_version_need_evidence(evidence: dict[str, Any] | None, words: str) -> None:
    later = dataclasses.replace(entry_of(a="9"), bits_version=2, evidence=evidence)
    with pytest.raises(GoldenError, match=words):
        Golden().added({}, later, force=True)


def test_a_gpu_of_one_family_follows_one_of_two() -> None:
    later = dataclasses.replace(entry_of(a="9"), bits_version=2, evidence=evidence_of())
    ampere = dataclasses.replace(
        later, compute_capability="8.0", evidence={**evidence_of(), "families": None}
    )
    golden = Golden().added({}, later).added({}, ampere)
    assert golden.find(2, "8.0") == ampere


def test_the_row_refuses_hashes_without_evidence(small: Size, known: Golden) -> None:
    alone = dataclasses.replace(known.entries[0], evidence=None)
    record.write(dataclasses.replace(known, entries=(alone,)), record.PATH)
    found = run(small)
    assert found.failed == found.cases
    assert "not accepted: there is no evidence" in what(found)


# --- the file ---


def test_what_is_committed_is_whole() -> None:
    golden = record.read()
    names = {case.name for case in row.golden_cases(ON_GPU)}
    assert golden.inputs.keys() == names
    for entry in golden.entries:
        assert entry.hashes.keys() == names
        assert {"gpu", "torch", "cuda_toolkit", "sources"} <= entry.origin.keys()
    versions = json.loads((ROOT / "cpp" / "instances.json").read_text(encoding="utf-8"))
    assert all(entry.bits_version <= versions["bits_version"] for entry in golden.entries)


def entry_of(**hashes: str) -> Entry:
    return Entry(1, "9.0", {"gpu": "one"}, hashes)


def test_hashes_are_not_written_over_unless_forced() -> None:
    golden = Golden({"a": "0"}).added({}, entry_of(a="1", b="2"))
    with pytest.raises(GoldenError, match=r"bits_version 1, 9\.0: 1 of 2 cases .* the first b"):
        golden.added({}, entry_of(a="1", b="3"))
    with pytest.raises(GoldenError, match="inputs"):
        golden.added({"a": "1"})
    forced = golden.added({}, entry_of(a="1", b="3"), force=True)
    assert forced.entries == (entry_of(a="1", b="3"),)
    assert golden.added({"a": "1"}, force=True).inputs == {"a": "1"}


def test_hashes_of_other_cases_versions_and_gpus_are_added() -> None:
    golden = Golden().added({}, entry_of(a="1")).added({}, entry_of(a="1", b="2"))
    assert golden.entries == (entry_of(a="1", b="2"),)
    later = dataclasses.replace(entry_of(a="9"), bits_version=2, evidence=evidence_of())
    older = dataclasses.replace(entry_of(a="8"), compute_capability="8.0")
    golden = golden.added({}, later).added({}, older)
    assert golden.entries == (older, entry_of(a="1", b="2"), later)
    assert golden.find(2, "9.0") == later
    assert golden.find(2, "8.0") is None


def test_the_same_hashes_again_keep_their_origin() -> None:
    golden = Golden().added({}, entry_of(a="1"))
    again = dataclasses.replace(entry_of(a="1"), origin={"gpu": "two"})
    assert golden.added({}, again) == golden


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    golden = Golden({"a": "0"}).added({}, entry_of(a="1 2"))
    record.write(golden, tmp_path / "golden.json")
    assert record.read(tmp_path / "golden.json") == golden
    assert record.read(tmp_path / "none.json") == Golden()


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1, "inputs": {}}'])
def test_a_file_of_something_else_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(GoldenError, match=r"golden\.json: "):
        record.read(path)


# --- the command ---


def test_the_command_writes_inputs_and_refuses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "golden_cases", lambda size: list(row.golden_cases(size))[:3])
    path = tmp_path / "golden.json"
    arguments = ["--inputs-only", "--out", str(path)]
    assert command.main(arguments) == 0
    written = record.read(path)
    assert len(written.inputs) == 3
    assert written.inputs.items() <= record.read().inputs.items()
    first = next(iter(written.inputs))
    record.write(written.added({first: "0"}, force=True), path)
    assert command.main(arguments) == 1
    assert "1 of 3 cases have others" in capsys.readouterr().err
    assert record.read(path).inputs[first] == "0"
    assert command.main([*arguments, "--force"]) == 0
    assert record.read(path) == written


def test_the_command_needs_a_gpu_for_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "golden.json"
    assert command.main(["--out", str(path)]) == 1
    assert "no CUDA device" in capsys.readouterr().err
    assert not path.exists()
