"""The backward of the reference, against gradcheck and autograd."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attention_cases import Inputs, make_inputs, softmax_attention
from backward_cases import (
    BackwardCall,
    autograd_gradients,
    make_backward,
    normal_like,
    same_gradients,
)
from contract_cases import RAGGED, cumulative, make_call
from flash_attn_deterministic.errors import ArgumentError, DtypeError
from flash_attn_deterministic.reference import (
    Formats,
    attention,
    attention_backward,
    varlen_attention,
    varlen_attention_backward,
)

SLOPES = torch.tensor([[0.5, 0.25, 0.125, 0.3], [0.1, 0.2, 0.4, 0.8]])
RNG = torch.tensor([2**61 + 5, 77])
SCALE = 0.3

# Keyword arguments of both reference.attention and softmax_attention.
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "window-left": {"window": (2, -1)},
    "softcap": {"softcap": 1.5},
    "alibi": {"causal": True, "alibi_slopes": SLOPES},
    "everything": {"window": (4, 1), "softcap": 2.0, "alibi_slopes": SLOPES},
}
features = pytest.mark.parametrize("feature", FEATURES)
heads = pytest.mark.parametrize("nheads_k", [4, 2, 1], ids=["mha", "gqa", "mqa"])
# Some have keys that no row sees, or rows that see no key.
shapes = pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(9, 9), (5, 12), (12, 5), (1, 7), (3, 0)], ids=str
)


# --- gradcheck ----------------------------------------------------------------------------------


class _Reference(torch.autograd.Function):
    """The reference's gradients as those of its forward."""

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], starts: Any, *inputs: torch.Tensor) -> Any:
        function: Any = varlen_attention if starts else attention
        results = function(*inputs, *starts, **options)
        ctx.save_for_backward(*inputs, *results)
        ctx.call = options, starts
        return results[0]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        options, starts = ctx.call
        function: Any = varlen_attention_backward if starts else attention_backward
        return None, None, *function(dout, *ctx.saved_tensors, *starts, **options)


attend: Any = _Reference.apply


@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["plain", "dropout"])
@features
def test_gradcheck(feature: str, dropout_p: float) -> None:
    options = {**FEATURES[feature], "softmax_scale": SCALE}
    options |= {"dropout_p": dropout_p, "rng_state": RNG}
    inputs = [x.requires_grad_() for x in make_inputs(2, 3, 4, 4, 2, 4, torch.float64)]
    assert torch.autograd.gradcheck(lambda *qkv: attend(options, (), *qkv), inputs)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["plain", "dropout"])
def test_gradcheck_of_packed_sequences(dropout_p: float) -> None:
    starts = cumulative([3, 0, 4, 1]), cumulative([2, 3, 5, 0])
    options = {"softmax_scale": SCALE, "causal": True, "dropout_p": dropout_p, "rng_state": RNG}
    shapes = ((8, 2, 4), (10, 1, 4), (10, 1, 4))
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(lambda *qkv: attend(options, starts, *qkv), inputs)


# --- autograd of the definition -----------------------------------------------------------------


def _reference(inputs: Inputs, dout: torch.Tensor, **options: Any) -> Inputs:
    options["softmax_scale"] = SCALE
    return attention_backward(dout, *inputs, *attention(*inputs, **options), **options)


@features
@heads
@shapes
def test_float64_is_the_definition(
    feature: str, nheads_k: int, seqlen_q: int, seqlen_k: int
) -> None:
    options = FEATURES[feature]
    inputs = make_inputs(2, seqlen_q, seqlen_k, 4, nheads_k, 8, torch.float64)
    dout = normal_like(inputs[0])
    expected = autograd_gradients(
        lambda q, k, v: softmax_attention(q, k, v, SCALE, **options)[0], inputs, dout
    )
    for ours, exact in zip(_reference(inputs, dout, **options), expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-12)


@features
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_small_dtypes_are_close_to_float64(feature: str, dtype: torch.dtype) -> None:
    """Not further from float64 than the formula in dtype, with its rounding of P and dS."""
    options = FEATURES[feature]
    inputs = make_inputs(2, 70, 90, 4, 2, 32, dtype)
    dout = normal_like(inputs[0])
    exact = autograd_gradients(
        lambda q, k, v: softmax_attention(q, k, v, SCALE, **options)[0],
        tuple(x.double() for x in inputs),  # type: ignore[arg-type]
        dout.double(),
    )
    for ours, expected in zip(_reference(inputs, dout, **options), exact, strict=True):
        assert ours.dtype == dtype
        bound = 2 * torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=max(bound, 1e-5))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_error_is_at_most_twice_that_of_torch(dtype: torch.dtype, causal: bool) -> None:
    inputs = make_inputs(1, 200, 200, 4, 4, 64, dtype)
    dout = normal_like(inputs[0])

    def sdpa(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in tensors)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return out.transpose(1, 2)

    doubles: Inputs = tuple(x.double() for x in inputs)  # type: ignore[assignment]
    exact = autograd_gradients(sdpa, doubles, dout.double())
    torchs = autograd_gradients(sdpa, inputs, dout)
    ours = attention_backward(dout, *inputs, *attention(*inputs, causal=causal), causal=causal)
    for a, b, expected in zip(ours, torchs, exact, strict=True):
        error, allowed = (x.double() - expected for x in (a, b))
        assert error.abs().max() <= 2 * allowed.abs().max()
        assert error.square().mean() <= 4 * allowed.square().mean()


