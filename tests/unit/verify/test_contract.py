"""The contract checks pass on the package, and catch an attention that breaks a promise."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash_attn_deterministic import flash_attn_func, flash_attn_with_kvcache
from flash_attn_deterministic.checks.tensors import LATENT
from flash_attn_deterministic.errors import UnsupportedError
from flash_attn_deterministic.verify.contract import (
    CHECKS,
    Attention,
    Check,
    Size,
    families,
    run_check,
    size_of,
)
from flash_attn_deterministic.verify.contract.check import Mismatch, expect_numbers
from flash_attn_deterministic.verify.features import OF_CONTRACT

from tests.planted_faults import Gradient, argument, asked, by_index, forgetful, out
from verify.samples import forced, other_bits

ROOT = Path(__file__).parents[3]
BY_ID = {check.id: check for check in CHECKS}
ON_CPU = [check for check in CHECKS if not check.unavailable(size_of("cpu", quick=True))]

Dense = Callable[..., Any]


@pytest.fixture
def small() -> Size:
    return dataclasses.replace(
        size_of("cpu", quick=True),
        configs=((64, "bf16"),),
        features=("full", "causal", "sink", "sink-full"),
    )


def broken(dense: Dense = flash_attn_func, **functions: Callable[..., Any]) -> Attention:
    """The package's functions, some of them replaced."""
    return dataclasses.replace(Attention.installed(), dense=dense, **functions)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
def test_cases_have_names_of_their_own(device: str, quick: bool) -> None:
    size = size_of(device, quick)
    for check in CHECKS:
        cases = list(check.cases(size))
        assert cases
        assert len({case.name for case in cases}) == len(cases)
        assert list(check.cases(size)) == cases


def test_a_full_run_has_all_that_a_quick_one_has() -> None:
    for device in ("cpu", "cuda"):
        quick, full = size_of(device, True), size_of(device, False)
        assert set(quick.configs) < set(full.configs)
        assert set(quick.features) < set(full.features) == set(OF_CONTRACT)


def test_a_full_run_meets_every_kernel_of_the_release() -> None:
    table = json.loads((ROOT / "cpp" / "instances.json").read_text(encoding="utf-8"))
    compiled, latent = sorted(map(int, table["bwd_tiles"])), LATENT[0]
    for path, tiles in table["fwd_tiles"].items():
        assert sorted(map(int, tiles)) == ([latent] if "latent" in path else compiled)
    size = size_of("cuda", quick=False)
    assert {head_dim for head_dim, _ in size.latent} == {latent}
    met = {
        (next(kernel for kernel in (*compiled, latent) if kernel >= head_dim), dtype)
        for head_dim, dtype in (*size.configs, *size.latent)
    }
    assert met == set(itertools.product((*compiled, latent), table["dtypes"]))


def test_configs_that_the_wheel_lacks_are_left_out() -> None:
    size = size_of("cuda", False, lambda config: config[0] <= 64)
    assert size.configs
    assert max(head_dim for head_dim, _ in size.configs) == 64


@pytest.mark.parametrize("check", ON_CPU, ids=lambda check: check.id)
def test_the_package_keeps_its_promise(check: Check, small: Size) -> None:
    outcome = run_check(check, small, Attention.installed())
    assert outcome.counter_example is None
    assert outcome.cases > 0
    assert outcome.failed == 0
    assert sum(counts["cases"] for counts in outcome.by_config.values()) == outcome.cases


# --- Planted faults -----------------------------------------------------------------------------


def lowest_bit(tensor: torch.Tensor) -> torch.Tensor:
    """Changes the lowest bit of one number; keeps the graph for gradients."""
    changed = tensor.clone()
    with torch.no_grad():
        bits = changed.detach().view(torch.int16).flatten()
        bits[-1] ^= 1
    return changed


