"""Gradients through the public functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from attention_cases import autograd_gradients, make_inputs, normal_like
from bits import all_equal, bits_equal
from calls import (
    CALLS,
    DIFFERENTIABLE,
    Call,
    Counted,
    compiled,
    int32,
    normal,
    paged_call,
    qkv_call,
    unpacked,
    varlen_call,
)
from flash_attn_deterministic import deterministic_mode, flash_attn_func
from flash_attn_deterministic.checks import kernels
from flash_attn_deterministic.errors import UnsupportedError
from flash_attn_deterministic.schemas import BACKWARD

names = pytest.mark.parametrize("name", DIFFERENTIABLE)
head_dims = pytest.mark.parametrize("head_dim", [32, 20], ids=["aligned", "padded"])


def gradients(
    call: Call, function: Callable[..., Any] | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Results of a call, and gradients of its inputs for a random dout and, where it returns
    softmax_lse, a dlse of other strides."""
    leaves = call.leaves()
    torch.manual_seed(0)
    result = (function or call.function)(**{**call.arguments, **leaves, **options})
    outputs = result if isinstance(result, tuple) else (result,)
    given = [normal_like(outputs[0]), *(normal_like(lse.mT).mT for lse in outputs[1:2])]
    found = torch.autograd.grad(outputs[:2], list(leaves.values()), given)
    results = {f"output {i}": x.detach() for i, x in enumerate(outputs) if x is not None}
    return {**dict(zip(leaves, found, strict=True)), **results}


# --- Values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["plain", "dropout"])
@head_dims
@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if "packed" in name])
def test_packed_tensors_get_the_results_and_gradients_of_their_parts(
    name: str, head_dim: int, dropout_p: float
) -> None:
    call = CALLS[name](head_dim)
    options: dict[str, Any] = {"return_attn_probs": True, "window_size": (4, 1), "softcap": 3.0}
    packed = gradients(call, dropout_p=dropout_p, **options)
    parts = gradients(unpacked(call), dropout_p=dropout_p, **options)
    dim, tensor = 1 if "varlen" in name else 2, "qkv" if "qkv" in packed else "kv"
    parts[tensor] = torch.stack([parts[n] for n in tensor], dim)
    assert all(bits_equal(x, parts[n]) for n, x in packed.items())


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if "packed" in name])
def test_gradient_of_a_packed_tensor_is_not_copied(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packed tensor's gradient is the tensor that the op fills."""
    ops = torch.ops.flash_attn_deterministic
    op = "varlen_qkvpacked_bwd" if "varlen" in name else "qkvpacked_bwd"
    backward = getattr(ops, op)
    written: list[torch.Tensor] = []

    def spy(*arguments: Any) -> Any:
        results = backward(*arguments)
        written.extend(results)
        return results

    monkeypatch.setattr(ops, op, spy)
    found = gradients(CALLS[name](32))
    _, packed = written
    assert packed.is_contiguous()
    assert found["qkv" if "qkv" in found else "kv"].data_ptr() == packed.data_ptr()
    if "q" in found:
        assert found["q"].data_ptr() == written[0].data_ptr()
    else:
        assert written[0].shape == (0,)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_one_gradient_alone(which: str) -> None:
    call = qkv_call()
    leaf = call.leaves()[which]
    out = call(**{which: leaf})
    (found,) = torch.autograd.grad(out, leaf, normal_like(out))
    assert bits_equal(found, gradients(call)[which])


@pytest.mark.parametrize("form", ["sum", "expanded", "transposed", "strided"])
def test_dout_of_any_strides(form: str) -> None:
    call = qkv_call()
    leaf = call.leaves()["q"]
    out = call(q=leaf)
    dout = {
        "sum": torch.ones_like(out),
        "expanded": normal_like(out[:1]).expand_as(out),
        "transposed": normal_like(out.transpose(1, 2).contiguous()).transpose(1, 2),
        "strided": torch.stack([normal_like(out)] * 2, dim=-1)[..., 0],
    }[form]
    (expected,) = torch.autograd.grad(out, leaf, dout.clone().contiguous(), retain_graph=True)
    if form == "sum":
        (found,) = torch.autograd.grad(out.sum(), leaf)
    else:
        (found,) = torch.autograd.grad(out, leaf, dout)
    assert bits_equal(found, expected)


# --- No gradient --------------------------------------------------------------------------------


@names
def test_s_dmask_has_no_gradient(name: str) -> None:
    call = CALLS[name](32)
    leaves = call.leaves()
    out, softmax_lse, s_dmask = call(**leaves, return_attn_probs=True, dropout_p=0.2)
    assert out.requires_grad
    assert softmax_lse.requires_grad
    assert not s_dmask.requires_grad


@pytest.mark.parametrize("form", ["eager", "compiled"])
@names
def test_alibi_slopes_have_no_gradient(name: str, form: str) -> None:
    call = CALLS[name](32)
    function = compiled(call.function) if form == "compiled" else call.function
    slopes = torch.ones(4, requires_grad=True)
    out = function(**call.arguments, alibi_slopes=slopes)
    assert not out.requires_grad
    leaves = call.leaves()
    function(**{**call.arguments, **leaves}, alibi_slopes=slopes).sum().backward()
    assert slopes.grad is None
    assert all(leaf.grad is not None for leaf in leaves.values())


@names
def test_double_backward_raises(name: str) -> None:
    call = CALLS[name](32)
    leaves = call.leaves()
    first, *_ = torch.autograd.grad(
        call(**leaves).float().square().sum(), list(leaves.values()), create_graph=True
    )
    with pytest.raises(UnsupportedError, match=r"double backward: .* without create_graph"):
        first.sum().backward()  # type: ignore[no-untyped-call, unused-ignore]


FORWARD_ONLY = [
    pytest.param(varlen_call, {"seqused_k": int32(4, 2, 9)}, "seqused_k", id="seqused"),
    pytest.param(varlen_call, {"leftpad_k": int32(1, 0, 3)}, "leftpad_k", id="leftpad"),
    pytest.param(paged_call, {}, "block_table", id="paged"),
]


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize(("make", "options", "name"), FORWARD_ONLY)
def test_gradient_where_there_is_no_backward(
    make: Callable[[], Call], options: dict[str, torch.Tensor], name: str, which: str
) -> None:
    call = make()
    leaf = call.leaves()[which]
    expected = call(**options)
    out = call(**options, **{which: leaf})
    assert bits_equal(out, expected)
    with pytest.raises(UnsupportedError, match=f"{name}: there is no backward with it") as caught:
        out.sum().backward()
    assert isinstance(caught.value, NotImplementedError)
    function = compiled(call.function)
    with pytest.raises(Exception, match=f"{name}: .* and q, k or v requires a gradient"):
        function(**{**call.arguments, **options, which: leaf})
    with torch.no_grad():
        assert bits_equal(function(**{**call.arguments, **options, which: leaf}), expected)
        assert bits_equal(call(**options, **{which: leaf}), expected)
    with torch.inference_mode():
        assert bits_equal(call(**options, **{which: leaf}), expected)


# --- The mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [None, True, False, "never"])
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@names
def test_backward_gets_what_the_forward_resolved(
    name: str,
    enabled: bool,
    deterministic: bool | str | None,
    backward_calls: list[tuple[str, bool]],
) -> None:
    call = CALLS[name](32)
    leaves = call.leaves()
    with deterministic_mode(enabled):
        out = call(**leaves, deterministic=deterministic)
    with deterministic_mode(not enabled):
        out.sum().backward()
    # False follows the mode: it is flash_attn's default, which frameworks pass on.
    ((_, found),) = backward_calls
    assert found == {True: True, "never": False}.get(deterministic, enabled)


@names
def test_refused_backward_checks_for_its_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*arguments: Any) -> NoReturn:
        raise RuntimeError("refused by the op")

    for op in BACKWARD:
        monkeypatch.setattr(torch.ops.flash_attn_deterministic, op, refuse)
    monkeypatch.setattr(kernels, "check_kernels", lambda *arguments: asked.append(arguments))
    with pytest.raises(RuntimeError, match="refused by the op"):
        gradients(CALLS[name](20))
    assert asked[-1] == (torch.device("cpu"), torch.bfloat16, 24, "bwd")


