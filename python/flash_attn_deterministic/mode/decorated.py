"""Checks of what `deterministic_mode` decorates: its body has to run during the call."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from .._checks.describe import name_of, type_name
from ..errors import ArgumentTypeError

_KINDS = (
    ("a coroutine function", inspect.iscoroutinefunction),
    ("a generator function", inspect.isgeneratorfunction),
    ("an async generator function", inspect.isasyncgenfunction),
)
# functools.wraps copies these from a function that torch.compile has compiled. With them, torch
# takes the wrapper for the compiled function, and would skip the wrapper.
COMPILER_ATTRIBUTES = (
    "_is_torch_compile",
    "_isolate_recompiles_id",
    "_torchdynamo_inline",
    "_torchdynamo_orig_callable",
    "_torchdynamo_wrapper_id",
    "aot_compile",
    "get_compiler_config",
)


def check_result(result: Any) -> None:
    """Refuses the result of a function whose body has not run yet.

    Raises:
        ArgumentTypeError: a coroutine or a generator.
    """
    if isinstance(result, (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)):
        if isinstance(result, types.CoroutineType):
            result.close()  # otherwise Python warns that it was never awaited
        raise _runs_later(f"one that returned a {type(result).__name__}")


def _runs_later(what: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"function: expected an ordinary function, got {what}, whose body runs after the call; put "
        "the block inside it, around code without await and yield"
    )


def check_function(function: Any) -> None:
    """Refuses a function whose body does not run during the call.

    Raises:
        ArgumentTypeError: a class, something that can't be called, a coroutine function or a
            generator function.
    """
    expected = "function: expected an ordinary function, got "
    if isinstance(function, type):
        raise ArgumentTypeError(f"{expected}the class {name_of(function)}; decorate its methods")
    if not callable(function):
        raise ArgumentTypeError(
            f"{expected}{type_name(function)}, which can't be called; decorate the function inside "
            "of it"
        )
    for body in _bodies(function):
        for kind, is_kind in _KINDS:
            if is_kind(body):
                raise _runs_later(kind)


def _bodies(function: Any) -> Iterator[Any]:
    """Yields the function and all that it wraps: partials, caches, methods, callable objects."""
    seen: list[Any] = []
    while True:
        yield function
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, functools._lru_cache_wrapper):
            function = function.__wrapped__
        elif inspect.ismethod(function) or isinstance(function, staticmethod):
            function = function.__func__
        elif inspect.isroutine(function):
            return
        else:
            call = type(function).__call__
            if call in seen:
                return
            seen.append(call)
            function = call
