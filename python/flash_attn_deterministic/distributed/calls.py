"""Ways to call a function of all ranks: with packed tensors, and with errors told to the others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..checks.tensors import check_packed
from ..errors import FlashAttnError
from ..private import STOPS
from .agreement import is_known
from .ranks import find_group, report

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def reported(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Makes a function of all ranks tell the others of an error that only this one has."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not is_known(error) and not isinstance(error, STOPS):
                report(error, _group_of(function, args, kwargs))
            raise

    return call


def _group_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the group of a call; None if it is unknown."""
    if any(hasattr(one, "device_mesh") for one in args):
        return None  # DTensors, whose group depends on all of them
    try:
        given = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except TypeError:
        given = kwargs
    try:
        return find_group(given.get("group"), given.get("mesh"))
    except FlashAttnError:
        return None


def of_qkv(function: Callable[..., Result], layout: str) -> Callable[..., Result]:
    """Returns a function that takes qkv, of a layout, for q, k and v."""

    def call(qkv: Tensor, *args: Any, **kwargs: Any) -> Result:
        check_packed("qkv", qkv, layout)
        return function(*qkv.unbind(-3), *args, **kwargs)

    return _described(call, function, 3, layout)


def of_kv(function: Callable[..., Result], layout: str) -> Callable[..., Result]:
    """Returns a function that takes kv, of a layout, for k and v."""

    def call(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Result:
        check_packed("kv", kv, layout)
        return function(q, *kv.unbind(-3), *args, **kwargs)

    return _described(call, function, 3, layout)


def of_varlen_qkv(function: Callable[..., Result], layout: str) -> Callable[..., Result]:
    """Returns a function that takes qkv for q, k and v, and lengths once."""

    def call(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any) -> Result:
        check_packed("qkv", qkv, layout)
        lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
        return function(*qkv.unbind(-3), *lengths, *args, **kwargs)

    return _described(call, function, 7, layout)


def _described(call: Any, function: Any, replaced: int, layout: str) -> Callable[..., Any]:
    """Names a function that has others for the first arguments of another one; see `reported`."""
    *own, _, _ = inspect.signature(call).parameters.values()  # without args and kwargs
    packed = next(one.name for one in own if "kv" in one.name)
    rest = [*inspect.signature(function).parameters.values()][replaced:]
    call.__signature__ = inspect.Signature([*own, *rest])
    call.__name__ = function.__name__.replace("_func", f"_{packed}packed_func")
    call.__module__, call.__qualname__ = function.__module__, call.__name__
    call.__doc__ = f"Computes `{function.__name__}` with one tensor {packed}: {layout}."
    return reported(call)
