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
TENSORS = ("q", "k", "v", "qkv", "kv", "learnable_sink")


def leaves_of(call: Call) -> dict[str, torch.Tensor]:
    """The call's q, k and v, or the packed tensors."""
    return {name: call.arguments[name] for name in TENSORS if name in call.arguments}


def gradients(
    call: Call, function: Callable[..., Any] | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Results of a call, and gradients of its inputs for a random dout and, where it returns
    softmax_lse, a dlse of other strides."""
    leaves = {n: x.clone().requires_grad_() for n, x in leaves_of(call).items()}
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
def test_packed_tensors_get_the_gradients_of_their_parts(
    name: str, head_dim: int, dropout_p: float
) -> None:
    call = CALLS[name](head_dim)
    packed = gradients(call, dropout_p=dropout_p)
    dim = 1 if "varlen" in name else 2
    parts = gradients(unpacked(call), dropout_p=dropout_p)
    if "qkv" in packed:
        assert bits_equal(packed["qkv"], torch.stack([parts[n] for n in "qkv"], dim))
    else:
        assert bits_equal(packed["q"], parts["q"])
        assert bits_equal(packed["kv"], torch.stack([parts[n] for n in "kv"], dim))


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
    leaf = call.arguments[which].clone().requires_grad_()
    out = call(**{which: leaf})
    (found,) = torch.autograd.grad(out, leaf, normal_like(out))
    assert bits_equal(found, gradients(call)[which])


@pytest.mark.parametrize("form", ["sum", "expanded", "transposed", "strided"])
def test_dout_of_any_strides(form: str) -> None:
    call = qkv_call()
    leaf = call.arguments["q"].clone().requires_grad_()
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
    leaves = {n: x.clone().requires_grad_() for n, x in leaves_of(call).items()}
    out, softmax_lse, s_dmask = call(**leaves, return_attn_probs=True, dropout_p=0.2)
    assert out.requires_grad
    assert softmax_lse.requires_grad
    assert not s_dmask.requires_grad


@pytest.mark.parametrize("form", ["eager", "compiled"])
@names
def test_alibi_slopes_have_no_gradient(name: str, form: str) -> None:
    torch._dynamo.reset()
    call = CALLS[name](32)
    function = call.function
    if form == "compiled":
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    slopes = torch.ones(4, requires_grad=True)
    out = function(**call.arguments, alibi_slopes=slopes)
    assert not out.requires_grad
    leaves = {n: x.clone().requires_grad_() for n, x in leaves_of(call).items()}
    function(**{**call.arguments, **leaves}, alibi_slopes=slopes).sum().backward()
    assert slopes.grad is None
    assert all(leaf.grad is not None for leaf in leaves.values())


@names
def test_double_backward_raises(name: str) -> None:
    call = CALLS[name](32)
    leaves = {n: x.clone().requires_grad_() for n, x in leaves_of(call).items()}
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
    leaf = call.arguments[which].clone().requires_grad_()
    expected = call(**options)
    out = call(**options, **{which: leaf})
    assert bits_equal(out, expected)
    with pytest.raises(UnsupportedError, match=f"{name}: there is no backward with it") as caught:
        out.sum().backward()
    assert isinstance(caught.value, NotImplementedError)
    torch._dynamo.reset()
    compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=f"{name}: .* and q, k or v requires a gradient"):
        compiled(**{**call.arguments, **options, which: leaf})
    with torch.no_grad():
        assert bits_equal(call(**options, **{which: leaf}), expected)
    with torch.inference_mode():
        assert bits_equal(call(**options, **{which: leaf}), expected)


def test_backward_of_an_op_without_one_raises() -> None:
    call = varlen_call().arguments
    leaf = call["q"].clone().requires_grad_()
    out, _ = torch.ops.flash_attn_deterministic.varlen_fwd(
        *(leaf, call["k"], call["v"], call["cu_seqlens_q"], call["cu_seqlens_k"]),
        *(int32(4, 2, 9), None, None, None, None, 5, 9, 0.0, 0.2, -1, 0, 0.0, 0, True, True),
    )
    with pytest.raises(UnsupportedError, match="seqused_k: there is no backward"):
        out.sum().backward()


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
    leaves = {n: x.clone().requires_grad_() for n, x in leaves_of(call).items()}
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


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        pytest.param(32, {}, id="plain"),
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
    compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    expected, found = gradients(call, **options), gradients(call, compiled, **options)
    for tensor, gradient in expected.items():
        assert bits_equal(found[tensor], gradient)


@pytest.mark.usefixtures("dynamo")
@names
def test_compiled_dropout(name: str) -> None:
    call = CALLS[name](32)
    compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    options: dict[str, Any] = {"dropout_p": 0.3, "return_attn_probs": True}
    expected, found = gradients(call, **options), gradients(call, compiled, **options)
    for tensor, gradient in expected.items():
        assert bits_equal(found[tensor], gradient)


@pytest.mark.usefixtures("dynamo")
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
    compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    expected, found = gradients(call), gradients(call, compiled)
    assert all(bits_equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.usefixtures("dynamo")
def test_compiled_forward_without_a_backward() -> None:
    call = varlen_call()
    compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    leaf = call.arguments["q"].clone().requires_grad_()
    arguments = {**call.arguments, "seqused_k": int32(4, 2, 9), "q": leaf}
    with torch.no_grad():
        assert bits_equal(compiled(**arguments), call(seqused_k=int32(4, 2, 9)))


def test_compiles_once_for_all_lengths() -> None:
    compiled = Counted(flash_attn_func, dynamic=True)
    counts = []
    for batch, seqlen_q, seqlen_k in ((3, 5, 9), (7, 6, 20), (11, 30, 31)):
        inputs = make_inputs(batch, seqlen_q, seqlen_k, 4, 2, 64)
        dout = normal_like(inputs[0])
        expected = autograd_gradients(
            lambda q, k, v: flash_attn_func(q, k, v, causal=True), inputs, dout
        )
        found = autograd_gradients(lambda q, k, v: compiled(q, k, v, causal=True), inputs, dout)
        assert all_equal(found, expected)
        counts.append(compiled.count)
    assert counts[0] > 0
    assert counts == counts[:1] * 3