def test_packed_sequences_are_the_definition() -> None:
    seqlens = [(q % 20, k % 23) for q, k in RAGGED]
    starts_q = cumulative([q for q, _ in seqlens])
    starts_k = cumulative([k for _, k in seqlens])
    shape = (int(starts_q[-1]), int(starts_k[-1]), 4, 2, 8, torch.float64)
    inputs: Inputs = tuple(x[0] for x in make_inputs(1, *shape))  # type: ignore[assignment]
    dout = normal_like(inputs[0])

    def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = itertools.pairwise(starts_q.tolist())
        keys = itertools.pairwise(starts_k.tolist())
        return torch.cat(
            [
                softmax_attention(q[None, a:b], k[None, c:d], v[None, c:d], SCALE, True)[0][0]
                for (a, b), (c, d) in zip(rows, keys, strict=True)
            ]
        )

    options: Any = {"softmax_scale": SCALE, "causal": True}
    out = varlen_attention(*inputs, starts_q, starts_k, **options)
    ours = varlen_attention_backward(dout, *inputs, *out, starts_q, starts_k, **options)
    for a, b in zip(ours, autograd_gradients(definition, inputs, dout), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# --- Rows and keys without each other -----------------------------------------------------------


def test_rows_without_a_key_contribute_nothing() -> None:
    call = make_backward("causal", 2, 9, 4)
    dq, dk, dv = call()
    assert dq[:, :5].abs().max() == 0
    assert dq[:, 5:].abs().max() > 0
    call.dout[:, :5] = float("nan")
    assert same_gradients(call(), (dq, dk, dv))


def test_keys_that_no_row_sees_have_zero_gradients() -> None:
    call = BackwardCall.of(make_call("window", 1, 3, 65))
    _, dk, dv = call()
    for tensor in (dk, dv):
        assert tensor[:, :40].abs().max() == 0
        assert not tensor[:, :40].signbit().any()
        assert tensor[:, 50:].abs().max() > 0


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0), (0, 0)], ids=str)
def test_no_queries_or_no_keys(seqlen_q: int, seqlen_k: int) -> None:
    inputs = make_inputs(2, seqlen_q, seqlen_k)
    result = _reference(inputs, normal_like(inputs[0]))
    assert same_gradients(result, [torch.zeros_like(x) for x in inputs])


# --- Formats and arguments ----------------------------------------------------------------------


@pytest.mark.parametrize("step", ["scores", "probs", "dprobs", "dscores"])
def test_formats_count(step: str) -> None:
    inputs = make_inputs(1, 9, 17, dtype=torch.float32)
    dout = normal_like(inputs[0])
    out = attention(*inputs)
    exact = attention_backward(dout, *inputs, *out)
    rounded = attention_backward(dout, *inputs, *out, formats=Formats(**{step: torch.bfloat16}))
    assert not same_gradients(exact, rounded)
    for a, b in zip(exact, rounded, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.1)


def test_probs_and_dscores_default_to_the_input_dtype() -> None:
    inputs = make_inputs(1, 9, 17)
    dout = normal_like(inputs[0])
    out = attention(*inputs)
    given = Formats(probs=torch.bfloat16, dscores=torch.bfloat16)
    usual = attention_backward(dout, *inputs, *out)
    assert same_gradients(usual, attention_backward(dout, *inputs, *out, formats=given))
    other = Formats(dscores=torch.float32)
    assert not same_gradients(usual, attention_backward(dout, *inputs, *out, formats=other))


def test_wrong_arguments() -> None:
    inputs = make_inputs()
    out = attention(*inputs)
    with pytest.raises(ArgumentError, match="rng_state: expected seed and offset"):
        attention_backward(inputs[0], *inputs, *out, dropout_p=0.1)
    with pytest.raises(ArgumentError, match="rng_state: expected seed and offset"):
        attention(*inputs, dropout_p=0.1)
    q, k, v = (x.int() for x in inputs)
    with pytest.raises(DtypeError, match="q: expected a floating-point dtype"):
        attention_backward(q, q, k, v, *out)
