from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import make_inputs
from bits import all_equal, bits_equal
from calls import CALLS, READ_ONLY, Call, Counted, compiled, fresh, int32, kvcache_call, varlen_call
from flash_attn_deterministic import flash_attn_func, interface

EMPTY = inspect.Parameter.empty
SCORES = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": None,  # follows the mode; flash_attn's default is False
    "return_attn_probs": False,
}
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
# The parameters of flash_attn 2.8.3, in its order.
UPSTREAM: dict[str, dict[str, Any]] = {
    "flash_attn_qkvpacked_func": {"qkv": EMPTY, **SCORES},
    "flash_attn_kvpacked_func": {"q": EMPTY, "kv": EMPTY, **SCORES},
    "flash_attn_func": {"q": EMPTY, "k": EMPTY, "v": EMPTY, **SCORES},
    "flash_attn_varlen_qkvpacked_func": {"qkv": EMPTY, "cu_seqlens": EMPTY, "max_seqlen": EMPTY,
        **SCORES},
    "flash_attn_varlen_kvpacked_func": {**dict.fromkeys(("q", "kv", *LENGTHS), EMPTY), **SCORES},
    "flash_attn_varlen_func": {**dict.fromkeys(("q", "k", "v", *LENGTHS), EMPTY), **SCORES,
        "block_table": None},
    "flash_attn_with_kvcache": {**dict.fromkeys(("q", "k_cache", "v_cache"), EMPTY),
        **dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"), None),
        **dict.fromkeys(("cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale"), None),
        "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True,
        "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False},
}  # fmt: skip
OURS = {
    "flash_attn_func": ["split_size", "learnable_sink", "return_max_logits", "dropout_seeds"],
    "flash_attn_varlen_func": [
        *("seqused_k", "leftpad_k", "split_size", "learnable_sink", "return_max_logits"),
        *("k_descale", "v_descale", "dropout_seeds"),
    ],
    "flash_attn_with_kvcache": ["split_size", "learnable_sink", "k_descale", "v_descale"],
}


@pytest.mark.parametrize("name", CALLS)
def test_signature_is_that_of_flash_attn(name: str) -> None:
    parameters = inspect.signature(getattr(interface, name)).parameters
    positional = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == list(UPSTREAM[name].items())
    ours = [p for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert [p.name for p in ours] == OURS.get(name, ["split_size", "dropout_seeds"])
    assert all(p.default is (False if p.name.startswith("return_") else None) for p in ours)
    assert len(parameters) == len(positional) + len(ours)


def test_strided_last_dimension() -> None:
    q, k, v = make_inputs(2, 5, 9, 2, 2, 64)
    expected = flash_attn_func(q, k, v)
    q_strided, k_strided, v_strided = (torch.stack([x, x + 1], dim=-1)[..., 0] for x in (q, k, v))
    assert q_strided.stride(-1) == 2
    assert bits_equal(flash_attn_func(q_strided, k_strided, v_strided), expected)
    expanded = q[..., :1].expand(-1, -1, -1, 64)
    assert bits_equal(flash_attn_func(expanded, k, v), flash_attn_func(expanded.clone(), k, v))


def test_inputs_are_not_changed() -> None:
    inputs = make_inputs(2, 5, 9, head_dim=20)
    before = [x.clone() for x in inputs]
    flash_attn_func(*inputs, causal=True)
    assert all_equal(inputs, before)


# --- Caches ------------------------------------------------------------------------------------


def _outputs(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _assert_same(left: Any, right: Any) -> None:
    assert all_equal(_outputs(left), _outputs(right))


@pytest.mark.parametrize("head_dim", [32, 20], ids=["aligned", "padded"])
def test_cache_equals_attention_over_its_tokens(head_dim: int) -> None:
    call = kvcache_call(head_dim)
    arguments = call.arguments
    old = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    out, softmax_lse = call(rotary_cos=None, rotary_sin=None, return_softmax_lse=True)
    for b, length in enumerate((9, 4)):
        for name in "kv":
            cache = arguments[f"{name}_cache"][b]
            assert bits_equal(cache[length : length + 3], arguments[name][b])
            assert bits_equal(cache[:length], old[f"{name}_cache"][b, :length])
            assert bits_equal(cache[length + 3 :], old[f"{name}_cache"][b, length + 3 :])
        k, v = (arguments[f"{n}_cache"][b : b + 1, : length + 3] for n in "kv")
        expected, expected_lse, _ = flash_attn_func(
            arguments["q"][b : b + 1], k, v, causal=True, return_attn_probs=True
        )
        assert bits_equal(out[b], expected[0])
        assert bits_equal(softmax_lse[b], expected_lse[0])


def test_without_lengths_the_cache_is_full() -> None:
    call = kvcache_call()
    full = call.arguments["k_cache"].shape[1]
    without = call(**READ_ONLY, cache_seqlens=None)
    assert bits_equal(without, call(**READ_ONLY, cache_seqlens=full))


def test_write_to_the_cache_changes_its_version() -> None:
    call = kvcache_call()
    call()
    assert call.arguments["k_cache"]._version > 0
    assert call.arguments["v_cache"]._version > 0
    call = kvcache_call()
    call(**READ_ONLY)
    assert call.arguments["k_cache"]._version == 0


def test_cache_call_has_no_gradient() -> None:
    call = kvcache_call()
    for name in ("q", "k", "v"):
        call.arguments[name].requires_grad_()
    assert not call().requires_grad
    assert not call.arguments["k_cache"].requires_grad


# --- torch.compile ------------------------------------------------------------------------------


def _changed(call: Call, **changes: Any) -> Call:
    return Call(call.function, {**call.arguments, **changes})


# Dense calls: tests/unit/ops/test_autograd.py, with their gradients.
LENGTHS_OF: dict[str, Callable[[], list[Call]]] = {
    "max_seqlen": lambda: [
        _changed(varlen_call(), max_seqlen_q=6 + longer, max_seqlen_k=11 + longer)
        for longer in (0, 3, 40)
    ],
    "cache": lambda: [_changed(kvcache_call(), cache_seqlens=length) for length in (5, 8, 11)],
}


@pytest.mark.parametrize("form", LENGTHS_OF)
def test_compiles_once_for_all_lengths(form: str) -> None:
    calls = LENGTHS_OF[form]()
    once = Counted(calls[0].function, dynamic=True)
    counts = []
    for call in calls:
        assert bits_equal(once(**fresh(call).arguments), call())
        counts.append(once.count)
    assert counts[0] > 0
    assert counts == counts[:1] * 3


CACHE = "flash_attn_with_kvcache"


@pytest.mark.parametrize(("name", "head_dim", "options"), [
    pytest.param("flash_attn_varlen_func", 32, {"seqused_k": int32(4, 2, 9),
        "leftpad_k": int32(1, 0, 3), "split_size": 64}, id="varlen"),
    pytest.param(CACHE, 32, {}, id="aligned"),
    pytest.param(CACHE, 20, {}, id="padded"),
    pytest.param(CACHE, 32, {"cache_seqlens": 7}, id="int-length"),
    pytest.param(CACHE, 32, {"cache_leftpad": int32(1, 2), "rotary_interleaved": False,
        "num_splits": 3}, id="leftpad"),
    pytest.param(CACHE, 32, {"cache_batch_idx": int32(1, 0)}, id="cache-batch-idx"),
])  # fmt: skip
def test_calls_without_a_backward_compile(
    name: str, head_dim: int, options: dict[str, Any]
) -> None:
    """Without a graph break; others: test_compiled_gradients."""
    eager, traced = CALLS[name](head_dim), CALLS[name](head_dim)
    options = {**options, **eager.lse()}
    function = compiled(eager.function)
    _assert_same(function(**{**traced.arguments, **options}), eager(**options))
    for argument, value in eager.arguments.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, traced.arguments[argument]), argument
