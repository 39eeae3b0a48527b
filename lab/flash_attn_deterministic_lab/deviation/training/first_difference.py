"""Names the first operation whose result differs between two identical trainings."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...errors import ArgumentError
from ..study.environment import one_thread, repeatable
from .runs import Run, Setup, train

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HERE = ("/torch/", "first_difference.py")


class _Entry(NamedTuple):
    operation: str  # such as aten.addmm.default
    step: int  # optimizer steps before it
    where: str  # the line that called it; in a backward, "backward"
    shapes: tuple[tuple[int, ...], ...]  # of its results
    bits: tuple[int, ...] = ()  # of each


_END = _Entry("the end", 0, "-", ())


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps a fingerprint of every operation's results, backward and optimizer included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[_Entry] = []
        self.prints: list[torch.Tensor] = []  # where the model is, until the training is over
        self.step = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # Fresh memory holds anything.
        if "empty" not in func._schema.name:
            written = [
                kwargs.get(argument.name, args[place] if place < len(args) else None)
                for place, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            results = [one for one in tree_leaves([out, written]) if isinstance(one, torch.Tensor)]
            shapes = tuple(tuple(tensor.shape) for tensor in results)
            self.entries.append(_Entry(str(func), self.step, _caller(sys._getframe(1)), shapes))
            self.prints += map(_fingerprint, results)
        return out


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Adds the bits of all elements, each times an odd number of its place: order plays no part."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.int8)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    bits = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)
    return (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()


def _caller(frame: FrameType | None) -> str:
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _HERE):
            return f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"


def first_difference(setup: Setup, times: int = 3) -> str | None:
    """Repeats a training and compares every operation's result with the first time, bit by bit.

    Fingerprints are sums of integers, which have no order. Memory that is not initialised holds NaN
    while this runs, so that an operation that reads it shows.

    Returns:
        The first operation with other bits, in words; None: all were equal every time.

    Raises:
        ArgumentError: nothing would be repeated.
    """
    for name, given in (("steps", setup.steps), ("times", times)):
        if given < 1:
            raise ArgumentError(f"{name}: expected at least 1, got {given}")
    first = _traced(setup)
    for time in range(1, times + 1):
        other = _traced(setup)
        for number, (left, right) in enumerate(itertools.zip_longest(first, other, fillvalue=_END)):
            operation, bits = right.operation, right.bits
            if (left.operation, left.shapes) != (right.operation, right.shapes):
                operation += f" in the place of {left.operation}"
            elif left.bits == bits:
                continue
            results = ", ".join(
                f"{shape} {'is equal' if one == again else 'differs'}"
                for shape, one, again in zip(right.shapes, left.bits, bits, strict=False)
            )
            return (
                f"repeat {time}, step {right.step}: {operation} (operation {number}, "
                f"{right.where}): {results}; all that came before has equal bits"
            )
    return None


def _traced(setup: Setup) -> list[_Entry]:
    trace = _Trace()

    def count(*_: Any) -> None:
        trace.step += 1

    handle = register_optimizer_step_post_hook(count)
    try:
        with repeatable(setup.device, fill=True), one_thread(), trace:
            train(setup, Run("base", against=""), 0, None, False)
    finally:
        handle.remove()
    # One transfer for all; those of the few results on the CPU go to the device first.
    bits = iter(torch.stack([each.to(setup.device) for each in trace.prints]).tolist())
    return [entry._replace(bits=tuple(next(bits) for _ in entry.shapes)) for entry in trace.entries]
