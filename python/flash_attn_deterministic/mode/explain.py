"""The plan of a call, without running it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import interface
from .._checks.describe import shown
from .._checks.index_values import check_values
from .._checks.varlen import NAMES, NAMES_QKV
from .._ops.schemas import FORWARD, NAMESPACE, WITH_RESIDUAL, argument_names, unpacked
from ..errors import ArgumentError
from .plan import Plan, Request, plan


def explain(
    function: Callable[..., Any] | str | torch.Tensor | None = None, *args: Any, **kwargs: Any
) -> Plan:
    """Returns the plan of a call of one of this package's functions, without running it.

    The arguments are checked as in the call itself. The call runs up to its op and is stopped
    there: nothing is computed, written, or drawn from a random generator.

    Args:
        function: one of this package's functions, or its name; also a functools.partial of one, one
            that torch.compile has compiled, or one that `deterministic_mode` decorates. If q or a
            keyword comes first: flash_attn_func.
        *args: arguments of the call.
        **kwargs: arguments of the call.

    Returns:
        The plan.

    Raises:
        ArgumentError: a ValueError; no such function.
        UnsupportedError: a NotImplementedError; the mode is not enabled, and the tensors are not on
            a CUDA device.
        All that the call itself raises before it runs.

    Example:
        >>> q = k = v = torch.ones(1, 4096, 2, 64, dtype=torch.bfloat16)
        >>> explain(flash_attn_func, q, k, v, split_size=1024).num_splits
        4
    """
    if isinstance(function, torch.Tensor):
        args = (function, *args)
    if function is None or isinstance(function, torch.Tensor):
        function = interface.flash_attn_func
    called = _called(function)
    try:
        with _Stopper():  # type: ignore[no-untyped-call, unused-ignore]
            called(*args, **kwargs)
    except _Stopped as stopped:
        return plan(stopped.request)
    raise AssertionError(f"{function} returned without a call of an op")


def _called(function: Any) -> Callable[..., Any]:
    functions = {name: getattr(interface, name) for name in interface.__all__}
    if isinstance(function, str) and function in functions:
        return functions[function]  # type: ignore[no-any-return]
    called = _without_compiler(function)
    inner = called
    while isinstance(inner, functools.partial) or hasattr(inner, "__wrapped__"):
        inner = inner.func if isinstance(inner, functools.partial) else inner.__wrapped__
    if any(inner is each for each in functions.values()):
        return called  # type: ignore[no-any-return]
    raise ArgumentError(
        f"function: expected one of {', '.join(functions)}, or its name, got {shown(function)}"
    )


def _without_compiler(function: Any) -> Any:
    """Returns the function that was compiled: calling the compiled one would trace it."""
    if isinstance(function, functools.partial):
        inner = _without_compiler(function.func)
        return functools.partial(inner, *function.args, **function.keywords)
    return getattr(function, "_torchdynamo_orig_callable", function)


class _Stopped(BaseException):
    """Ends a call at its op."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request


class _Stopper(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Stops at the first op of this package; ops before it only allocate their results."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix(f"{NAMESPACE}::")
        if name in FORWARD:
            given = dict(zip(argument_names(name), args, strict=True))
            plain, arguments = unpacked(name, given)
            if arguments["q"].device.type == "cpu":
                check_values(plain, arguments, NAMES_QKV if given["q"] is None else NAMES)
            raise _Stopped(_request(plain, arguments, name.endswith(WITH_RESIDUAL)))
        if name == "aten::randint":  # nothing is drawn
            return torch.empty(args[2], **kwargs)
        if name == "aten::constant_pad_nd":
            tensor, (left, right) = args[0], args[1]
            return tensor.new_empty((1,)).expand(
                *tensor.shape[:-1], tensor.shape[-1] + left + right
            )
        return func(*args, **kwargs)


_WITHOUT_BACKWARD = ("seqused_k", "leftpad_k", "block_table")


def _request(name: str, arguments: dict[str, Any], keeps_residual: bool) -> Request:
    q = arguments["q"]
    keys = arguments["k_cache" if name == "kvcache_fwd" else "k"]
    table = arguments.get("block_table")
    if name == "varlen_fwd":
        batch = arguments["cu_seqlens_q"].shape[0] - 1
        seqlen_q, seqlen_k = arguments["max_seqlen_q"], arguments["max_seqlen_k"]
        if table is not None:
            seqlen_k = min(seqlen_k, table.shape[1] * keys.shape[1])
    else:
        batch, seqlen_q = q.shape[:2]
        seqlen_k = keys.shape[1] if table is None else table.shape[1] * keys.shape[1]
    return Request(
        device=q.device,
        dtype=q.dtype,
        batch=batch,
        nheads=q.shape[-2],
        nheads_k=keys.shape[-2],
        head_dim=q.shape[-1],
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        window=(arguments["window_left"], arguments["window_right"]),
        has_alibi=arguments["alibi_slopes"] is not None,
        has_softcap=arguments["softcap"] > 0.0,
        has_dropout=arguments.get("dropout_p", 0.0) > 0.0,
        packed=name == "varlen_fwd",
        page_size=0 if table is None else keys.shape[1],
        cache_index=arguments.get("cache_batch_idx") is not None,
        split_size=arguments["split_size"],
        deterministic=arguments["deterministic"],
        deterministic_bwd=None
        if any(arguments.get(name) is not None for name in _WITHOUT_BACKWARD)
        else arguments.get("deterministic_bwd"),
        residual_bytes=2 * q.numel() if keeps_residual else 0,
    )
