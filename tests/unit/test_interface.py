from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from attention_cases import make_inputs, softmax_attention, tolerance
from bits import bits_equal
from flash_attn_deterministic import flash_attn_func, reference
from flash_attn_deterministic.errors import DtypeError, UnsupportedError
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16"),
]


def test_signature_is_that_of_flash_attn() -> None:
    parameters = inspect.signature(flash_attn_func).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "q": inspect.Parameter.empty,
        "k": inspect.Parameter.empty,
        "v": inspect.Parameter.empty,
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": None,
        "return_attn_probs": False,
    }
    kinds = {p.kind for p in parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@st.composite
def _calls(draw: st.DrawFn) -> dict[str, object]:
    nheads_k = draw(st.integers(1, 3))
    return {
        "batch": draw(st.integers(1, 3)),
        "seqlen_q": draw(st.integers(0, 140)),
        "seqlen_k": draw(st.integers(0, 140)),
        "nheads_k": nheads_k,
        "nheads": nheads_k * draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([1, 7, 8, 20, 32, 33, 64, 72])),
        "dtype": draw(st.sampled_from([torch.float16, torch.bfloat16])),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=40, deadline=None)
@given(
    call=_calls(),
    causal=st.booleans(),
    softmax_scale=st.none() | st.floats(0.0, 1.0, exclude_min=True),
)
def test_any_call_is_close_to_float64_softmax(
    call: dict[str, int], causal: bool, softmax_scale: float | None
) -> None:
    q, k, v = make_inputs(**call)  # type: ignore[arg-type]
    out, softmax_lse, s_dmask = flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, return_attn_probs=True
    )
    exact_out, exact_lse = softmax_attention(q, k, v, softmax_scale, causal)
    batch, seqlen_q, nheads, _ = q.shape
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert softmax_lse.shape == (batch, nheads, seqlen_q)
    assert softmax_lse.dtype == torch.float32
    assert s_dmask.shape == (0,)
    assert s_dmask.dtype == q.dtype
    torch.testing.assert_close(out.double(), exact_out, rtol=0, atol=tolerance(q.dtype, v))
    torch.testing.assert_close(softmax_lse.double(), exact_lse, rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 160, 224, 256])
def test_cpu_is_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = make_inputs(1, 3, 140, 2, 1, head_dim, dtype)
    out, softmax_lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    expected_out, expected_lse = reference.attention(q, k, v, causal=True)
    assert bits_equal(out, expected_out)
    assert bits_equal(softmax_lse, expected_lse)


@pytest.mark.parametrize("head_dim", [1, 20, 100])
def test_head_dim_is_padded_after_the_scale_is_taken(head_dim: int) -> None:
    q, k, v = make_inputs(1, 3, 140, 2, 1, head_dim)
    out = flash_attn_func(q, k, v)
    assert out.shape == q.shape
    assert bits_equal(out, flash_attn_func(q, k, v, softmax_scale=head_dim**-0.5))


def test_strided_last_dimension() -> None:
    q, k, v = make_inputs(2, 5, 9, 2, 2, 64)
    expected = flash_attn_func(q, k, v)
    q_strided, k_strided, v_strided = (torch.stack([x, x + 1], dim=-1)[..., 0] for x in (q, k, v))
    assert q_strided.stride(-1) == 2
    assert bits_equal(flash_attn_func(q_strided, k_strided, v_strided), expected)
    expanded = q[..., :1].expand(-1, -1, -1, 64)
    assert bits_equal(flash_attn_func(expanded, k, v), flash_attn_func(expanded.clone(), k, v))


