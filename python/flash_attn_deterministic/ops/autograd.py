"""Gradients of the ops, and the way of a call to its op.

An op with a gradient has a torch.autograd.Function. torch's dispatcher applies it, in the op's
autograd kernel: under torch.compile and torch.export, in modes, and for direct calls of the op.
`run` applies it directly where only autograd observes a call, past a Python kernel that takes the
host longer than the rest (docs/adr/0021-less-host-time.md).

`kvcache_fwd` and the ops that add to sums write to their arguments, and have no gradient. The
Function of a backward op raises: there is no double backward. Forward-mode AD and torch.func, for
which torch would return zero or raise obscurely, are refused.
"""

from __future__ import annotations

import functools
import operator
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from ..checks.ops import validate
from ..errors import NotDeterministicError, UnsupportedError
from ..private import AUTOGRAD, C, is_observed
from ..schemas import (
    BACKWARD,
    FORWARD,
    WITH_RESIDUAL,
    WITHOUT_BACKWARD,
    argument_names,
    without_suffixes,
)
from ..types import Call

_OPS: Any = torch.ops.flash_attn_deterministic
# More arguments than an op has.
_NONE_AT_THE_END = 99
_NO_GRADIENT = None, 0, _NONE_AT_THE_END


def register(library: Any) -> None:
    """Registers the autograd kernel of each op that gets gradients, and of the cache."""
    for name in (*FORWARD, *BACKWARD, "sink_bwd"):
        library.impl(name, autograd_kernel(name, *_FUNCTIONS[name]), "Autograd", with_keyset=True)


def run(call: Call) -> Any:
    """Runs an op. A refusal of torch or C++ is put into our words where we have some."""
    name, arguments = call
    op = getattr(_OPS, name)
    # Where torch.compile could not compile the caller, it may start tracing here. All lines below
    # are in one function, so that it can't start between them.
    if torch.compiler.is_compiling():
        validate(name, arguments)  # torch.compile would change the type of an error of the op
        return op(*arguments)
    apply, count, end = _FUNCTIONS.get(name, _NO_GRADIENT)
    wanted = arguments[:count] + arguments[end:]
    try:
        if is_observed(wanted):
            if "torch.distributed.tensor" in sys.modules:  # otherwise there are no DTensors
                _register_sharding()
            return op(*arguments)
        if apply is not None and torch.is_grad_enabled() and C._any_requires_grad(*wanted):
            return apply(*wanted, None, arguments)
        # _op is what the object calls: one Python function less.
        direct = getattr(op, "_op", op)
        if C._dispatch_tls_is_dispatch_key_excluded(AUTOGRAD):
            return direct(*arguments)
        # As _AutoDispatchBelowAutograd does, whose object costs the host more than this.
        try:
            C._dispatch_tls_set_dispatch_key_excluded(AUTOGRAD, True)
            return direct(*arguments)
        finally:
            C._dispatch_tls_set_dispatch_key_excluded(AUTOGRAD, False)
    except Exception as error:
        problem = error
    try:
        validate(name, arguments)
        raise problem
    finally:
        del problem  # its traceback refers to this frame, and so to the tensors


@functools.cache
def _register_sharding() -> None:
    from .sharding import register

    register()


def autograd_kernel(
    name: str, apply: Any, count: int, end: int = _NONE_AT_THE_END
) -> Callable[..., Any]:
    """Returns an op's kernel for torch's autograd keys.

    A check before the call of the op would miss cases: torch runs this kernel at each level of
    nested transforms, and in a compiled graph with the actual tensors.

    Args:
        name: of the op.
        apply: of its Function, which takes `count` tensors, the key set and all arguments; None:
            the op has no gradient.
        count: of the leading arguments that get gradients.
        end: arguments from this one on get gradients too.
    """

    def kernel(keyset: Any, *arguments: Any) -> Any:
        check_no_tangent(arguments)
        wanted = arguments[:count] + arguments[end:]
        if apply is not None and torch.is_grad_enabled() and C._any_requires_grad(*wanted):
            _check_no_function_transform(wanted)
            return apply(*wanted, keyset, arguments)
        return _below_autograd(name, keyset, arguments)

    return kernel


def _below_autograd(
    name: str, keyset: Any, arguments: tuple[Any, ...], body: Callable[..., Any] | None = None
) -> Any:
    op = getattr(_OPS, name)
    with C._AutoDispatchBelowAutograd():
        if keyset is None:
            return (body or getattr(op, "_op", op))(*arguments)
        return op.default.redispatch(keyset & C._after_autograd_keyset, *arguments)


