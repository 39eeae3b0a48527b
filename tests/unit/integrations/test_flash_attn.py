from __future__ import annotations

import inspect
from typing import Any

import flash_attn_deterministic as package
import pytest
import torch
from bits import bits_equal
from calls import int32, normal
from flash_attn_deterministic.errors import ArgumentError, FlashAttnError
from flash_attn_deterministic.integrations.flash_attn import flash_attn_interface

# Any, because the type checker can't match unpacked arguments.
interface: Any = flash_attn_interface
SCALE = 0.1
SCORES = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right")
# The parameters of flash_attn 2.8.3, in its order.
UPSTREAM = {
    "_flash_attn_forward": ("q", "k", "v", *SCORES, "softcap", "alibi_slopes", "return_softmax"),
    "_flash_attn_varlen_forward": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
        "max_seqlen_k", *SCORES, "softcap", "alibi_slopes", "return_softmax", "block_table",
        "leftpad_k", "seqused_k", "zero_tensors"),
    "_flash_attn_backward": ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv",
        *SCORES, "softcap", "alibi_slopes", "deterministic", "rng_state"),
    "_flash_attn_varlen_backward": ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk",
        "dv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *SCORES,
        "softcap", "alibi_slopes", "deterministic", "rng_state", "zero_tensors"),
}  # fmt: skip


def dense_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q = normal(2, 9, 4, 32).requires_grad_()
    k, v = (normal(2, 70, 2, 32, seed=seed).requires_grad_() for seed in (1, 2))
    return q, k, v, normal(2, 9, 4, 32, seed=3)


def packed_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q = normal(20, 4, 32).requires_grad_()
    k, v = (normal(80, 2, 32, seed=seed).requires_grad_() for seed in (1, 2))
    return q, k, v, normal(20, 4, 32, seed=3)


STARTS_Q, STARTS_K, LONGEST = int32(0, 5, 5, 18), int32(0, 70, 72, 80), (13, 70)


@pytest.mark.parametrize("name", UPSTREAM)
def test_low_level_functions_have_the_parameters_of_flash_attn(name: str) -> None:
    function = getattr(interface, name)
    # As ring-flash-attn looks for them, to pass those that it knows by keyword.
    assert tuple(inspect.getfullargspec(function).args) == UPSTREAM[name]
    assert getattr(interface, f"_wrapped{name}") is function


def test_dense_calls_have_the_bits_of_the_public_function() -> None:
    q, k, v, dout = dense_inputs()
    window, softcap = (20, 3), 5.0
    slopes = torch.tensor([0.1, 0.0, 0.5, 0.25])
    out, lse, _ = package.flash_attn_func(
        q,
        k,
        v,
        softmax_scale=SCALE,
        causal=True,
        window_size=window,
        softcap=softcap,
        alibi_slopes=slopes,
        return_attn_probs=True,
    )
    torch.autograd.backward(out, dout)
    q, k, v, expected = q.detach(), k.detach(), v.detach(), (q.grad, k.grad, v.grad)
    settings = (0.0, SCALE, True, *window, softcap, slopes)
    out_low, lse_low, probs, rng_state = interface._flash_attn_forward(q, k, v, *settings, False)
    assert bits_equal(out_low, out)
    assert bits_equal(lse_low, lse)
    assert (tuple(probs.shape), tuple(rng_state.shape)) == ((0,), (2,))
    buffers = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    softmax_d = interface._flash_attn_backward(
        dout, q, k, v, out_low, lse_low, *buffers, *settings, False, rng_state
    )
    for buffer, gradient in zip(buffers, expected, strict=True):
        assert gradient is not None
        assert bits_equal(buffer, gradient)
    sums = (dout.double() * out.double()).sum(-1).transpose(1, 2)
    assert tuple(softmax_d.shape) == (2, 4, 128)
    torch.testing.assert_close(softmax_d[..., :9].double(), sums, atol=1e-5, rtol=0)
    assert not softmax_d[..., 9:].any()


def test_packed_calls_have_the_bits_of_the_public_function() -> None:
    q, k, v, dout = packed_inputs()
    out, lse, _ = package.flash_attn_varlen_func(
        q, k, v, STARTS_Q, STARTS_K, *LONGEST, softmax_scale=SCALE, return_attn_probs=True
    )
    torch.autograd.backward(out, dout)
    q, k, v, expected = q.detach(), k.detach(), v.detach(), (q.grad, k.grad, v.grad)
    starts = (STARTS_Q, STARTS_K, *LONGEST)
    settings = (0.0, SCALE, False, -1, -1, 0.0, None)
    out_low, lse_low, _, _ = interface._flash_attn_varlen_forward(q, k, v, *starts, *settings)
    assert bits_equal(out_low, out)
    assert bits_equal(lse_low, lse)
    # Into one tensor, as flash_attn's packed functions do it.
    buffers = [torch.full((t.shape[0], 3, *t.shape[1:]), torch.nan).to(t)[:, 1] for t in (q, k, v)]
    softmax_d = interface._flash_attn_varlen_backward(
        dout, q, k, v, out_low, lse_low, *buffers, *starts, *settings, False
    )
    for buffer, gradient in zip(buffers, expected, strict=True):
        assert gradient is not None
        assert bits_equal(buffer, gradient)
    sums = (dout.float() * out.float()).sum(-1).t()
    wanted = torch.zeros(4, 20 + 3 * 128)
    wanted[:, :5], wanted[:, 5 + 256 : 18 + 256] = sums[:, :5], sums[:, 5:18]
    torch.testing.assert_close(softmax_d, wanted, atol=1e-5, rtol=0)


