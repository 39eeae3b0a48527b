"""The plan of a call, without running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import interface
from .._ops.schemas import FORWARD, NAMESPACE
from ..errors import ArgumentError
from .plan import Plan, Request, plan


def explain(function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Plan:
    """Returns the plan of a call of one of this package's functions, without running it.

    Nothing is computed and no cache is written to: shapes, dtypes and devices are all that counts.
    The arguments are checked as in the call itself, but not whether the wheel has the kernel.

    Args:
        function: one of this package's functions, or its name.
        *args: arguments of the call.
        **kwargs: arguments of the call.

    Returns:
        The plan.

    Raises:
        ArgumentError: a ValueError; no such function, or one that the call itself raises.
        UnsupportedError: a NotImplementedError; the mode is not enabled.

    Example:
        >>> q = k = v = torch.ones(1, 4096, 2, 64, dtype=torch.bfloat16)
        >>> explain(flash_attn_func, q, k, v, split_size=1024).num_splits
        4
    """
    called = _function(function)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    devices = {tensor.device for tensor in tensors} or {torch.device("cpu")}
    if len(devices) > 1:
        raise ArgumentError(
            "explain: expected all tensors on one device, got "
            + " and ".join(sorted(map(str, devices)))
        )
    recorder = _Recorder(devices.pop())
    with torch.no_grad(), recorder:
        called(*map(_shape_only, args), **{name: _shape_only(v) for name, v in kwargs.items()})
    assert recorder.request is not None
    return plan(recorder.request)


def _function(function: Callable[..., Any] | str) -> Callable[..., Any]:
    functions = {name: getattr(interface, name) for name in interface.__all__}
    if isinstance(function, str) and function in functions:
        return functions[function]  # type: ignore[no-any-return]
    if function in functions.values():
        return function  # type: ignore[return-value]
    raise ArgumentError(
        f"function: expected one of {', '.join(functions)}, or its name, got {function!r}"
    )


def _shape_only(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Notes what an op of this package was called with, all of it on the meta device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.device = device
        self.request: Request | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix(f"{NAMESPACE}::")
        if name in FORWARD:
            names = (argument.name for argument in func._schema.arguments)
            self.request = _request(name, dict(zip(names, args, strict=True)), self.device)
        return func(*args, **(kwargs or {}))


def _request(name: str, arguments: dict[str, Any], device: torch.device) -> Request:
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
        device=device,
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
        paged=table is not None,
        cache_index=arguments.get("cache_batch_idx") is not None,
        split_size=arguments["split_size"],
        deterministic=arguments["deterministic"],
    )
