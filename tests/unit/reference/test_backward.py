"""The backward of the reference, against autograd of the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Inputs, definition, drawn, make_inputs, normal_like
from bits import all_equal
from flash_attn_deterministic.errors import ArgumentError, DtypeError
from flash_attn_deterministic.reference import Formats, attention, attention_backward
from flash_attn_deterministic.reference.dropout import keep_mask, keep_probability

SLOPES = torch.tensor([[0.5, 0.25, 0.125, 0.3], [0.1, 0.2, 0.4, 0.8]])
RNG = torch.tensor([2**61 + 5, 77])
SCALE = 0.3

# Keyword arguments of both reference.attention and `definition`.
FEATURES: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "window": {"window": (3, 2)},
    "window-left": {"window": (2, -1)}, "softcap": {"softcap": 1.5},
    "alibi": {"causal": True, "alibi_slopes": SLOPES},
    "everything": {"window": (4, 1), "softcap": 2.0, "alibi_slopes": SLOPES},
}  # fmt: skip
features = pytest.mark.parametrize("feature", FEATURES)
heads = pytest.mark.parametrize("nheads_k", [4, 2, 1], ids=["mha", "gqa", "mqa"])
# Some have keys that no row sees, or rows that see no key.
shapes = pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(9, 9), (5, 12), (12, 5), (1, 7), (3, 0)], ids=str
)


# --- autograd of the definition -----------------------------------------------------------------


def _reference(inputs: Inputs, dout: torch.Tensor, **options: Any) -> Inputs:
    options["softmax_scale"] = SCALE
    return attention_backward(dout, *inputs, *attention(*inputs, **options), **options)


@features
@heads
@shapes
@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["plain", "dropout"])
def test_float64_is_the_definition(
    feature: str, nheads_k: int, seqlen_q: int, seqlen_k: int, dropout_p: float
) -> None:
    options = FEATURES[feature]
    inputs = make_inputs(2, seqlen_q, seqlen_k, 4, nheads_k, 8, torch.float64)
    dout = normal_like(inputs[0])
    exact = definition(inputs[0], SCALE, **options)
    if dropout_p:
        places = torch.arange(2), torch.arange(4), (0, seqlen_q), (0, seqlen_k)
        keep = keep_mask(RNG, dropout_p, *places)
        # The probability of keeping has 32 bits, as in the kernels.
        exact = replace(exact, dropout_p=1 - keep_probability(dropout_p), keep=keep)
    found = _reference(inputs, dout, **options, dropout_p=dropout_p, rng_state=RNG)
    for ours, wanted in zip(found, exact.gradients(*inputs, dout), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


# --- Rows and keys without each other -----------------------------------------------------------


def test_rows_without_a_key_contribute_nothing() -> None:
    call = drawn("causal", 2, 9, 4)
    dq, dk, dv = call.gradients().values()
    assert dq[:, :5].abs().max() == 0
    assert dq[:, 5:].abs().max() > 0
    call.dout[:, :5] = float("nan")
    assert all_equal(call.gradients().values(), (dq, dk, dv))


def test_keys_that_no_row_sees_have_zero_gradients() -> None:
    _, dk, dv = drawn("window", 1, 3, 65).gradients().values()
    for tensor in (dk, dv):
        assert tensor[:, :40].abs().max() == 0
        assert not tensor[:, :40].signbit().any()
        assert tensor[:, 50:].abs().max() > 0


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0), (0, 0)], ids=str)
def test_no_queries_or_no_keys(seqlen_q: int, seqlen_k: int) -> None:
    inputs = make_inputs(2, seqlen_q, seqlen_k)
    result = _reference(inputs, normal_like(inputs[0]))
    assert all_equal(result, [torch.zeros_like(x) for x in inputs])


# --- Formats and arguments ----------------------------------------------------------------------


@pytest.mark.parametrize("step", ["scores", "probs", "dprobs", "dscores"])
def test_formats_count(step: str) -> None:
    inputs = make_inputs(1, 9, 17, dtype=torch.float32)
    dout = normal_like(inputs[0])
    out = attention(*inputs)
    exact = attention_backward(dout, *inputs, *out)
    rounded = attention_backward(dout, *inputs, *out, formats=Formats(**{step: torch.bfloat16}))
    assert not all_equal(exact, rounded)
    for a, b in zip(exact, rounded, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.1)


def test_probs_and_dscores_default_to_the_input_dtype() -> None:
    inputs = make_inputs(1, 9, 17)
    dout = normal_like(inputs[0])
    out = attention(*inputs)
    given = Formats(probs=torch.bfloat16, dscores=torch.bfloat16)
    usual = attention_backward(dout, *inputs, *out)
    assert all_equal(usual, attention_backward(dout, *inputs, *out, formats=given))
    other = Formats(dscores=torch.float32)
    assert not all_equal(usual, attention_backward(dout, *inputs, *out, formats=other))


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