def test_pages_and_lengths_reach_the_op() -> None:
    q = normal(6, 2, 32)
    pages, table = normal(4, 16, 1, 32, seed=1), torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    starts, used = (int32(0, 2, 6), int32(0, 20, 50), 4, 32), int32(18, 30)
    expected = package.flash_attn_varlen_func(
        q, pages, pages, *starts, softmax_scale=SCALE, block_table=table, seqused_k=used
    )
    out, *_ = interface._flash_attn_varlen_forward(
        q, pages, pages, *starts, 0.0, SCALE, False, block_table=table, seqused_k=used
    )
    assert bits_equal(out, expected)


def test_dropout_repeats_with_its_rng_state() -> None:
    q, k, v, dout = dense_inputs()
    torch.manual_seed(5)
    out = package.flash_attn_func(q, k, v, 0.3, SCALE)
    torch.autograd.backward(out, dout)
    grad = q.grad
    q, k, v = q.detach(), k.detach(), v.detach()
    settings = (0.3, SCALE, False, -1, -1, 0.0, None)
    torch.manual_seed(5)
    out_low, lse, _, rng_state = interface._flash_attn_forward(q, k, v, *settings, False)
    assert bits_equal(out_low, out)
    dq = torch.empty_like(q)
    saved = (dout, q, k, v, out_low, lse, dq, None, None, *settings, False)
    interface._flash_attn_backward(*saved, rng_state)
    assert grad is not None
    assert bits_equal(dq, grad)
    with pytest.raises(ArgumentError, match="rng_state"):
        interface._flash_attn_backward(*saved)


def test_a_wrong_buffer_is_refused_before_anything_runs() -> None:
    q, k, v, dout = (t.detach() for t in dense_inputs())
    settings = (0.0, SCALE, False, -1, -1, 0.0, None)
    out, lse, *_ = interface._flash_attn_forward(q, k, v, *settings, False)
    dq = torch.zeros_like(q)
    with pytest.raises(
        ArgumentError, match=r"dk: expected a tensor like k, torch.bfloat16 \(2, 70"
    ):
        interface._flash_attn_backward(
            dout, q, k, v, out, lse, dq, torch.zeros_like(q), None, *settings, False
        )
    assert not dq.any()


@pytest.mark.parametrize(("changes", "message"), [
    pytest.param({"return_softmax": True}, "return_softmax: expected False", id="probs"),
    pytest.param({"softmax_scale": -1.0}, "softmax_scale: expected a positive", id="scale"),
    pytest.param({"cu_seqlens_q": None}, "cu_seqlens_q: expected a torch.Tensor", id="none"),
    pytest.param({"max_seqlen_q": "13"}, "max_seqlen_q: expected an int, got str", id="str"),
    pytest.param({"block_table": int32(1)}, "k: expected 4 dimensions", id="pages"),
])  # fmt: skip
def test_wrong_arguments_of_a_forward_are_refused_as_in_other_calls(
    changes: dict[str, Any], message: str
) -> None:
    """All messages: tests/unit/interface/test_mistakes.py."""
    q, k, v, _ = (t.detach() for t in packed_inputs())
    names = UPSTREAM["_flash_attn_varlen_forward"]
    values = (q, k, v, STARTS_Q, STARTS_K, *LONGEST, 0.0, SCALE, False)
    arguments = dict(zip(names, values, strict=False))
    with pytest.raises(FlashAttnError, match=f"^{message}"):
        interface._flash_attn_varlen_forward(**{**arguments, **changes})


@pytest.mark.parametrize(("changes", "message"), [
    pytest.param({"dout": None}, "dout: expected a torch.Tensor, got NoneType", id="dout"),
    pytest.param({"dout": normal(2, 8, 4, 32)}, "dout: expected a tensor like q", id="rows"),
    pytest.param({"out": normal(2, 9, 4, 32).float()}, "out: expected a tensor like q", id="out"),
    pytest.param({"softmax_lse": torch.ones(2, 4, 8)},
        r"softmax_lse: expected torch.float32 \(2, 4, 9\) .* \(2, 4, 8\)", id="lse"),
    pytest.param({"dropout_p": 1.5}, "dropout_p: expected a probability", id="probability"),
    pytest.param({"dropout_p": 0.5}, "rng_state: expected the tensor", id="no-seed"),
    pytest.param({"dropout_p": 0.5, "rng_state": torch.ones(2)},
        r"rng_state: expected torch.int64 \(2,\)", id="seed"),
    pytest.param({"dq": [1.0]}, "dq: expected a torch.Tensor, got list", id="dq"),
    pytest.param({"deterministic": "yes"}, "deterministic: expected a bool", id="flag"),
    pytest.param({"alibi_slopes": torch.ones(3)}, "alibi_slopes: expected shape", id="slopes"),
])  # fmt: skip
def test_wrong_arguments_of_a_backward(changes: dict[str, Any], message: str) -> None:
    q, k, v, dout = (t.detach() for t in dense_inputs())
    settings = (0.0, SCALE, False, -1, -1, 0.0, None)
    out, lse, *_ = interface._flash_attn_forward(q, k, v, *settings, False)
    values = (dout, q, k, v, out, lse, None, None, None, *settings, False, None)
    arguments = dict(zip(UPSTREAM["_flash_attn_backward"], values, strict=True))
    with pytest.raises(FlashAttnError, match=f"^{message}"):
        interface._flash_attn_backward(**{**arguments, **changes})


def test_a_head_dim_that_no_kernel_takes_is_refused() -> None:
    with pytest.raises(ArgumentError, match="multiple of 8, got 12"):
        interface._flash_attn_forward(
            *[normal(1, 3, 1, 12)] * 3, 0.0, 1.0, False, -1, -1, 0.0, None, False
        )
