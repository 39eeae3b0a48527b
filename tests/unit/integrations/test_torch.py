from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import flash_attn_deterministic as package
import pytest
import torch
from bits import bits_equal
from calls import int32, normal
from flash_attn_deterministic import deterministic_mode
from flash_attn_deterministic.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from flash_attn_deterministic.integrations import low_level
from flash_attn_deterministic.integrations import torch as provider_module
from torch.nn import attention

# Any, because the type checker can't match unpacked arguments.
provider: Any = provider_module
dense_func: Any = package.flash_attn_func
varlen_func: Any = package.flash_attn_varlen_func


def has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """torch's own autograd and dispatcher, with these kernels for CPU tensors."""
    handle = provider.Handle("CPU")
    yield
    handle.remove()


def test_the_provider_is_listed() -> None:
    assert "flash_attn_deterministic" in attention.list_flash_attention_impls()


def test_handle_registers_and_removes_the_kernels() -> None:
    if torch.version.cuda is not None:
        pytest.skip("torch has kernels of its own for CUDA")
    names = list(provider._OVERRIDES)
    assert not any(has_kernel(name, "CUDA") for name in names)
    handle = provider.Handle()
    assert all(has_kernel(name, "CUDA") for name in names if hasattr(torch.ops.aten, name))
    handle.remove()
    assert not any(has_kernel(name, "CUDA") for name in names)
    handle.remove()  # once more does nothing


def test_torch_activates_and_restores_it() -> None:
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("torch 2.10 keeps what was activated")
    attention.activate_flash_attention_impl("flash_attn_deterministic")
    try:
        assert attention.current_flash_attention_impl() == "flash_attn_deterministic"
        assert has_kernel("_scaled_dot_product_flash_attention", "CUDA")
    finally:
        attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None


def test_it_takes_the_place_of_another_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("torch 2.10 keeps what was activated")
    registry: Any = attention._registry
    monkeypatch.setattr(registry, "_FLASH_ATTENTION_IMPLS", {**registry._FLASH_ATTENTION_IMPLS})
    provider.stand_in_for("FA3", "FA4")
    with pytest.raises(ArgumentTypeError, match="names: expected strings, got int"):
        provider.stand_in_for(3)
    with pytest.raises(ArgumentError, match="names: expected some of FA3, FA4, got 'FA9'"):
        provider.stand_in_for("FA9")
    attention.activate_flash_attention_impl("FA3")
    try:
        assert attention.current_flash_attention_impl() == "FA3"
        assert has_kernel("_flash_attention_forward", "CUDA")
    finally:
        attention.restore_flash_attention_impl()


def test_parts_of_context_parallel_bring_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import DTensor

    q = normal(1, 2, 8, 32)
    provider.sdpa_forward(q, q, q)  # without a warning, which would be an error
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    dispatcher: Any = DTensor._op_dispatcher
    handlers = {**dispatcher._custom_op_handlers, op: None}
    monkeypatch.setattr(dispatcher, "_custom_op_handlers", handlers)
    with pytest.warns(RuntimeWarning, match="context_parallel merges the rounded results"):
        provider.sdpa_forward(q, q, q)


