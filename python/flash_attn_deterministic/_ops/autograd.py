"""Gradients of the ops.

`kvcache_fwd` has none: it writes to its arguments, and torch.library.register_autograd takes only
ops that do not. The backward ops have a formula that raises. Forward-mode AD and torch.func have no
formula: `CheckedLibrary` raises before the op runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from .._checks.derivatives import check_no_function_transform, check_no_tangent
from .._checks.determinism import alert_atomics
from .._checks.kernels import check_kernels
from .._checks.varlen import without_backward
from ..errors import UnsupportedError
from .dispatch import needs_dispatcher
from .schemas import (
    BACKWARD,
    NAMESPACE,
    WITH_RESIDUAL,
    Gradients,
    Outputs,
    OutputsWithResidual,
    PackedGradients,
)

Results = Outputs | OutputsWithResidual

_C: Any = torch._C  # `dispatch` has checked that the private names used here exist


class _Formula(NamedTuple):
    setup_context: Callable[..., None]
    backward: Callable[..., tuple[torch.Tensor | None, ...]]


def register(library: Any) -> None:
    """Registers the backward of each op that has one."""
    checked: Any = CheckedLibrary(library)
    for name, formula in _FORMULAS.items():
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}",
            formula.backward,
            setup_context=formula.setup_context,
            lib=checked,
        )
    for name in BACKWARD:
        torch.library.register_autograd(f"{NAMESPACE}::{name}", no_double_backward, lib=checked)


def run(name: str, arguments: tuple[Any, ...], through_dispatcher: bool) -> Any:
    """Runs an op.

    Args:
        name: of the op.
        arguments: of the op.
        through_dispatcher: the result of `needs_dispatcher` for the call.
    """
    op = getattr(torch.ops.flash_attn_deterministic, name)
    # Where torch.compile could not compile the caller, it may start tracing here. All lines below
    # are in one function, so that it can't start between them.
    if through_dispatcher or torch.compiler.is_compiling():
        return op(*arguments)
    if name in _FUNCTIONS and torch.is_grad_enabled():
        apply, wanting = _FUNCTIONS[name]
        if _C._any_requires_grad(*arguments[:wanting]):
            return apply(*arguments[:wanting], arguments)
    with _C._AutoDispatchBelowAutograd():
        # _op is what the object calls: one Python function less.
        return getattr(op, "_op", op)(*arguments)


def _function(name: str, formula: _Formula) -> tuple[Callable[..., Any], int]:
    """Returns an op's autograd function for calls that skip the dispatcher.

    It does the same as the kernel of torch.library.register_autograd. It takes the tensors that get
    gradients, and all arguments of the op as one more: torch processes each argument in Python.

    Returns:
        The apply of a torch.autograd.Function, and the number of arguments that get gradients: the
        op's first.
    """

    def forward(ctx: Any, *inputs: Any) -> Results:
        arguments = inputs[-1]
        # torch has turned gradients off.
        output: Results = run(name, arguments, through_dispatcher=False)
        formula.setup_context(ctx, arguments, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(formula.backward)}
    function: Any = type(name, (torch.autograd.Function,), methods)
    # Not Function's own apply, which in Python prepares calls under torch.func, and calls this one.
    apply = super(torch.autograd.Function, function).apply
    return apply, 2 if "qkvpacked" in name else 3


class CheckedLibrary:
    """Wraps a library, and checks the arguments of each autograd kernel registered in it.

    A check before the call of the op would miss cases: torch runs the kernel at each level of
    nested transforms, and in a compiled graph with the actual tensors.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def impl(self, name: str, kernel: Callable[..., Any], key: str, **options: Any) -> None:
        """Registers as torch.library.Library.impl does."""

        def checked(keyset: Any, *arguments: Any, **keyword_arguments: Any) -> Any:
            check_no_tangent(arguments)
            check_no_function_transform(arguments)
            return kernel(keyset, *arguments, **keyword_arguments)

        self._library.impl(name, checked, key, **options)


# The context keeps the arguments of a call and what its mode resolved to: the backward may run in
# another thread, or in another mode.