# --- torch.compile ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        pytest.param(32, {"dropout_p": 0.3, "return_attn_probs": True}, id="dropout"),
        pytest.param(
            20,
            {
                "window_size": (4, 0),
                "softcap": 3.0,
                "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0]),
                "deterministic": False,
            },
            id="options",
        ),
    ],
)
@names
def test_compiled_gradients(name: str, head_dim: int, options: dict[str, Any]) -> None:
    call = CALLS[name](head_dim)
    expected = gradients(call, **options)
    found = gradients(call, compiled(call.function), **options)
    assert all(bits_equal(found[tensor], x) for tensor, x in expected.items())


@pytest.mark.parametrize(
    ("make", "head_dim", "changes"),
    [
        pytest.param(qkv_call, 48, {"v": normal(2, 9, 2, 32)}, id="two-head-dims"),
        pytest.param(
            varlen_call,
            32,
            {"learnable_sink": torch.tensor([0.5, -1.0, 2.0, 30.0]), "return_attn_probs": True},
            id="sinks",
        ),
    ],
)
def test_compiled_gradients_of_other_tensors(
    make: Callable[[int], Call], head_dim: int, changes: dict[str, Any]
) -> None:
    call = make(head_dim)
    call.arguments |= changes
    expected, found = gradients(call), gradients(call, compiled(call.function))
    assert all(bits_equal(found[name], tensor) for name, tensor in expected.items())


def test_compiles_once_for_all_lengths() -> None:
    once = Counted(flash_attn_func, dynamic=True)
    counts = []
    for batch, seqlen_q, seqlen_k in ((3, 5, 9), (7, 6, 20), (11, 30, 31)):
        inputs = make_inputs(batch, seqlen_q, seqlen_k, 4, 2, 64)
        dout = normal_like(inputs[0])
        expected = autograd_gradients(
            lambda q, k, v: flash_attn_func(q, k, v, causal=True), inputs, dout
        )
        found = autograd_gradients(lambda q, k, v: once(q, k, v, causal=True), inputs, dout)
        assert all_equal(found, expected)
        counts.append(once.count)
    assert counts[0] > 0
    assert counts == counts[:1] * 3
