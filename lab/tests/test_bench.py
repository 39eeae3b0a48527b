"""bench on the CPU: shapes, what comes of attentions that fail or differ, and the files."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic_lab.attentions import ATTENTIONS, find_attention
from flash_attn_deterministic_lab.bench import ahead, cases
from flash_attn_deterministic_lab.bench import measure as measuring
from flash_attn_deterministic_lab.bench.measure import compare, disturbed, measure, summarise
from flash_attn_deterministic_lab.bench.problem import Problem, Shape
from flash_attn_deterministic_lab.cli import main, use_paths

SHAPES = [
    Shape("forward", 1, 64, 2, 1, 32, causal=True),
    Shape("decode", 2, 64, 2, 1, 32),
    Shape("decode", 2, 60, 2, 1, 32, causal=True, seqlen_q=3, page_size=16),
    Shape("backward", 1, 64, 2, 2, 32),
    Shape("forward", 3, 40, 2, 1, 32, causal=True, lengths=(7, 40, 1)),
    Shape("forward", 2, 40, 2, 1, 32, causal=True, lengths=(17, 40), page_size=16),
    Shape("decode", 2, 40, 2, 1, 32, causal=True, seqlen_q=5, lengths=(17, 40), page_size=16),
    Shape("forward", 1, 64, 2, 1, 32, causal=True, window=9),
    Shape("decode", 2, 40, 3, 1, 576, causal=True, seqlen_q=2, page_size=16, head_dim_v=512),
]


def bench(out: Path, *arguments: str) -> int:
    return main(["bench", "--device", "cpu", "--out", str(out), "--repeats", "2", *arguments])


def read(out: Path, study: str = "cpu") -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / f"{study}.json").read_text())
    return record


def own(name: str) -> Any:
    return find_attention(f"sample_attentions:{name}")


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
def test_the_reference_is_timed_beside_ours_and_compared(shape: Shape) -> None:
    found = measure(shape, "cpu", [ATTENTIONS["ours"], ATTENTIONS["reference"]], 2)
    assert found["failed"] == {}
    assert set(found["ms"]) == set(found["ratio"]) == {"ours", "reference"}
    assert found["ratio"]["ours"] == 1.0
    assert found["tflops"]["ours"] >= 0


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
def test_flops_count_visible_pairs(shape: Shape) -> None:
    left, right = shape.limits
    pairs = 0
    for length in shape.lengths or [shape.seqlen] * shape.batch:
        queries = shape.seqlen_q or (1 if shape.kind == "decode" else length)
        for row in range(queries):
            own_key = row + length - queries
            pairs += sum(
                (right < 0 or key <= own_key + right) and (left < 0 or key >= own_key - left)
                for key in range(length)
            )
    others = 4 if shape.kind == "backward" else 1
    columns = others * shape.head_dim + (shape.head_dim_v or shape.head_dim)
    assert shape.flops == 2 * columns * shape.nheads * pairs


def test_studies_have_cases_with_names_of_their_own_and_attentions_that_exist() -> None:
    for name, study in cases.STUDIES.items():
        names = Counter(case.shape.name for case in study.cases)
        assert max(names.values()) == 1, name
        for attention in {*study.attentions, *study.rivals} - {measuring.READ}:
            find_attention(attention)
        assert set(study.rivals) <= set(study.attentions)


def test_pages_hold_the_same_keys() -> None:
    problem = Problem.draw(SHAPES[2], "cpu")
    table = problem.options["block_table"]
    keys = problem.k[table.long()].flatten(1, 2)[:, :60]
    assert torch.equal(keys, Problem.draw(Shape("decode", 2, 60, 2, 1, 32, seqlen_q=3), "cpu").k)
    assert sorted(table.flatten().tolist()) == list(range(8))


def test_latent_values_are_keys_and_lengths_are_one_tensor() -> None:
    first, second = (Problem.draw(SHAPES[-1], "cpu", seed) for seed in range(2))
    assert first.shape.name == "decode B2 Lq2 Lk40 H3/1 D576/512 causal pages of 16 bf16"
    assert first.v.data_ptr() == first.k.data_ptr()
    assert first.k.shape == (6, 16, 1, 576)
    assert first.shape.kv_bytes == 2 * 40 * 576 * 2
    assert first.options["seqlens_k"] is second.options["seqlens_k"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("another_function", "ValueError: the result differs from ours by"),
        ("raises_for_one_query", "RuntimeError: no kernel for one query"),
        ("fails_later", "MemoryError: no room"),
        ("has_a_cause", "NotImplementedError: no backward in _C.so"),
    ],
)
def test_one_that_fails_is_listed_with_its_reason(name: str, reason: str) -> None:
    shape = Shape("decode" if "query" in name else "forward", 1, 64, 2, 1, 32, causal=True)
    attention = own(name)
    found = measure(shape, "cpu", [ATTENTIONS["ours"], attention], 3)
    assert found["failed"][attention.name].startswith(reason)
    assert set(found["ms"]) == {"ours"}


@pytest.mark.parametrize("change", ["nan", "few", "shape"])
def test_results_of_another_function_are_no_peers(change: str) -> None:
    ours = torch.rand(2, 50, 4, 32)
    other = ours.clone()
    if change == "nan":
        other[0, 0, 0, 0] = math.nan
    elif change == "few":  # rows of small numbers, which the largest difference alone would miss
        ours[:, 25:] *= 0.01
        other = ours.clone()
        other[:, 25:] = 0
        ours[:, :25], other[:, :25] = 0.04, 0.04
    else:
        other = other[:, :-1]
    with pytest.raises(ValueError, match="the result"):
        compare([other], [ours])
    compare([ours + 1e-4], [ours])


def test_means_are_of_our_time_over_theirs() -> None:
    found = [
        {"name": name, "group": "dense", "head_dim": 64,
         "ratio": {"ours": 1, "fa4": fa4, "fa3": fa3}}
        for name, fa4, fa3 in (("a", 0.5, 0.8), ("b", 2.0, 0.8))
    ]  # fmt: skip
    study = cases.Study("", (), ("fa4", "fa3"), ("fa4", "fa3"))
    means = summarise(found, study)
    assert set(means) == {"all", "dense", "D64"}
    assert means["all"]["fa4"] == {"mean": 1.0, "worst": 2.0, "worst_case": "a", "cases": 2}
    assert means["dense"]["best"]["worst"] == 2.0
    assert means["D64"]["best"]["mean"] == pytest.approx(math.sqrt(2.0 * 1.25), abs=1e-3)


def test_disturbed_times_do_not_count() -> None:
    steady, other = {"median": 2.0, "p10": 1.9}, {"median": 2.0, "p10": 1.0}
    assert disturbed({"ours": steady, "fa4": other}) == ["fa4"]
    case = {"group": "dense", "head_dim": 64, "ratio": {"ours": 1, "fa4": 0.5, "fa3": 0.8}}
    found = [
        {**case, "name": "a", "disturbed": ["fa4"]},
        {**case, "name": "b", "disturbed": ["ours"]},
    ]
    means = summarise(found, cases.Study("", (), ("fa4", "fa3"), ("fa4", "fa3")))
    assert {name: one["worst"] for name, one in means["all"].items()} == {"fa3": 1.25, "best": 1.25}


def test_latent_cases_count_for_no_kernels_head_dim() -> None:
    case = {"name": "a", "group": "16 heads", "head_dim": 576, "ratio": {"ours": 1, "read": 0.8}}
    assert set(summarise([case], cases.STUDIES["latent"])) == {"all", "16 heads"}


def test_chunks_do_not_count_for_those_that_get_a_tensor_of_their_mask() -> None:
    found = [
        {"name": group, "group": group, "head_dim": 64,
         "ratio": {"ours": 1, "sdpa-cudnn": 2.0, "sdpa-flash": 2.0, "module:mine": 2.0}}
        for group in ("dense", "chunk")
    ]  # fmt: skip
    means = summarise(found, cases.STUDIES["peers-forward"])
    assert set(means["chunk"]) == {"sdpa-flash", "module:mine"}
    assert {name: one["cases"] for name, one in means["all"].items()} == {
        "sdpa-cudnn": 1, "sdpa-flash": 2, "module:mine": 2, "best": 1
    }  # fmt: skip


def test_the_files_and_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--attentions", "sdpa") == 0
    record = read(tmp_path)
    assert record["complete"]
    assert [case["shape" if "shape" in case else "kind"] for case in record["cases"]] == [
        "forward", "decode", "backward"
    ]  # fmt: skip
    assert {"date", "command", "hardware", "versions", "wheel", "sources"} <= set(record)
    assert record["versions"]["sdpa"].startswith("torch ")
    printed = capsys.readouterr().out
    for text in ((tmp_path / "cpu.md").read_text(), printed):
        assert "torch SDPA, its choice" in text
        assert re.search(r"the worst beside torch SDPA, its choice: \w+ B\d L", text)
        assert "decode B2 L256 H4/2 D64 bf16" in text


def test_without_our_package_others_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_deterministic", None)
    for name in ("ours", "sdpa-math", "sdpa"):
        vars(ATTENTIONS[name]).pop("function", None)
    assert bench(tmp_path, "--attentions", "sdpa-math", "sdpa", "--only", "forward") == 0
    vars(ATTENTIONS["ours"]).pop("function", None)
    assert "times are over those of sdpa-math" in capsys.readouterr().err
    assert read(tmp_path)["cases"][0]["ratio"]["sdpa-math"] == 1.0


def test_an_interrupted_run_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(shape: Shape, *arguments: Any) -> dict[str, Any]:
        if shape.kind == "decode":
            raise KeyboardInterrupt
        return measure(shape, *arguments)

    monkeypatch.setattr(measuring, "measure", stopped)
    assert bench(tmp_path, "--attentions", "sdpa") == 130
    record = read(tmp_path)
    assert (record["complete"], len(record["cases"])) == (False, 1)
    assert "Incomplete" in (tmp_path / "cpu.md").read_text()


def test_processes_call_each_once_and_time_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--attentions", "sdpa-math", "sample_attentions:has_a_cause"]
    assert bench(tmp_path / "out", *arguments, "--ahead", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [case.shape.name for case in cases._CPU]
    for line in lines:
        assert re.search(r": sdpa-math: [\d.]+ s, \S+: observed exception", line)
    assert not (tmp_path / "out").exists()
    # Without time nothing is called.
    assert ahead._call(SHAPES[0], "cpu", ["sdpa-math"], 0.0) == {"sdpa-math": "no time left"}


def test_time_leaves_shapes_out(tmp_path: Path) -> None:
    assert bench(tmp_path, "--attentions", "sdpa", "--seconds", "0") == 0
    record = read(tmp_path)
    assert (record["complete"], len(record["left_out"])) == (False, 3)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--repeats", "1"], 2, "--repeats: expected 2 or more, got 1"),
        (["--study", "none"], 2, "--study: expected one of usual"),
        (["--attentions", "xformers"], 2, "--attentions: expected ours"),
        (["--fa3", "/no/such/folder"], 2, "--fa3: expected a file or folder"),
        (["--device", "cuda"], 6, "--device: expected a CUDA device"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    arguments: list[str],
    status: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench(tmp_path / "out", *arguments) == status
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert not (tmp_path / "out").exists()


def test_unwritable_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert bench(tmp_path / "file" / "out", "--attentions", "sdpa") == 7
    assert "choose another folder with --out" in capsys.readouterr().err


def test_folders_of_the_command_line_are_where_libraries_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FA3_LIBRARY", "FLASHMLA_LIBRARY", "FA2_BASELINE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "path", sys.path[:])
    names = ("fa3", "fa4", "flashmla", "baseline")
    use_paths(argparse.Namespace(**dict.fromkeys(names, tmp_path)))
    assert os.environ["FA3_LIBRARY"] == str(tmp_path / "fa3.so")
    assert os.environ["FLASHMLA_LIBRARY"] == str(tmp_path / "_flashmla_C.abi3.so")
    assert os.environ["FA2_BASELINE"] == str(tmp_path)
    assert sys.path[0] == str(tmp_path)