def every(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Changes a bit of one tensor in so many, as additions in any order would."""
    calls = itertools.count(1)
    return lambda tensor: tensor if next(calls) % count else lowest_bit(tensor)


def splits(
    change: Callable[[int], int], name: str, where: Callable[[dict[str, Any]], bool] = bool
) -> Attention:
    """One of the functions takes another split size, in some calls."""
    return asked(lambda a: {"split_size": change(a["split_size"])} if where(a) else None, name)


def none(split_size: int) -> int:
    return 0


def late(split_size: int) -> int:
    """Every boundary a block too late."""
    return split_size + 64 if split_size else 0


def gradients(
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    where: Callable[[dict[str, Any]], bool] = bool,
    function: str = "dense",
) -> Attention:
    """The gradient of a tensor is changed in some calls that have one."""

    def changed(a: dict[str, Any]) -> dict[str, Any]:
        if a[name] is None or not where(a):
            return {}
        return {name: Gradient.apply(a[name], change)}  # type: ignore[no-untyped-call]

    return asked(changed, function)


def seedless(a: dict[str, Any]) -> None:
    """Dropout whose mask does not follow the seed."""
    torch.seed()


def always_the_same_mask(a: dict[str, Any]) -> None:
    torch.manual_seed(0)


def rolled(seeds: torch.Tensor) -> torch.Tensor:
    return seeds.roll(1)


def many_sequences(a: dict[str, Any]) -> bool:
    return bool(a["q"].shape[0] > 1)


def in_pages_of_48(a: dict[str, Any]) -> bool:
    return a["block_table"] is not None and bool(a["k_cache"].shape[1] == 48)


BY_BATCH = splits(none, "dense", lambda a: a["q"].shape[0] > 2)
# As a schedule by occupancy would have it.
BY_QUERIES = splits(none, "dense", lambda a: a["q"].shape[1] > 100)
FAULTS = [
    ("run-to-run", "other-bits-sometimes", out(every(3))),
    ("batch", "splits-by-batch", BY_BATCH),
    ("chunk", "splits-by-queries", BY_QUERIES),
    ("decode", "splits-by-queries", BY_QUERIES),
    ("decode", "cache-boundary-off-by-a-block", splits(late, "kvcache")),
    ("decode", "cache-not-written", asked(forgetful, "kvcache")),
    ("capacity", "splits-by-room", splits(none, "kvcache", lambda a: a["k_cache"].shape[1] > 300)),
    ("paged", "splits-by-page-size", splits(none, "kvcache", in_pages_of_48)),
    ("paged", "packed-boundary-off-by-a-block", splits(late, "varlen")),
    ("varlen", "boundary-off-by-a-block", splits(late, "varlen")),
    ("latent", "splits-by-page-size", splits(none, "kvcache", in_pages_of_48)),
    ("latent", "splits-by-batch", splits(none, "kvcache", many_sequences)),
    ("latent", "splits-by-heads", splits(none, "kvcache", lambda a: a["q"].shape[2] > 4)),
    ("latent", "splits-by-queries", splits(none, "kvcache", lambda a: a["q"].shape[1] > 1)),
    ("heads", "splits-by-heads", splits(none, "dense", lambda a: a["k"].shape[2] > 3)),
    ("split-size", "boundary-off-by-a-block", splits(late, "dense")),
    ("split-size", "no-splits", splits(none, "dense")),
    ("backward", "atomics-in-dq", gradients("q", every(2))),
    ("backward", "dq-by-batch", gradients("q", lowest_bit, many_sequences)),
    ("backward", "dq-by-heads", gradients("q", lowest_bit, lambda a: a["q"].shape[2] > 4)),
    ("backward", "atomics-in-dsink", gradients("learnable_sink", every(2))),
    ("backward", "dsink-by-batch", gradients("learnable_sink", lowest_bit, many_sequences)),
    ("backward", "packed-differs", gradients("q", lowest_bit, function="varlen")),
    ("dropout", "seed-without-effect", asked(seedless, "dense")),
    ("dropout", "mask-that-never-changes", asked(always_the_same_mask, "dense")),
    ("dropout-seeds", "index-in-the-batch", argument("dropout_seeds", by_index)),
    ("dropout-seeds", "packed-mask-of-the-next", argument("dropout_seeds", rolled, "varlen")),
    ("dropout-seeds", "seeds-without-effect", argument("dropout_seeds", torch.zeros_like)),
]


@pytest.mark.parametrize(
    ("check_id", "attention"),
    [pytest.param(row, attention, id=f"{row}-{name}") for row, name, attention in FAULTS],
)
def test_a_planted_fault_is_caught(check_id: str, attention: Attention, small: Size) -> None:
    outcome = run_check(BY_ID[check_id], small, attention)
    assert outcome.failed > 0
    found = outcome.counter_example
    assert found is not None
    assert found["check"] == check_id
    head_dim = LATENT[0] if check_id == "latent" else 64
    assert found["shapes"]["q"][-1] == found["head_dim"] == head_dim
    assert found["tensor"]


def test_every_check_has_a_planted_fault() -> None:
    # test_golden.py has those of golden; schedule and family are for GPUs, see below.
    assert {row for row, _, _ in FAULTS} | {"schedule", "family", "golden"} == BY_ID.keys()
    assert all(check.promise for check in CHECKS)


def test_a_counter_example_says_it_in_full(small: Size) -> None:
    found = run_check(BY_ID["batch"], small, BY_BATCH).counter_example
    assert found is not None
    assert found["what"].startswith("place ")
    assert found["index"] is not None
    assert found["left"] is not None
    assert found["right"] is not None
    assert found["left"]["bits"] != found["right"]["bits"]
    assert len(found["index"]) == (4 if found["tensor"] == "out" else 3)
    assert 0 < found["differing"] <= found["elements"]
    assert found["options"]["split_size"] == 64
    assert set(found["shapes"]) == {"q", "k", "v"}


def test_an_exception_counts_as_a_failure_and_the_next_case_runs(small: Size) -> None:
    calls = []

    def raising(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(q)
        raise RuntimeError("no kernel image")

    outcome = run_check(BY_ID["batch"], small, broken(raising))
    assert outcome.failed == outcome.cases == len(calls) > 1
    assert outcome.counter_example is not None
    assert outcome.counter_example["what"] == "RuntimeError: no kernel image"


def test_what_is_not_there_at_all_is_asked_for_once(small: Size) -> None:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("no backward in this version")

    outcome = run_check(BY_ID["backward"], small, broken(missing))
    assert outcome.failed == outcome.cases == 1


@pytest.mark.parametrize("row", ["run-to-run", "batch", "chunk", "heads", "backward"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_equal_bits_of_what_is_no_number(row: str, value: float, small: Size) -> None:
    """The checks compare bits, and those of two NaN are equal."""
    outcome = run_check(BY_ID[row], small, out(lambda tensor: tensor * value))
    assert outcome.failed == outcome.cases > 0
    assert outcome.counter_example is not None
    assert "NaN or infinite" in outcome.counter_example["what"]
    assert outcome.counter_example["tensor"] in ("out", "dq", "dk", "dv")


def test_an_lse_may_be_infinite_and_not_a_nan() -> None:
    call: Any = None
    expect_numbers(call, "a row without keys", {"softmax_lse": torch.tensor([float("inf")])})
    with pytest.raises(Mismatch, match="1 of 2 elements are NaN"):
        expect_numbers(call, "a", {"softmax_lse": torch.tensor([float("nan"), 1.0])})


def test_progress_is_told_before_each_case(small: Size) -> None:
    seen = []
    run_check(
        BY_ID["split-size"],
        small,
        Attention.installed(),
        lambda case, number, total: seen.append((case.name, number, total)),
    )
    assert [number for _, number, _ in seen] == list(range(len(seen)))
    assert {total for _, _, total in seen} == {len(seen)}


# --- Schedule and family: only a GPU has two, so a stand-in for one runs here -------------------


def run_one(row: str, seqlen_q: int, attention: Attention, **changes: Any) -> tuple[int, str]:
    """Runs a row's first case of so many queries; returns how many failed, and what of them."""
    check = BY_ID[row]
    size = dataclasses.replace(size_of("cpu", quick=True), configs=((40, "bf16"),), **changes)
    first = next(case for case in check.cases(size) if case["seqlen_q"] == seqlen_q)
    outcome = run_check(dataclasses.replace(check, cases=lambda _: [first]), size, attention)
    found = outcome.counter_example
    return outcome.failed, "" if found is None else str(found["what"])


def by_rows(q: torch.Tensor, *args: Any, **kwargs: Any) -> str:
    return "parts" if q.shape[0] == 1 else "one-cta"


@pytest.mark.parametrize(("path", "dense", "failed", "words"), [
    pytest.param(by_rows, flash_attn_func, 0, "", id="agree"),
    pytest.param(by_rows, BY_BATCH.dense, 1, "against the same alone", id="differ"),
    pytest.param(lambda *args, **kwargs: "one-cta", flash_attn_func, 1,
        "did not take the two paths", id="one-path"),
])  # fmt: skip
def test_schedule(
    path: Callable[..., str], dense: Dense, failed: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    attention = broken(dense, plan=lambda *a, **k: SimpleNamespace(path=path(*a, **k)))
    found = run_one("schedule", 1, attention, features=("full",), splits=(64,))
    assert found[0] == failed
    assert words in found[1]


@pytest.mark.parametrize(("functions", "failed", "words"), [
    pytest.param({}, 0, "", id="agree"),
    pytest.param({"dense": other_bits("sm90")}, 1, "dense: sm90 against sm80: out", id="dense"),
    pytest.param({"dense": other_bits("sm90,path=parts")}, 1,
        "dense: parts of sm90 against sm80: out", id="parts"),
    pytest.param({"kvcache": other_bits("sm90", flash_attn_with_kvcache)}, 1,
        "over a cache: sm90 against sm80: out", id="cache"),
    pytest.param({"plan": lambda *args, **kwargs: SimpleNamespace(family="sm80")}, 1,
        "ran kernels of sm80 and sm80, expected one of each", id="one-family"),
])  # fmt: skip
def test_family(functions: dict[str, Callable[..., Any]], failed: int, words: str) -> None:
    attention = broken(**{"plan": forced, **functions})
    found = run_one("family", 70, attention, features=("full", "alibi"), seqlen=130)
    assert "FLASH_ATTENTION_TEST_DEVICE" not in os.environ
    assert found[0] == failed
    assert words in found[1]


@pytest.mark.parametrize(("capability", "held", "reason"), [
    pytest.param((8, 0), "90a-real", "compute capability 8.0 has one family", id="ampere"),
    pytest.param((9, 0), "90-real", "no 90a-real", id="wheel-without"),
    pytest.param((9, 0), "90a-real", "", id="hopper"),
])  # fmt: skip
def test_family_needs_a_hopper_gpu_and_its_kernels(
    capability: tuple[int, int], held: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Info:
        architectures = ("80-real", held)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(families, "build_info", Info)
    found = BY_ID["family"].unavailable(size_of("cuda", quick=True))
    assert reason in found if reason else found == ""


def test_family_has_cases_of_what_both_take() -> None:
    cases = list(BY_ID["family"].cases(size_of("cuda", quick=False)))
    assert {case.head_dim for case in cases} == {32, 40, 64, 72, 96, 112, 128, 192, 256}
    assert {"softcap", "window-left"} <= {case.feature for case in cases}
    assert not {"alibi", "everything"} & {case.feature for case in cases}