@pytest.mark.parametrize("name", list(provider._OVERRIDES))
def test_kernels_take_the_arguments_of_this_torch(name: str) -> None:
    if not hasattr(torch.ops.aten, name):
        pytest.skip("this torch has no such op")
    function: Any = provider._OVERRIDES[name]
    if name == "_flash_attention_forward_no_dropout_inplace":
        function = lambda out, *args, **kwargs: provider.forward(*args, **kwargs)  # noqa: E731
        signature = inspect.signature(provider.forward)
        skip = 1
    else:
        signature = inspect.signature(function)
        skip = 0
    arguments = getattr(torch.ops.aten, name).default._schema.arguments[skip:]
    parameters = signature.parameters
    named = [p for p in parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    by_place = [a.name for a in arguments if not a.kwarg_only]
    assert [p.name for p in named if p.kind is not inspect.Parameter.KEYWORD_ONLY] == by_place
    assert {a.name for a in arguments if a.kwarg_only} <= {p.name for p in named}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", ["heads-first", "transposed", "packed"])
@pytest.mark.usefixtures("on_cpu")
def test_sdpa_has_the_bits_of_the_public_function(layout: str, causal: bool) -> None:
    shape, shape_k = (2, 4, 70, 32), (2, 2, 70, 32)
    if layout == "heads-first":
        q, k, v = normal(*shape), normal(*shape_k, seed=1), normal(*shape_k, seed=2)
    elif layout == "transposed":
        q = normal(2, 70, 4, 32).transpose(1, 2)
        k, v = (normal(2, 70, 2, 32, seed=s).transpose(1, 2) for s in (1, 2))
    else:
        q, k, v = normal(2, 70, 3, 4, 32).permute(2, 0, 3, 1, 4)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *leaves, is_causal=causal, scale=0.2
    )
    dout = normal(*out.shape, seed=3)
    torch.autograd.backward(out, dout)

    ours = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
    expected, expected_lse, _ = dense_func(
        *ours, softmax_scale=0.2, causal=causal, return_attn_probs=True
    )
    torch.autograd.backward(expected, dout.transpose(1, 2))
    assert bits_equal(out, expected.transpose(1, 2))
    assert bits_equal(lse, expected_lse)
    # The strides of torch's own shape function, which torch.compile relies on.
    assert out.stride() == torch.empty_like(leaves[0]).stride()
    for leaf, own in zip(leaves, ours, strict=True):
        assert leaf.grad is not None
        assert own.grad is not None
        assert bits_equal(leaf.grad, own.grad.transpose(1, 2))


@pytest.mark.usefixtures("on_cpu")
def test_dropout_repeats_in_the_backward() -> None:
    q, k, v = (normal(1, 2, 20, 32, seed=seed).requires_grad_() for seed in range(3))
    torch.manual_seed(3)
    out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.25)
    torch.autograd.backward(out, torch.ones_like(out))
    own = [t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    torch.manual_seed(3)
    expected = dense_func(*own, 0.25)
    torch.autograd.backward(expected, torch.ones_like(expected))
    assert bits_equal(out, expected.transpose(1, 2))
    assert q.grad is not None
    assert own[0].grad is not None
    assert bits_equal(q.grad, own[0].grad.transpose(1, 2))


@pytest.mark.usefixtures("on_cpu")
def test_packed_sequences_have_the_bits_of_the_public_function() -> None:
    q, k, v = (normal(20, 2, 32, seed=seed).requires_grad_() for seed in range(3))
    starts, longest = int32(0, 7, 20), (13, 13)
    out, lse, rng_state, offset, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, *longest, 0.0, True, False, window_size_left=4
    )
    torch.autograd.backward(out, torch.ones_like(out))
    own = [t.detach().requires_grad_() for t in (q, k, v)]
    expected, expected_lse, _ = varlen_func(
        *own, starts, starts, *longest, causal=True, window_size=(4, 0), return_attn_probs=True
    )
    torch.autograd.backward(expected, torch.ones_like(expected))
    assert bits_equal(out, expected)
    assert bits_equal(lse, expected_lse)
    assert (rng_state.shape, rng_state.dtype) == ((2,), torch.uint64)
    assert offset.dtype == torch.uint64
    for theirs, ours in zip((q, k, v), own, strict=True):
        assert theirs.grad is not None
        assert ours.grad is not None
        assert bits_equal(theirs.grad, ours.grad)


