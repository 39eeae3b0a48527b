"""Ways to call a function of all ranks: with packed tensors, and with errors told to the others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..checks.tensors import check_packed
from ..errors import FlashAttnError
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
            if not is_known(error):
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


def of_qkv(
    function: Callable[Concatenate[Tensor, Tensor, Tensor, Arguments], Result], shape: str
) -> Callable[Concatenate[Tensor, Arguments], Result]:
    """Returns a function that takes qkv, of a shape, for q, k and v."""

    def call(qkv: Tensor, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        check_packed("qkv", qkv, shape)
        q, k, v = qkv.unbind(-3)
        return function(q, k, v, *args, **kwargs)

    signed: Callable[Concatenate[Tensor, Arguments], Result] = _signed(call, function, 3, qkv=shape)
    return signed


def of_kv(
    function: Callable[Concatenate[Tensor, Tensor, Tensor, Arguments], Result], shape: str
) -> Callable[Concatenate[Tensor, Tensor, Arguments], Result]:
    """Returns a function that takes kv, of a shape, for k and v."""

    def call(q: Tensor, kv: Tensor, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        check_packed("kv", kv, shape)
        k, v = kv.unbind(-3)
        return function(q, k, v, *args, **kwargs)

    signed: Callable[Concatenate[Tensor, Tensor, Arguments], Result] = _signed(
        call, function, 3, q="as there", kv=shape
    )
    return signed


def of_varlen_qkv(
    function: Callable[
        Concatenate[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, Arguments], Result
    ],
) -> Callable[Concatenate[Tensor, Tensor, int, Arguments], Result]:
    """Returns a function that takes qkv for q, k and v, and lengths once."""
    shape = "(total tokens, 3, nheads, head_dim)"

    def call(
        qkv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        check_packed("qkv", qkv, shape)
        lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
        q, k, v = qkv.unbind(1)
        return function(q, k, v, *lengths, *args, **kwargs)

    signed: Callable[Concatenate[Tensor, Tensor, int, Arguments], Result] = _signed(
        call, function, 7, qkv=shape, cu_seqlens="of q and k", max_seqlen="likewise"
    )
    return signed


def _signed(call: Any, function: Any, replaced: int, **first: str) -> Any:
    """Names, documents and reports a function with other first arguments than another.

    Args:
        call: the function.
        function: whose other arguments it takes.
        replaced: arguments of that which it does not take.
        first: its own, with their descriptions.
    """
    rest = [*inspect.signature(function).parameters.values()][replaced:]
    own = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in first]
    call.__signature__ = inspect.Signature([*own, *rest])
    name = function.__name__
    call.__name__ = name.replace("_func", "_qkvpacked_func" if "qkv" in first else "_kvpacked_func")
    call.__module__, call.__qualname__ = function.__module__, call.__name__
    described = "".join(f"\n        {name}: {text}." for name, text in first.items())
    which = "q, k and v" if "qkv" in first else "k and v"
    call.__doc__ = f"""Computes `{name}` with {which} in one tensor.

    Args:{described}
        {rest[0].name}: as in `{name}`; so are the arguments after it.

    Returns:
        As `{name}`.

    Raises:
        As `{name}`.
    """
    return reported(call)
