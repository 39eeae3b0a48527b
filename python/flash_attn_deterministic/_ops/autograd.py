"""Gradients of the ops.

`kvcache_fwd` has none: it writes to its arguments, and torch.library.register_autograd takes only
ops that do not. The backward ops have none either, but are registered, to say so. Nor are there
formulas for forward mode and for torch.func, which is said before an op runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from .._checks.derivatives import check_no_function_transform, check_no_tangent
from .._checks.determinism import alert_atomics
from .._checks.kernels import check_kernels
from .._checks.varlen import without_backward
from ..errors import UnsupportedError
from .eager import is_followed
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

_C: Any = torch._C  # what is used of it beyond torch's public functions, `eager` has looked for


class _Formula(NamedTuple):
    setup_context: Callable[..., None]
    backward: Callable[..., tuple[torch.Tensor | None, ...]]


def register(library: Any) -> None:
    """Registers the backward of each op that has one."""
    checked: Any = _Checked(library)
    for name, formula in _FORMULAS.items():
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}",
            formula.backward,
            setup_context=formula.setup_context,
            lib=checked,
        )
    for name in BACKWARD:
        torch.library.register_autograd(f"{NAMESPACE}::{name}", _no_double_backward, lib=checked)


def run(name: str, arguments: tuple[Any, ...], followed: bool) -> Any:
    """Runs an op.

    Args:
        name: of the op.
        arguments: of the op.
        followed: what `is_followed` says of the call.
    """
    op = getattr(torch.ops.flash_attn_deterministic, name)
    # torch.compile may begin with this function, where it could not compile what calls it. The
    # lines below are in one function, so that it can't begin between them.
    if followed or torch.compiler.is_compiling():
        return op(*arguments)
    if name in _FUNCTIONS and torch.is_grad_enabled():
        function, wanting = _FUNCTIONS[name]
        if _C._any_requires_grad(*arguments[:wanting]):
            return function.apply(*arguments[:wanting], arguments[wanting:])
    with _C._AutoDispatchBelowAutograd():
        # _op: what the object calls, a Python function less.
        return getattr(op, "_op", op)(*arguments)


def _function(name: str, formula: _Formula) -> tuple[Any, int]:
    """Returns an op's autograd for calls that are not followed.

    It does what torch.library.register_autograd makes of the formula. What gets no gradient is one
    argument of it, as torch looks at each argument in Python.

    Returns:
        A torch.autograd.Function, and how many of the op's arguments get gradients: its first ones.
    """

    def forward(ctx: Any, *inputs: Any) -> Results:
        arguments = (*inputs[:-1], *inputs[-1])
        output: Results = run(name, arguments, followed=False)  # torch has turned gradients off
        formula.setup_context(ctx, arguments, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(formula.backward)}
    function = type(name, (torch.autograd.Function,), methods)
    return function, 2 if "qkvpacked" in name else 3


class _Checked:
    """Stands for a library, and puts a check in front of the autograd kernel registered in it.

    There, rather than before the op is called: torch runs that kernel at each level of a nest of
    transforms, and a compiled graph runs it with the tensors that torch.compile traced without.
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


# What a call was told is kept in the context, the mode included: the backward may run in another
# thread, or in another mode.


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
    # The order of the backward's arguments; it takes the residual, or None, last.
    out, softmax_lse, *residual = output
    ctx.save_for_backward(*before, out, softmax_lse, *after, *(residual or (None,)))
    # flash_attn drops the gradient of softmax_lse without a word.
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dout: torch.Tensor | None, *others: None
) -> tuple[torch.Tensor | None, ...]:
    return _run(ctx, "bwd", dout)


def _varlen_backward(
    ctx: Any, dout: torch.Tensor | None, *others: None
) -> tuple[torch.Tensor | None, ...]:
    if ctx.without_backward:
        raise UnsupportedError(
            f"{ctx.without_backward}: there is no backward with it; pass packed sequences without "
            "it, or detach q, k and v"
        )
    return _run(ctx, "varlen_bwd", dout)


def _qkvpacked_backward(
    ctx: Any, dout: torch.Tensor | None, *others: None
) -> tuple[torch.Tensor | None, ...]:
    return _run(ctx, "qkvpacked_bwd", dout)


def _varlen_qkvpacked_backward(
    ctx: Any, dout: torch.Tensor | None, *others: None
) -> tuple[torch.Tensor | None, ...]:
    return _run(ctx, "varlen_qkvpacked_bwd", dout)


def _run(ctx: Any, name: str, dout: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    nothing = (None,) * len(ctx.needs_input_grad)
    if dout is None:
        return nothing
    *saved, residual = ctx.saved_tensors  # once: torch.utils.checkpoint lets go of them
    numbers = ctx.numbers
    if not numbers[-1]:  # deterministic
        alert_atomics(dout.device)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()  # the gradient of a sum, for instance, has stride 0
    # With create_graph=True the op's autograd kernel says that its result has no gradient.
    followed = torch.is_grad_enabled() or is_followed(dout)
    if followed:
        _check_kernels(dout)
    gradients: Gradients | PackedGradients
    try:
        gradients = run(name, (dout, *saved, *numbers, residual), followed)
    except Exception:
        _check_kernels(dout)  # the op has looked for them too, but says less
        raise
    if saved[0] is None:  # q is in the packed tensor
        return (None, *gradients[1:], *nothing[2:])
    return (*gradients, *nothing[len(gradients) :])


def _check_kernels(dout: torch.Tensor) -> None:
    check_kernels(dout.device, dout.dtype, dout.shape[-1], "bwd")


def _no_double_backward(ctx: Any, *gradients: torch.Tensor | None) -> NoReturn:
    raise UnsupportedError(
        "double backward: the gradients of flash_attn_deterministic have no gradient of their own; "
        "call backward() or torch.autograd.grad() without create_graph=True"
    )


_FORMULAS = {
    name + suffix: formula
    for name, formula in {
        "fwd": _Formula(_setup_fwd, _backward),
        "varlen_fwd": _Formula(_setup_varlen, _varlen_backward),
        "qkvpacked_fwd": _Formula(_setup_qkvpacked, _qkvpacked_backward),
        "varlen_qkvpacked_fwd": _Formula(_setup_varlen_qkvpacked, _varlen_qkvpacked_backward),
    }.items()
    for suffix in ("", WITH_RESIDUAL)
}
_FUNCTIONS = {name: _function(name, formula) for name, formula in _FORMULAS.items()}