def function_of(
    name: str,
    setup: Callable[..., None] | None,
    backward: Callable[..., tuple[Any, ...]],
    body: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Returns apply of an op's torch.autograd.Function; see `autograd_kernel`.

    It is not Function's own, which in Python prepares calls under torch.func, and calls this one.

    `setup` takes the context, the arguments and the results; `backward` the context and gradients
    of the results, and returns those of `count` tensors, and None for key set and arguments. `body`
    is that of an op in Python, to which calls without key set go past the dispatcher.
    """

    def forward(ctx: Any, *inputs: Any) -> Any:
        keyset, arguments = inputs[-2:]
        output = _below_autograd(name, keyset, arguments, body)
        if setup is not None:
            setup(ctx, arguments, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), methods)
    return super(torch.autograd.Function, function).apply  # type: ignore[no-any-return]


def _forward_function(name: str) -> tuple[Callable[..., Any], int, int]:
    """Returns apply, count and end of a forward op; see `autograd_kernel`."""
    names = argument_names(name)
    end = names.index("learnable_sink") if "learnable_sink" in names else _NONE_AT_THE_END
    backward_name = without_suffixes(name).replace("fwd", "bwd")
    keeps_residual = name.endswith(WITH_RESIDUAL)
    count = names.index("qkv" if "qkv" in names else "v") + 1
    # The backward takes dout, the inputs, out, softmax_lse, more tensors, numbers; residual, dlse.
    *rest, _, _, _ = argument_names(backward_name)[count + 3 :]
    split = rest.index("rng_state") + 1
    more = operator.itemgetter(*map(names.index, rest[:split]))
    numbers = operator.itemgetter(*map(names.index, (*rest[split:], "deterministic_bwd")))
    kept = count + 2 + split  # tensors
    without = [(other, names.index(other)) for other in WITHOUT_BACKWARD if other in names]

    # The context keeps the arguments of a call and what its mode resolved to: the backward may run
    # in another thread, or in another mode.

    def setup(ctx: Any, arguments: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        out, softmax_lse, *others = output
        residual = others[-1] if keeps_residual else None
        tensors = *arguments[:count], out, softmax_lse, *more(arguments)
        ctx.save_for_backward(*tensors, residual, *arguments[end:])
        ctx.numbers = numbers(arguments)
        if without:
            ctx.without_backward = [n for n, place in without if arguments[place] is not None]
        if others:
            ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)

    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *others: None
    ) -> tuple[Any, ...]:
        if without and ctx.without_backward:
            raise UnsupportedError(
                f"{ctx.without_backward[0]}: there is no backward with it; pass packed sequences "
                "without it, or detach q, k and v"
            )
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        # Read once: torch.utils.checkpoint frees them then.
        tensors = ctx.saved_tensors
        saved, residual, sinks = tensors[:kept], tensors[kept], tensors[kept + 1 :]
        if dout is None:
            dout = torch.zeros_like(saved[count])
        if dlse is not None:
            dlse = dlse.contiguous()
        if not ctx.numbers[-1]:  # deterministic
            alert_atomics(dout.device)
        if dout.stride(-1) != 1:
            dout = dout.contiguous()  # the gradient of a sum, for instance, has stride 0
        gradients = run((backward_name, (dout, *saved, *ctx.numbers, residual, dlse)))
        if saved[0] is None:  # q is in the packed tensor, and its gradient is empty
            gradients = None, *gradients[1:]
        if sinks:
            dsink = None
            if ctx.needs_input_grad[count]:
                starts = (saved[count + 2], ctx.numbers[0]) if "varlen" in name else (None, 0)
                rows = dout, *saved[count : count + 2], *sinks, *starts, residual, dlse
                dsink = run(("sink_bwd", rows))
            gradients = *gradients, dsink
        return *gradients, None, None

    return function_of(name, setup, backward), count, end


def _backward_function(name: str) -> tuple[Callable[..., Any], int, int]:
    """Returns apply, count and end of a backward op."""
    count = 4 if name == "sink_bwd" else argument_names(name).index("out")
    return function_of(name, None, no_double_backward), count, _NONE_AT_THE_END


def no_double_backward(ctx: Any, *gradients: torch.Tensor | None) -> NoReturn:
    """The formula of an op without a gradient."""
    raise UnsupportedError(
        "double backward: the gradients of flash_attn_deterministic have no gradient of their own; "
        "call backward() or torch.autograd.grad() without create_graph=True"
    )


def alert_atomics(device: torch.device) -> None:
    """Applies torch.use_deterministic_algorithms to a backward that adds atomically.

    On the CPU nothing is added atomically. Raises NotDeterministicError, or warns if torch shall.
    """
    if device.type != "cuda" or not torch.are_deterministic_algorithms_enabled():
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    options = "True, warn_only=True" if warn_only else "True"
    message = (
        "the backward of flash_attn_deterministic does not have a deterministic implementation "
        "with deterministic='never', or outside of the deterministic mode, but you set "
        f"'torch.use_deterministic_algorithms({options})'; pass deterministic=True to the call"
    )
    if not warn_only:
        raise NotDeterministicError(message)
    warnings.warn(message, stacklevel=2)


def check_no_tangent(values: Iterable[Any]) -> None:
    """Refuses forward-mode automatic differentiation, for which torch would return zero."""
    # Unpacking each tensor instead costs microseconds in every call.
    if getattr(forward_ad, "_current_level", 0) < 0:
        return
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        dual = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call, unused-ignore]
        if dual.tangent is not None:
            raise UnsupportedError(
                "forward-mode AD: flash_attn_deterministic has no forward derivative "
                "(torch.func.jvp, jacfwd, torch.autograd.forward_ad), and an input carries a "
                "tangent; use backward() or torch.autograd.grad(), or detach the inputs"
            )


def _check_no_function_transform(values: Iterable[Any]) -> None:
    """Refuses torch.func.grad and similar transforms, which need another form of the backward."""
    for value in values:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            continue
        # A transform wraps each tensor that it differentiates.
        if torch.func.debug_unwrap(value, recurse=False) is not value:
            raise UnsupportedError(
                "torch.func: flash_attn_deterministic has no gradient for grad, vjp, jacrev and "
                "other transforms of torch.func; use backward() or torch.autograd.grad()"
            )


# By op: apply, or None without a gradient, the number of leading arguments that get one, and from
# which one on the last ones do.
_FUNCTIONS: dict[str, tuple[Any, int, int]] = {
    "kvcache_fwd": (None, 5, _NONE_AT_THE_END),
    **{name: _forward_function(name) for name in FORWARD if name != "kvcache_fwd"},
    **{name: _backward_function(name) for name in (*BACKWARD, "sink_bwd")},
}