def test_pages_without_cum_seq_k() -> None:
    q, pages = normal(6, 2, 32), normal(4, 16, 1, 32, seed=1)
    table, used = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), int32(18, 30)
    starts = int32(0, 2, 6)
    expected = varlen_func(
        q, pages, pages, starts, int32(0, 18, 48), 4, 32, block_table=table, seqused_k=used
    )
    settings: dict[str, Any] = {"seqused_k": used, "block_table": table, "num_splits": 1}
    arguments = (q, pages, pages, starts, None, 4, 32, 0.0, False, False)
    out, *_ = provider.forward(*arguments, **settings)
    assert bits_equal(out, expected)
    written = torch.empty_like(q)
    provider.forward_no_dropout_inplace(written, *arguments, **settings)
    assert bits_equal(written, expected)
    with pytest.raises(ArgumentError, match="out: expected a tensor like query"):
        provider.forward_no_dropout_inplace(written[:3], *arguments, **settings)


@pytest.mark.usefixtures("on_cpu")
def test_what_a_generator_computes_over_pages_has_the_bits_of_the_trainer() -> None:
    """The calls of TorchTitan's trainer and of its backend for vLLM, for one sequence."""
    torch_varlen: Any = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(torch_varlen, "varlen_attn_out"):
        pytest.skip("torch's varlen attention has no pages before 2.12")
    q, k, v = (normal(40, heads, 32, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    starts = int32(0, 40)
    options: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True}
    trained = torch_varlen.varlen_attn(q, k, v, starts, starts, 40, 40, **options)
    table = torch.tensor([[3, 1, 4]], dtype=torch.int32)
    pages = [torch.full((5, 16, 2, 32), torch.nan, dtype=q.dtype) for _ in "kv"]
    generated = torch.empty_like(q)
    for begin, end in ((0, 17), (17, 39), (39, 40)):
        for token in range(begin, end):
            for cache, tokens in zip(pages, (k, v), strict=True):
                cache[table[0, token // 16], token % 16] = tokens[token]
        rows = slice(begin, end)
        lengths = int32(0, end - begin), None, end - begin, 48
        options |= {"block_table": table, "seqused_k": int32(end), "num_splits": 1}
        torch_varlen.varlen_attn_out(generated[rows], q[rows], *pages, *lengths, **options)
    assert bits_equal(generated, trained)


@pytest.mark.parametrize("enabled", [True, False], ids=["mode-on", "mode-off"])
@pytest.mark.parametrize("torch_setting", [True, False], ids=["deterministic-only", "any"])
def test_backward_is_deterministic_by_mode_or_setting_of_torch(
    enabled: bool,
    torch_setting: bool,
    backward_calls: list[tuple[str, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = normal(1, 4, 2, 32)
    out, lse, *random = (
        provider.sdpa_forward(q, q, q)[:2] + (torch.zeros(2, dtype=torch.uint64),) * 2
    )
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: torch_setting)
    with deterministic_mode(enabled):
        provider.sdpa_backward(out, q, q, q, out, lse, None, None, 2, 2, 0.0, False, *random)
    assert backward_calls == [("bwd", enabled or torch_setting)]


def test_unsupported_arguments_are_refused() -> None:
    q = normal(1, 4, 2, 32)
    with pytest.raises(UnsupportedError, match="return_debug_mask"):
        provider.sdpa_forward(q, q, q, return_debug_mask=True)
    arguments = (q, q, q, None, None, 4, 4, 0.0, False, False)
    with pytest.raises(UnsupportedError, match="sinks: torch"):
        provider.forward(*arguments, sinks=1.0)
    with pytest.raises(ArgumentError, match="cum_seq_q"):
        provider.forward(*arguments, seqused_k=int32(3))
    with pytest.raises(ArgumentError, match="cum_seq_k"):
        provider.forward(*[q[0]] * 3, int32(0, 4), None, 4, 4, 0.0, False, False)
    assert provider.forward(*arguments, sinks=None)[0].shape == q.shape


def test_scores_without_a_window() -> None:
    q = normal(1, 4, 2, 32)
    for window, same in ((None, -1), (-1, -1)), ((3, None), (3, 0)):
        out, *_ = low_level.forward(q, q, q, (0.0, 1.0, same[1] == 0, window, 0.0))
        other, *_ = low_level.forward(q, q, q, (0.0, 1.0, False, same, 0.0))
        assert bits_equal(out, other)
