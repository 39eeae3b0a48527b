"""Calls as in code written for flash_attn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bits import bits_equal
from calls import CALLS, compiled, fresh, normal, varlen_call
from flash_attn_deterministic import explain, flash_attn_func
from flash_attn_deterministic.errors import ArgumentError, DtypeError, UnsupportedDeviceError
from flash_attn_deterministic.interface import flash_attn_varlen_func, flash_attn_with_kvcache

every_name = pytest.mark.parametrize("name", CALLS)

# --- Tracing ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("head_dim", [32, 20])
@every_name
def test_jit_trace(name: str, head_dim: int) -> None:
    call = CALLS[name](head_dim)
    first, *_ = call.arguments
    traced: Any = torch.jit.trace(  # type: ignore[no-untyped-call, unused-ignore]
        lambda x: fresh(call)(**{first: x}), (call.arguments[first],), check_trace=False
    )
    assert bits_equal(traced(call.arguments[first]), fresh(call)())


VARLEN: Any = flash_attn_varlen_func


def _attend(longest: Callable[[torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
    """Packed attention that finds the lengths of the longest sequences itself."""
    return lambda *args: VARLEN(*args, *map(longest, args[3:]), causal=True)


def _longest(starts: torch.Tensor) -> torch.Tensor:
    return starts.diff().max()


LONGEST = pytest.mark.parametrize(
    "function",
    [_attend(_longest), _attend(lambda starts: _longest(starts).item())],
    ids=["tensor", "item"],
)


def _varlen_arguments() -> list[torch.Tensor]:
    arguments = varlen_call().arguments
    return [arguments[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]


@pytest.fixture
def scalars_in_graphs() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


@pytest.mark.usefixtures("scalars_in_graphs")
@pytest.mark.parametrize("requires_grad", [False, True], ids=["forward", "backward"])
@LONGEST
def test_lengths_that_a_graph_computes(function: Any, requires_grad: bool) -> None:
    arguments = _varlen_arguments()
    arguments[0].requires_grad_(requires_grad)
    out = compiled(function)(*arguments)
    expected = varlen_call()(q=arguments[0])
    assert bits_equal(out, expected)
    if requires_grad:
        gradients = [torch.autograd.grad(x.sum(), arguments[0])[0] for x in (out, expected)]
        assert bits_equal(*gradients)


@pytest.mark.usefixtures("scalars_in_graphs")
def test_length_of_a_cache_that_a_graph_computes() -> None:
    def function(length: torch.Tensor, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return flash_attn_with_kvcache(q, cache, cache, cache_seqlens=length.item())  # type: ignore[arg-type]

    q, cache = normal(2, 3, 4, 32), normal(2, 20, 2, 32)
    traced = compiled(function)
    for length in (7, 20):
        expected = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=length)
        assert bits_equal(traced(torch.tensor(length), q, cache), expected)
    with pytest.raises(RuntimeError):
        traced(torch.tensor(21), q, cache)


class Module(torch.nn.Module):
    """A function as a module, for torch.export."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@LONGEST
def test_lengths_that_an_exported_program_computes(function: Any, strict: bool) -> None:
    torch._dynamo.reset()
    arguments = _varlen_arguments()
    export: Any = torch.export.export
    exported = export(Module(function), tuple(arguments), strict=strict)
    program: Any = exported.module()
    assert bits_equal(program(*arguments), varlen_call()())


# --- Errors -------------------------------------------------------------------------------------


def test_errors_are_runtime_errors_as_upstream() -> None:
    """flash_attn's own checks raise RuntimeError, and callers fall back on it."""
    q = normal(1, 4, 2, 32)
    with pytest.raises(RuntimeError) as dtype:
        flash_attn_func(q.float(), q.float(), q.float())
    assert isinstance(dtype.value, DtypeError)
    assert isinstance(dtype.value, TypeError)
    with pytest.raises(RuntimeError) as shape:
        flash_attn_func(q, q[:, :, :1, :16], q)
    assert isinstance(shape.value, ArgumentError)
    assert isinstance(shape.value, ValueError)
    assert issubclass(UnsupportedDeviceError, RuntimeError)


ARGUMENTS = [
    "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes",
    "deterministic", "return_attn_probs", "split_size",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_messages_hold_no_values_of_tensors(argument: str) -> None:
    q, values = normal(1, 4, 2, 32), torch.full((50, 3), 1234.5)
    wrong: list[Any] = [values, [values] * 2, torch.nested.nested_tensor([values[:2]])]
    for value in wrong:
        options = {argument: value}
        with pytest.raises(RuntimeError, match=f"{argument}: expected") as caught:
            flash_attn_func(q, q, q, **options)
        assert "1234" not in str(caught.value)
        assert value is not values or "(50, 3)" in str(caught.value)
    functions: Any = (values,)
    with pytest.raises(ArgumentError, match=r"got \(a tensor of dtype torch.float32 and shape"):
        explain(functions)
