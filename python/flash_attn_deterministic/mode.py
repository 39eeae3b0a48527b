"""The mode of the process, and the modes of threads inside `deterministic_mode`.

torch.compile traces this module, and must compile again when a mode that it read has changed. It
guards on plain objects: a module's global for the process, and for each thread a box that a
threading.local creates (an attribute that only some threads have would not be guarded, and a
ContextVar can't be traced at all). Threads of the autograd engine find the mode of the thread that
called backward() in torch's own thread-local state.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch

from .build_info import build_info
from .checks.describe import name_of, shown, type_name
from .checks.numbers import as_flag, as_mode_split_size
from .environment import ENABLED, SPLIT_SIZE, check_family, read, read_flag
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BuildInfoError,
    FlashAttnError,
    MissingInstanceError,
    ModeError,
)
from .private import HAS_STATE, C, get_state, put_state

DEFAULT_SPLIT_SIZE = 2048
NEVER = "never"  # gradients are added atomically, whatever the mode
_MAX_DIGITS = 18
DECORATED = "_deterministic_mode"  # a decorated function's attribute, with the block's arguments
_KEY = "flash_attn_deterministic.mode"  # in torch's thread-local state
_Function = TypeVar("_Function", bound=Callable[..., object])


class Mode(NamedTuple):
    """How keys are reduced.

    Args:
        enabled: whether the bits of a row depend on that row's inputs only; False: the fastest
            order for the call's shape and the GPU, whatever its bits.
        split_size: tokens per split, counted from the sequence's own start; 0: one split. Without
            effect unless enabled.
        keep_residual: whether calls that get a backward keep the rounding error of out.
    """

    enabled: bool
    split_size: int
    keep_residual: bool = False


# --- What a process starts with -----------------------------------------------------------------


def _read_environment(environ: Mapping[str, str], wheel_is_deterministic: bool) -> Mode:
    """Reads the mode that a process starts with; what is wrong with a variable names it."""
    check_family(environ)
    name, flag = read_flag(environ, ENABLED)
    enabled = wheel_is_deterministic if flag is None else flag
    if enabled and not wheel_is_deterministic:
        raise _not_in_wheel(name, "unset it or set it to 0")
    name, text = read(environ, SPLIT_SIZE)
    if not text:
        return Mode(enabled, DEFAULT_SPLIT_SIZE)
    # Python refuses to convert thousands of digits; no valid number has more than these.
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise ArgumentError(
            f"{name}: expected a number of tokens up to 2**29, 0 for one split, got {shown(text)}; "
            f"unset it for {DEFAULT_SPLIT_SIZE}"
        )
    return Mode(enabled, as_mode_split_size(int(text), name))


def _not_in_wheel(name: str, otherwise: str) -> MissingInstanceError:
    return MissingInstanceError(
        f"{name}: this wheel was built with FLASH_ATTENTION_DETERMINISTIC=OFF and has "
        f"schedule-dependent kernels only; install the release wheel, or {otherwise}"
    )


def _wheel_holds_deterministic() -> bool:
    try:
        return build_info().deterministic
    except BuildInfoError:
        return True  # a source tree: what needs the record raises when it is called


def _start() -> tuple[Mode | None, tuple[type[FlashAttnError], str]]:
    try:
        return _read_environment(os.environ, _WHEEL_DETERMINISTIC), (FlashAttnError, "")
    except FlashAttnError as error:
        return None, (type(error), str(error))


_WHEEL_DETERMINISTIC = _wheel_holds_deterministic()
# None where the environment variables are wrong. The first call that needs the mode raises, not the
# import: `info` and `--help` have to work.
_process_mode, _environment_problem = _start()


def _process() -> Mode:
    if _process_mode is None:
        kind, message = _environment_problem
        raise kind(message)
    return _process_mode


# --- Blocks of a thread -------------------------------------------------------------------------


class _Entry:
    """One block that a thread is inside; compared by identity, not by mode."""

    def __init__(self, mode: Mode, box: _Box) -> None:
        self.mode = mode
        self.box = box


class _Box:
    """The blocks that a thread is inside, and the mode of the innermost, which calls read.

    That mode is an attribute of its own, so that a compiled function depends on it alone, not on
    the number of blocks around it.
    """

    def __init__(self) -> None:
        self.mode: Mode | None = None
        self.entries: list[_Entry] = []
        # The box in torch's thread-local state before the first block.
        self.before: _Box | None = None

    def enter(self, entry: _Entry) -> None:
        self.entries.append(entry)
        self._read_last()

    def leave(self, entry: _Entry) -> None:
        # Not always the innermost: coroutines and generators can interleave.
        self.entries.remove(entry)
        self._read_last()

    def _read_last(self) -> None:
        # The garbage collector can end a generator, and so its block, at any moment in any thread.
        # Each change of the list is atomic, so this reads until the last entry stays the same.
        while True:
            last = self.entries[-1] if self.entries else None
            self.mode = None if last is None else last.mode
            if (self.entries[-1] if self.entries else None) is last:
                return


class _Thread(threading.local):
    def __init__(self) -> None:  # runs once in each thread that reads it
        self.box = _Box()


_thread = _Thread()


def _mode_of_backward() -> Mode | None:
    """In a thread of the autograd engine: the mode of the thread that called backward()."""
    box: _Box | None = get_state(_KEY)
    if box is not None and box.mode is None:
        # This thread's own box, whose last block was ended by another thread.
        box = box.before
        put_state(_KEY, box)
    return None if box is None else box.mode


def get_deterministic_mode() -> Mode:
    """Returns the mode of calls from this thread.

    Raises:
        ArgumentError: a ValueError; the environment variables are wrong, and no mode was set since.
        MissingInstanceError: a RuntimeError; they ask for kernels that this wheel does not hold.
    """
    return mode_of_call(torch.compiler.is_compiling())


def mode_of_call(compiling: bool) -> Mode:
    """Returns the mode of this thread; `compiling`: torch.compile traces the call."""
    mode = _thread.box.mode
    if mode is None and not compiling and HAS_STATE and C._is_key_in_tls(_KEY):
        mode = _mode_of_backward()
    if mode is None:
        mode = _process_mode
    return _process() if mode is None else mode


def set_deterministic_mode(
    enabled: bool = True, split_size: int | None = None, keep_residual: bool | None = None
) -> None:
    """Sets the mode of the process, for all threads.

    Functions that torch.compile has compiled are compiled again for the new mode. A thread inside
    `deterministic_mode` keeps that one until it leaves it. A process starts with the mode of the
    environment variables FLASH_ATTENTION_DETERMINISTIC (1 or 0) and FLASH_ATTENTION_SPLIT_SIZE, or
    FA2_DETERMINISTIC and FA2_SPLIT_SIZE, read once at import, by default enabled with a split size
    of 2048. If one of them is wrong, calls raise until a whole mode is set here.

    Args:
        enabled: whether the bits of a row depend on that row's inputs only; False: the fastest
            order for the call's shape and the GPU.
        split_size: tokens per split, counted from the sequence's own start: a multiple of the
            kernels' 64 keys per block, at most 2^29; 0: one split; None: as it was. Part of what
            the bits depend on. Smaller splits give short batches of long sequences more
            parallelism, and cost more merges.
        keep_residual: whether calls whose inputs require a gradient keep the rounding error of out
            for the backward, 2 bytes for each element. out and softmax_lse keep their bits; dq and
            dk get other ones, with a far smaller error where the values of a row are much alike,
            as the backward subtracts rowsum(dout * out) from numbers close to it. False, unless
            set; None: as it was. Independent of enabled. Calls that can't pass it to the backward
            raise: those over several ranks whose inputs require a gradient, and torch's own
            attention.

    Raises:
        ArgumentError: a ValueError; split_size is not valid.
        ArgumentTypeError: a TypeError; enabled or keep_residual is no bool, or split_size no int.
        MissingInstanceError: a RuntimeError; the wheel was built without deterministic kernels.
    """
    global _process_mode
    _process_mode = _changed(_process, enabled, split_size, keep_residual)


class deterministic_mode:
    """Sets the mode of this thread inside a `with` block, or inside a function it decorates.

    Other threads keep their mode, except for those in which backward() runs functions again for
    torch.utils.checkpoint; see `checkpoint_contexts`. One object may be entered again, inside
    itself, and by several threads at once; also inside a function that torch.compile compiles, and
    around one.

    A block must not span an `await` or a `yield`: other code of the thread would run in its mode,
    and it in theirs. Blocks that are left out of order, or by another thread, still restore the
    mode. A decorated function has to run its body in the call: no class, no coroutine function, no
    generator function.

    Args:
        enabled: as in `set_deterministic_mode`.
        split_size: as in `set_deterministic_mode`; None: that of the mode around it.
        keep_residual: likewise.

    Raises:
        ArgumentError: a ValueError; split_size is not valid.
        ArgumentTypeError: a TypeError; enabled or keep_residual is no bool, split_size no int, the
            decorated object no ordinary function, or its result a coroutine or a generator.
        MissingInstanceError: a RuntimeError; the wheel was built without deterministic kernels.
        ModeError: a RuntimeError; a block is left that was not entered.

    Example:
        >>> with deterministic_mode(split_size=512):
        ...     get_deterministic_mode()
        Mode(enabled=True, split_size=512, keep_residual=False)
    """

    def __init__(
        self,
        enabled: bool = True,
        split_size: int | None = None,
        keep_residual: bool | None = None,
    ) -> None:
        # Checked here too, so that the traceback shows the line with the wrong argument.
        _changed(_default, enabled, split_size, keep_residual)
        self._arguments = enabled, split_size, keep_residual
        self._entered: list[_Entry] = []

    def __enter__(self) -> None:
        box = _thread.box
        entry = _Entry(_changed(get_deterministic_mode, *self._arguments), box)
        compiling = torch.compiler.is_compiling()
        if not box.entries and not compiling:
            before = get_state(_KEY)
            if before is not box:
                box.before = before
        box.enter(entry)
        self._entered.append(entry)
        if not compiling:
            put_state(_KEY, box)

    def __exit__(self, *exception: object) -> None:
        here = _thread.box
        if not self._entered:
            raise ModeError(
                "deterministic_mode: expected __exit__ after __enter__ of the same object, got one "
                "more exit than entries; use it in a with statement"
            )
        # The last entry of this thread. Another thread's only where this one ends its block, as
        # the garbage collector does with a generator.
        mine = [entry for entry in self._entered if entry.box is here]
        entry = mine[-1] if mine else self._entered[-1]
        self._entered.remove(entry)
        entry.box.leave(entry)
        if entry.box is here and here.mode is None and not torch.compiler.is_compiling():
            put_state(_KEY, here.before)
            here.before = None

    def __call__(self, function: _Function) -> _Function:
        _check_function(function)
        arguments = self._arguments

        @functools.wraps(function)
        def inside(*args: object, **kwargs: object) -> object:
            # One object for each call: several threads may be inside at once.
            with deterministic_mode(*arguments):
                result = function(*args, **kwargs)
            if isinstance(result, _LATER):
                if isinstance(result, types.CoroutineType):
                    result.close()  # otherwise Python warns that it was never awaited
                raise _runs_later(f"one that returned a {type(result).__name__}")
            return result

        for name in _COMPILER_ATTRIBUTES:
            vars(inside).pop(name, None)
        setattr(inside, DECORATED, arguments)
        return inside  # type: ignore[return-value]


def _default() -> Mode:
    return Mode(True, DEFAULT_SPLIT_SIZE)


def _changed(
    around: Callable[[], Mode],
    enabled: bool,
    split_size: int | None,
    keep_residual: bool | None,
) -> Mode:
    """Returns the mode of the arguments; those that are None are taken from `around`."""
    if not isinstance(enabled, bool):
        raise ArgumentTypeError(
            f"enabled: expected a bool, got {type_name(enabled)}; a split size goes into "
            "split_size="
        )
    if enabled:
        _require_deterministic_kernels("enabled", "pass enabled=False")
    if not isinstance(keep_residual, bool | None):
        raise ArgumentTypeError(
            f"keep_residual: expected a bool, or None for the mode's, got "
            f"{type_name(keep_residual)}"
        )
    try:
        _, split, keep = around()
    except FlashAttnError:  # the environment variables are wrong
        if split_size is None:
            raise
        _, split, keep = _default()
    return Mode(
        enabled,
        split if split_size is None else as_mode_split_size(split_size),
        keep if keep_residual is None else keep_residual,
    )


_LATER = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)
# functools.wraps copies these from a function that torch.compile has compiled. With them, torch
# takes the wrapper for the compiled function, and would skip the wrapper.
_COMPILER_ATTRIBUTES = (
    "_is_torch_compile",
    "_isolate_recompiles_id",
    "_torchdynamo_inline",
    "_torchdynamo_orig_callable",
    "_torchdynamo_wrapper_id",
    "aot_compile",
    "get_compiler_config",
)


def _check_function(function: Any) -> None:
    """Refuses to decorate what does not run its body during the call."""
    expected = "function: expected an ordinary function, got "
    if isinstance(function, type):
        raise ArgumentTypeError(f"{expected}the class {name_of(function)}; decorate its methods")
    if not callable(function):
        raise ArgumentTypeError(
            f"{expected}{type_name(function)}, which can't be called; decorate the function inside "
            "of it"
        )
    if inspect.iscoroutinefunction(function):
        raise _runs_later("a coroutine function")
    if inspect.isgeneratorfunction(function):
        raise _runs_later("a generator function")
    if inspect.isasyncgenfunction(function):
        raise _runs_later("an async generator function")


def _runs_later(what: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"function: expected an ordinary function, got {what}, whose body runs after the call; put "
        "the block inside it, around code without await and yield"
    )


# --- The mode of a call -------------------------------------------------------------------------


def resolve(mode: Mode, split_size: int | None) -> Mode:
    """Returns the mode of a call with this split_size (None: the mode's), 0 without effect."""
    if not mode.enabled:
        split_size = 0
    return mode if split_size is None else mode._replace(split_size=split_size)


def resolve_deterministic(deterministic: Any, mode: Mode) -> bool:
    """Returns whether the backward of a call is to be deterministic.

    False is flash_attn's default, which frameworks pass even where their user chose nothing. So it
    means the same as None: the mode decides, or torch.use_deterministic_algorithms.
    """
    if isinstance(deterministic, str):
        if deterministic == NEVER:
            return False
        raise ArgumentTypeError(
            f"deterministic: expected a bool, None or {NEVER!r}, got {shown(deterministic)}"
        )
    if deterministic is not None and as_flag("deterministic", deterministic):
        _require_deterministic_kernels("deterministic", "pass deterministic=False")
        return True
    # As torch does where it can; where the wheel can't, the backward says so.
    switches = torch.are_deterministic_algorithms_enabled() and _WHEEL_DETERMINISTIC
    return mode.enabled or switches


def _require_deterministic_kernels(name: str, otherwise: str) -> None:
    if not _WHEEL_DETERMINISTIC:
        raise _not_in_wheel(name, otherwise)


# --- Checkpoints --------------------------------------------------------------------------------


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Makes torch.utils.checkpoint recompute a function in the mode of its first run.

    The backward recomputes a function in its own mode: that of the thread that called backward()
    or, with a torch that does not pass it to its autograd threads, that of the process. If that
    mode differs from the first one, for instance because a `deterministic_mode` block was left,
    rows have other bits. Passed as context_fn, this function prevents that. use_reentrant=True
    takes no context_fn: decorate the function with `deterministic_mode` instead.

    In a checkpoint that torch.compile compiles, the mode is part of the graph; this function then
    returns the contexts of a checkpoint that saves nothing, torch.compile's default.

    Returns:
        The context of the first run, which changes nothing, and that of each recomputation.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.ones(1, 4, 3, 2, 64, dtype=torch.bfloat16, requires_grad=True)
        >>> with deterministic_mode(split_size=512):
        ...     out = checkpoint(
        ...         flash_attn_qkvpacked_func,
        ...         x,
        ...         use_reentrant=False,
        ...         context_fn=checkpoint_contexts,
        ...     )
        >>> out.sum().backward()
    """
    if _is_traced():
        # The only kind of context that torch.compile supports.
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        return create_selective_checkpoint_contexts(_recompute)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]
    mode = get_deterministic_mode()
    return nullcontext(), deterministic_mode(*mode)


def _is_traced() -> bool:
    # The test of torch.utils.checkpoint: in some versions is_compiling() is False at this stage.
    key = C._TorchDispatchModeKey.PROXY
    return torch.compiler.is_compiling() or C._get_dispatch_mode(key) is not None


def _recompute(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.PREFER_RECOMPUTE
