"""Gradients of the ops.

`kvcache_fwd` has none: it writes to its arguments, and torch.library.register_autograd takes only
ops that do not. The backward ops have none either, but are registered, to say so. Nor are there
formulas for forward mode and for torch.func, which is said before an op runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from .._checks.derivatives import check_no_function_transform, check_no_tangent
from .._checks.determinism import alert_atomics
from .._checks.kernels import check_kernels
from .._checks.varlen import without_backward
from ..errors import UnsupportedError
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


def register(library: Any) -> None:
    """Registers the backward of each op that has one."""
    checked: Any = _Checked(library)
    formulas = {
        "fwd": (_setup_fwd, _backward),
        "varlen_fwd": (_setup_varlen, _varlen_backward),
        "qkvpacked_fwd": (_setup_qkvpacked, _qkvpacked_backward),
        "varlen_qkvpacked_fwd": (_setup_varlen_qkvpacked, _varlen_qkvpacked_backward),
    }
    for name, (setup_context, backward) in formulas.items():
        for each in (name, name + WITH_RESIDUAL):
            torch.library.register_autograd(
                f"{NAMESPACE}::{each}", backward, setup_context=setup_context, lib=checked
            )
    for name in BACKWARD:
        torch.library.register_autograd(f"{NAMESPACE}::{name}", _no_double_backward, lib=checked)


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
    _setup(ctx, inputs, output)


def _setup_varlen(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *without, alibi_slopes, rng_state = inputs[:10]
    *lengths_and_scores, _, _, deterministic_bwd = inputs[10:]
    _save(ctx, output, (q, k, v), (cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state))
    ctx.without_backward = without_backward(*without)
    ctx.numbers = (*lengths_and_scores, deterministic_bwd)
    _setup(ctx, inputs, output)


def _setup_qkvpacked(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, qkv, alibi_slopes, rng_state, dropout_p, *scores, _, _, deterministic_bwd = inputs
    _save(ctx, output, (q, qkv), (alibi_slopes, rng_state))
    ctx.numbers = (dropout_p, *scores, deterministic_bwd)
    _setup(ctx, inputs, output)


def _setup_varlen_qkvpacked(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, qkv, *starts_and_random = inputs[:6]
    *lengths_and_scores, _, _, deterministic_bwd = inputs[6:]
    _save(ctx, output, (q, qkv), starts_and_random)
    ctx.numbers = (*lengths_and_scores, deterministic_bwd)
    _setup(ctx, inputs, output)


def _save(ctx: Any, output: Results, before: Sequence[Any], after: Sequence[Any]) -> None:
    # The order of the backward's arguments; it takes the residual, if there is one, last.
    out, softmax_lse, *residual = output
    ctx.save_for_backward(*before, out, softmax_lse, *after, *residual)
    ctx.residuals = len(residual)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    ctx.inputs = len(inputs)
    # flash_attn drops the gradient of softmax_lse without a word.
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dout: torch.Tensor | None, *others: None
) -> tuple[torch.Tensor | None, ...]:
    return _run(ctx, torch.ops.flash_attn_deterministic.bwd, dout)


def _varlen_backward(
    ctx: Any, dout: torch.Tensor | None, *others: None
) -> tuple[torch.Tensor | None, ...]:
    if ctx.without_backward:
        raise UnsupportedError(
            f"{ctx.without_backward}: there is no backward with it; pass packed sequences without "
            "it, or detach q, k and v"
        )
    return _run(ctx, torch.ops.flash_attn_deterministic.varlen_bwd, dout)


def _qkvpacked_backward(
    ctx: Any, dout: torch.Tensor | None, *others: None
) -> tuple[torch.Tensor | None, ...]:
    return _run(ctx, torch.ops.flash_attn_deterministic.qkvpacked_bwd, dout)


def _varlen_qkvpacked_backward(
    ctx: Any, dout: torch.Tensor | None, *others: None
) -> tuple[torch.Tensor | None, ...]:
    return _run(ctx, torch.ops.flash_attn_deterministic.varlen_qkvpacked_bwd, dout)


def _run(ctx: Any, op: Any, dout: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    inputs: int = ctx.inputs
    if dout is None:
        return (None,) * inputs
    saved = ctx.saved_tensors  # once: torch.utils.checkpoint lets go of them
    check_kernels(dout.device, dout.dtype, dout.shape[-1], "bwd")
    *_, deterministic = ctx.numbers
    if not deterministic:
        alert_atomics(dout.device)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()  # the gradient of a sum, for instance, has stride 0
    rest = len(saved) - ctx.residuals
    gradients: Gradients | PackedGradients = op(dout, *saved[:rest], *ctx.numbers, *saved[rest:])
    found: list[torch.Tensor | None] = list(gradients)
    if saved[0] is None:  # q is in the packed tensor
        found[0] = None
    return (*found, *[None] * (inputs - len(found)))


def _no_double_backward(ctx: Any, *gradients: torch.Tensor | None) -> NoReturn:
    raise UnsupportedError(
        "double backward: the gradients of flash_attn_deterministic have no gradient of their own; "
        "call backward() or torch.autograd.grad() without create_graph=True"
    )
