from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from bits import bits_equal
from calls import CALLS, NHEADS, NHEADS_K, Call, int32, kvcache_call, normal, qkv_call, varlen_call
from flash_attn_deterministic import Plan, deterministic_mode, explain, flash_attn_func
from flash_attn_deterministic.build_info import build_info
from flash_attn_deterministic.errors import ArgumentError, UnsupportedError


def planned(seqlen_k: int = 4096, split_size: int = 512, head_dim: int = 64) -> Plan:
    """The plan of a call without data."""
    q, k = (
        torch.empty(2, seqlen, heads, head_dim, dtype=torch.bfloat16, device="meta")
        for seqlen, heads in ((100, 4), (seqlen_k, 2))
    )
    return explain(flash_attn_func, q, k, k, split_size=split_size)


@pytest.mark.parametrize(("seqlen_k", "split_size", "num_splits", "tokens"), [
    pytest.param(4096, 512, 8, 512, id="whole"),
    pytest.param(4097, 512, 9, 512, id="one-more"),
    pytest.param(513, 512, 2, 512, id="two"),
    pytest.param(512, 512, 1, 512, id="just-one"),
    pytest.param(100, 512, 1, 100, id="short"),
    pytest.param(4096, 0, 1, 4096, id="not-split"),
    pytest.param(0, 512, 1, 0, id="no-keys"),
])  # fmt: skip
def test_plan_counts_splits(seqlen_k: int, split_size: int, num_splits: int, tokens: int) -> None:
    assert planned(seqlen_k, split_size) == Plan(
        family="reference",
        path="one-cta",
        block_m=build_info().tile(64).block_m,
        block_n=build_info().tile(64).block_n,
        split_size=split_size,
        num_splits=num_splits,
        tokens_per_split=tokens,
        launches=1,
        scratch_bytes=0,
        head_dim_v=64,
    )


def test_plan_takes_the_tile_of_the_head_dim() -> None:
    for head_dim in (32, 256):
        found, tile = planned(head_dim=head_dim), build_info().tile(head_dim)
        assert (found.block_m, found.block_n) == (tile.block_m, tile.block_n)


@pytest.mark.parametrize("name", [name for name in CALLS if "kvcache" not in name])
def test_dropout_draws_no_seed_and_has_the_same_plan_on_the_cpu(name: str) -> None:
    call = CALLS[name](20)
    before = torch.get_rng_state()
    dropping = explain(name, **call.arguments, dropout_p=0.3, return_attn_probs=True)
    assert dropping == explain(name, **call.arguments)
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(ArgumentError, match=r"dropout_seeds: expected shape \(batch,\)"):
        explain(name, **call.arguments, dropout_p=0.3, dropout_seeds=torch.zeros(99).long())


@pytest.mark.parametrize(
    "options",
    [{"learnable_sink": torch.ones(4).bfloat16()}, {"return_max_logits": True}],
    ids=["sinks", "max-logits"],
)
def test_features_without_a_plan_of_their_own(options: dict[str, Any]) -> None:
    assert explain_changed(qkv_call(), options) == explain_changed(qkv_call(), {})


@pytest.mark.parametrize("name", CALLS)
def test_each_function_can_be_explained(name: str) -> None:
    call = CALLS[name](20)
    by_name = explain(name, **call.arguments)
    assert by_name == explain(call.function, **call.arguments)
    assert by_name.num_splits == 1
    assert by_name.split_size == 2048


@pytest.mark.parametrize(
    ("table", "tokens"), [pytest.param(None, 20, id="contiguous"), pytest.param(6, 96, id="paged")]
)
def test_cache_counts_its_capacity(table: int | None, tokens: int) -> None:
    arguments = kvcache_call().arguments
    for name in ("rotary_cos", "rotary_sin"):
        del arguments[name]
    if table is not None:
        pages = normal(12, 16, NHEADS_K, 32)
        block_table = torch.arange(2 * table, dtype=torch.int32).reshape(2, table)
        arguments.update(k_cache=pages, v_cache=pages, block_table=block_table)
    assert explain("flash_attn_with_kvcache", **arguments).tokens_per_split == tokens


def test_varlen_counts_the_longest() -> None:
    arguments = {**varlen_call().arguments, "max_seqlen_k": 640, "split_size": 128}
    assert explain("flash_attn_varlen_func", **arguments).num_splits == 5