def _setup_fwd(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, k, v, alibi_slopes, rng_state, dropout_p, *scores, _, _, deterministic_bwd = inputs
    _save(ctx, output, (q, k, v), (alibi_slopes, rng_state))
    ctx.numbers = (dropout_p, *scores, deterministic_bwd)


def _setup_varlen(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *without, alibi_slopes, rng_state = inputs[:10]
    *lengths_and_scores, _, _, deterministic_bwd = inputs[10:]
    _save(ctx, output, (q, k, v), (cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state))
    ctx.without_backward = without_backward(*without)
    ctx.numbers = (*lengths_and_scores, deterministic_bwd)


def _setup_qkvpacked(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, qkv, alibi_slopes, rng_state, dropout_p, *scores, _, _, deterministic_bwd = inputs
    _save(ctx, output, (q, qkv), (alibi_slopes, rng_state))
    ctx.numbers = (dropout_p, *scores, deterministic_bwd)


def _setup_varlen_qkvpacked(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, qkv, *starts_and_random = inputs[:6]
    *lengths_and_scores, _, _, deterministic_bwd = inputs[6:]
    _save(ctx, output, (q, qkv), starts_and_random)
    ctx.numbers = (*lengths_and_scores, deterministic_bwd)


def _save(ctx: Any, output: Results, before: Sequence[Any], after: Sequence[Any]) -> None:
    # In the order of the backward's arguments; the residual, or None, comes last.
    out, softmax_lse, *residual = output
    ctx.save_for_backward(*before, out, softmax_lse, *after, *(residual or (None,)))
    # flash_attn ignores a gradient of softmax_lse; here softmax_lse does not require one.
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(
    name: str, ctx: Any, dout: torch.Tensor | None, *others: None
) -> tuple[torch.Tensor | None, ...]:
    if name == "varlen_bwd" and ctx.without_backward:
        raise UnsupportedError(
            f"{ctx.without_backward}: there is no backward with it; pass packed sequences without "
            "it, or detach q, k and v"
        )
    nothing = (None,) * len(ctx.needs_input_grad)
    if dout is None:
        return nothing
    *saved, residual = ctx.saved_tensors  # read once: torch.utils.checkpoint frees them then
    numbers = ctx.numbers
    if not numbers[-1]:  # deterministic
        alert_atomics(dout.device)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()  # the gradient of a sum, for instance, has stride 0
    # With create_graph=True the op's autograd kernel has to run, to refuse a double backward.
    through_dispatcher = torch.is_grad_enabled() or needs_dispatcher(dout)
    if through_dispatcher:
        _check_kernels(dout)
    gradients: Gradients | PackedGradients
    try:
        gradients = run(name, (dout, *saved, *numbers, residual), through_dispatcher)
    except Exception:
        _check_kernels(dout)  # a missing kernel: its message says more than the op's
        raise
    if saved[0] is None:  # q is in the packed tensor
        return (None, *gradients[1:], *nothing[2:])
    return (*gradients, *nothing[len(gradients) :])


def _check_kernels(dout: torch.Tensor) -> None:
    check_kernels(dout.device, dout.dtype, dout.shape[-1], "bwd")


def no_double_backward(ctx: Any, *gradients: torch.Tensor | None) -> NoReturn:
    """The formula of an op without a gradient.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "double backward: the gradients of flash_attn_deterministic have no gradient of their own; "
        "call backward() or torch.autograd.grad() without create_graph=True"
    )


_FORMULAS = {
    name + suffix: _Formula(setup, functools.partial(_backward, name.replace("fwd", "bwd")))
    for name, setup in {
        "fwd": _setup_fwd,
        "varlen_fwd": _setup_varlen,
        "qkvpacked_fwd": _setup_qkvpacked,
        "varlen_qkvpacked_fwd": _setup_varlen_qkvpacked,
    }.items()
    for suffix in ("", WITH_RESIDUAL)
}
_FUNCTIONS = {name: _function(name, formula) for name, formula in _FORMULAS.items()}