def test_inputs_are_left_as_they_are() -> None:
    inputs = make_inputs(2, 5, 9, head_dim=20)
    before = [x.clone() for x in inputs]
    flash_attn_func(*inputs, causal=True)
    assert all(bits_equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_no_keys() -> None:
    q, k, v = make_inputs(2, 3, 0)
    out, softmax_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert bits_equal(out, torch.zeros_like(q))
    assert bits_equal(softmax_lse, torch.full((2, 2, 3), math.inf))


def test_no_queries() -> None:
    q, k, v = make_inputs(2, 0, 3)
    out, softmax_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.shape == (2, 0, 2, 32)
    assert softmax_lse.shape == (2, 2, 0)


@pytest.mark.parametrize("deterministic", [None, False, True])
def test_forward_ignores_deterministic(deterministic: bool | None) -> None:
    q, k, v = make_inputs()
    out = flash_attn_func(q, k, v, deterministic=deterministic)
    assert bits_equal(out, flash_attn_func(q, k, v))


def test_meta_tensors_give_shapes() -> None:
    q, k, v = (x.to("meta") for x in make_inputs(2, 3, 5, head_dim=20))
    out, softmax_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, q.dtype, "meta")
    assert (softmax_lse.shape, softmax_lse.dtype) == ((2, 2, 3), torch.float32)


def test_backward_says_that_it_is_missing() -> None:
    q, k, v = (x.requires_grad_() for x in make_inputs())
    out = flash_attn_func(q, k, v)
    assert out.requires_grad
    with pytest.raises(UnsupportedError, match=r"has no backward: .* torch\.no_grad\(\)") as caught:
        out.sum().backward()  # type: ignore[no-untyped-call, unused-ignore]
    assert isinstance(caught.value, NotImplementedError)


def test_backward_from_softmax_lse_says_so_too() -> None:
    q, k, v = (x.requires_grad_() for x in make_inputs())
    _, softmax_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    with pytest.raises(UnsupportedError, match="has no backward"):
        softmax_lse.sum().backward()  # type: ignore[no-untyped-call, unused-ignore]


# --- torch.compile ------------------------------------------------------------------------------


@pytest.fixture
def dynamo() -> None:
    torch._dynamo.reset()


def _compile(**options: Any) -> Any:
    return torch.compile(flash_attn_func, **options)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "grad"])
@pytest.mark.parametrize("head_dim", [64, 20], ids=["aligned", "padded"])
def test_compiles_without_a_graph_break(backend: str, requires_grad: bool, head_dim: int) -> None:
    q, k, v = make_inputs(2, 5, 9, 4, 2, head_dim)
    q.requires_grad_(requires_grad)
    compiled = _compile(fullgraph=True, backend=backend)
    out, softmax_lse, _ = compiled(q, k, v, causal=True, return_attn_probs=True)
    expected_out, expected_lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert bits_equal(out, expected_out)
    assert bits_equal(softmax_lse, expected_lse)
    assert out.requires_grad == requires_grad


@pytest.mark.usefixtures("dynamo")
def test_compiles_once_for_all_lengths_and_batches() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")  # type: ignore[no-untyped-call, unused-ignore]
    compiled = _compile(fullgraph=True, backend=counter, dynamic=True)
    # No two sizes of the first call are equal: torch.compile would take them for one.
    counts = []
    for batch, seqlen_q, seqlen_k in ((3, 5, 9), (7, 6, 70), (11, 130, 131)):
        q, k, v = make_inputs(batch, seqlen_q, seqlen_k, 4, 2, 64)
        assert bits_equal(compiled(q, k, v, causal=True), flash_attn_func(q, k, v, causal=True))
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert counts == counts[:1] * 3


@pytest.mark.usefixtures("dynamo")
def test_compiled_backward_fails_when_it_runs() -> None:
    q, k, v = (x.requires_grad_() for x in make_inputs())
    compiled = _compile(fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    with pytest.raises(UnsupportedError, match="has no backward"):
        out.sum().backward()  # type: ignore[no-untyped-call, unused-ignore]


@pytest.mark.usefixtures("dynamo")
def test_errors_keep_their_type_under_compile() -> None:
    q, k, v = make_inputs()
    compiled = _compile(backend="eager")
    with pytest.raises(DtypeError, match=r"k: expected torch\.bfloat16, .*got torch\.float32"):
        compiled(q, k.float(), v)