def test_nothing_is_computed_or_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn_deterministic import reference

    def computed(*args: Any, **kwargs: Any) -> None:
        pytest.fail("computed")

    monkeypatch.setattr(reference, "kvcache_attention", computed)
    call = kvcache_call(20)
    before = call.arguments["k_cache"].clone()
    explain(call.function, **call.arguments)
    assert bits_equal(call.arguments["k_cache"], before)
    assert call.arguments["k_cache"]._version == 0


def test_large_call_takes_no_memory() -> None:
    q = torch.ones(1, dtype=torch.bfloat16).expand(64, 2**20, 32, 256)
    assert explain(flash_attn_func, q, q, q).num_splits == 512


def test_arguments_are_checked_as_in_the_call() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        explain_changed(qkv_call(), {"cu_seqlens_q": int32(0, 1)})
    k = qkv_call().arguments["k"]
    wrong: list[tuple[Call, dict[str, Any], str]] = [
        (qkv_call(), {"k": k.float()}, "k: expected"),
        (qkv_call(), {"k": k.to("meta")}, r"k: expected a tensor on cpu, .* got one on meta"),
        (varlen_call(), {"max_seqlen_k": 8}, "max_seqlen_k: expected at least 9"),
        (varlen_call(), {"cu_seqlens_q": int32(0, 3, 2, 8)}, "cu_seqlens_q: .* do not decrease"),
        (kvcache_call(), {"cache_seqlens": int32(18, 4)}, "cache_seqlens: .* 0, got 18"),
        (kvcache_call(), {"rotary_cos": None}, "rotary_cos: expected a tensor"),
        (qkv_call(), {"window_size": 3}, "window_size: expected a pair"),
    ]
    for call, changes, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            call(**changes)
        with pytest.raises(RuntimeError, match=message):
            explain_changed(call, changes)


def explain_changed(call: Call, changes: dict[str, Any]) -> Plan:
    return explain(call.function, **{**call.arguments, **changes})


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_call_without_a_backward_is_explained() -> None:
    """leftpad_k has a forward, but no backward."""
    leaf = varlen_call().arguments["q"].clone().requires_grad_()
    changes = {"q": leaf, "leftpad_k": int32(1, 0, 3)}
    varlen_call()(**changes)
    assert explain_changed(varlen_call(), changes).num_splits == 1
    with torch.autograd.forward_ad.dual_level():  # type: ignore[no-untyped-call, unused-ignore]
        dual = torch.autograd.forward_ad.make_dual(leaf.detach(), leaf.detach())  # type: ignore[no-untyped-call, unused-ignore]
        with pytest.raises(UnsupportedError, match="forward-mode AD"):
            explain_changed(varlen_call(), {"q": dual})


def test_ways_to_name_a_function() -> None:
    q, k = normal(1, 2, NHEADS, 32), normal(1, 1000, NHEADS_K, 32)
    partial = functools.partial(flash_attn_func, split_size=64)
    compiled: Any = torch.compile(flash_attn_func, fullgraph=True, backend="eager")
    decorated = deterministic_mode(split_size=128)(flash_attn_func)
    expected = explain(flash_attn_func, q, k, k, split_size=64)
    assert expected.num_splits == 16
    assert explain(q, k, k, split_size=64) == expected
    assert explain(q=q, k=k, v=k, split_size=64) == expected
    assert explain(partial, q, k, k) == expected
    assert explain(functools.partial(partial, q), k, k) == expected
    assert explain(compiled, q, k, k, split_size=64) == expected
    assert explain(functools.partial(compiled, split_size=64), q, k, k) == expected
    assert explain(torch.compile(partial, backend="eager"), q, k, k) == expected
    assert explain(decorated, q, k, k).num_splits == 8
    assert explain(deterministic_mode(split_size=128)(compiled), q, k, k).num_splits == 8
    with pytest.raises(ArgumentError, match="function: expected one of"):
        explain(functools.partial(print), q, k, k)


@pytest.mark.parametrize(
    "function", [pytest.param("attention", id="name"), pytest.param(print, id="function")]
)
def test_other_functions_are_refused(function: Any) -> None:
    with pytest.raises(ArgumentError, match=r"function: expected one of flash_attn_func, .* got"):
        explain(function)


def test_schedule_dependent_mode_is_not_explained() -> None:
    with (
        deterministic_mode(enabled=False),
        pytest.raises(UnsupportedError, match="only calls on a CUDA device have a plan"),
    ):
        explain(flash_attn_func, **qkv_call().arguments)
