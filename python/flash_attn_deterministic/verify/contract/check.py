"""A check of the contract: its cases, and what comes of running them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import UnsupportedError
from ..bits import Difference, Number, difference
from .attention import Attention
from .call import Call, Tensors, draw
from .sizes import Size


@dataclass(frozen=True)
class Case:
    """One case of a check; the same case always draws the same numbers.

    Args:
        name: unique within its check.
        head_dim: of q, k and v.
        dtype: "bf16" or "fp16".
        feature: a name in sizes.FEATURES.
        seed: of the random numbers.
        parameters: what else the check varies.
    """

    name: str
    head_dim: int
    dtype: str
    feature: str
    seed: int
    parameters: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> int:
        return self.parameters[name]


class Mismatch(Exception):
    """Two results that should have the same bits do not, or a check could not see what it should.

    Args:
        what: the two sides in words.
        call: the call that one side comes from.
        tensor: name of the tensor; "" where no tensor is the matter.
        found: where they differ; None where no tensor is the matter.
    """

    def __init__(
        self, what: str, call: Call, tensor: str = "", found: Difference | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.call = call
        self.tensor = tensor
        self.found = found


@dataclass(frozen=True)
class CounterExample:
    """A case that failed, in full: enough to draw its numbers again.

    Args:
        check: id of the check.
        case: name of the case.
        what: the two sides in words, or the exception.
        device: "cpu" or "cuda".
        dtype: of q, k and v.
        head_dim: theirs.
        feature: the mask and the changes to scores.
        seed: of the random numbers.
        parameters: what else the check varies.
        shapes: of the tensors of one side.
        options: keyword arguments of the call.
        tensor: which result differs.
        elements: how many numbers it has.
        differing: how many of them differ.
        index: the first that differs.
        left: that number on one side.
        right: on the other.
    """

    check: str
    case: str
    what: str
    device: str
    dtype: str
    head_dim: int
    feature: str
    seed: int
    parameters: dict[str, int]
    shapes: dict[str, list[int]]
    options: dict[str, Any]
    tensor: str
    elements: int
    differing: int
    index: list[int] | None
    left: Number | None
    right: Number | None


@dataclass(frozen=True)
class Check:
    """One row of the contract.

    Args:
        id: as in the table of the contract.
        promise: "the same bits whatever ..." in a few words.
        cases: what to run, for a size.
        run: runs one case; raises Mismatch.
        devices: where it says anything.
        elsewhere: why it says nothing on other devices.
        unavailable: says why nothing can be said in a run; "" if it can.
    """

    id: str
    promise: str
    cases: Callable[[Size], Iterable[Case]]
    run: Callable[[Case, Attention, Size], None]
    devices: tuple[str, ...] = ("cpu", "cuda")
    elsewhere: str = ""
    unavailable: Callable[[Size], str] = lambda size: ""


@dataclass
class Outcome:
    """What came of a check.

    Args:
        cases: how many ran.
        failed: how many of them failed.
        counter_example: the first that failed.
        by_config: the same counts by head dim and dtype, such as "64 bf16".
        seconds: how long it took.
        broken: the GPU is unusable for this process since one of the cases.
    """

    cases: int = 0
    failed: int = 0
    counter_example: CounterExample | None = None
    by_config: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = 0.0
    broken: bool = False


def expect_same(call: Call, what: str, left: Tensors, right: Tensors) -> None:
    """Compares results bit for bit.

    Args:
        call: the call that one side comes from, for the counter-example.
        what: the two sides in words.
        left: results by name.
        right: results by the same names.

    Raises:
        Mismatch: they differ, or are no numbers.
    """
    for name in left:
        found = difference(left[name], right[name])
        if found is not None:
            raise Mismatch(f"{what}: {name}: {found.words}", call, name, found)
    expect_numbers(call, what, left)


def expect_numbers(call: Call, what: str, results: Tensors) -> None:
    """Looks for NaN and Inf: kernels that return nothing else would be equal bit for bit.

    Raises:
        Mismatch: there is one. A softmax_lse may be infinite: that of a row that sees no key is.
    """
    for name, tensor in results.items():
        odd = tensor.isnan() if name == "softmax_lse" else ~tensor.isfinite()
        if bool(odd.any()):
            words = f"{int(odd.sum())} of {odd.numel()} elements are NaN or infinite"
            raise Mismatch(f"{what}: {name}: {words}", call, name)


def expect_different(call: Call, what: str, left: Tensors, right: Tensors) -> None:
    """The opposite, for what must show in the bits of one of them.

    Raises:
        Mismatch: all are equal.
    """
    if all(difference(left[name], right[name]) is None for name in left):
        raise Mismatch(f"{what}: expected other bits, got the same", call, "out")


def make(case: Case, attention: Attention, size: Size, **shape: int) -> Call:
    """Draws the call of a case.

    Args:
        case: head dim, dtype, feature and seed.
        attention: the functions under test.
        size: of the run.
        **shape: batch, seqlen_q, seqlen_k, nheads, nheads_k and split_size, where not 2, the
            case's, the size's longest, the size's, 2 and the size's.
    """
    nheads = shape.get("nheads", size.nheads)
    parameters = {**case.parameters, **shape}
    seqlen_q = parameters.get("seqlen_q", size.seqlen_q[-1])
    return draw(
        attention,
        (parameters.get("batch", 2), seqlen_q, nheads, case.head_dim),
        parameters.get("seqlen_k", size.seqlen),
        shape.get("nheads_k", 2),
        dtype=case.dtype,
        device=size.device,
        seed=case.seed,
        options={
            **size.options(case.feature),
            "split_size": parameters.get("split_size", size.split),
        },
    )


def run_check(
    check: Check,
    size: Size,
    attention: Attention,
    on_case: Callable[[Case, int, int], None] = lambda case, number, total: None,
) -> Outcome:
    """Runs all cases of a check; one that fails does not keep the next from running.

    Args:
        check: the check.
        size: of the run.
        attention: the functions under test.
        on_case: told of each case before it runs, with its number and how many there are.
    """
    outcome = Outcome()
    begin = time.monotonic()
    cases = list(check.cases(size))
    for number, case in enumerate(cases):
        on_case(case, number, len(cases))
        counts = outcome.by_config.setdefault(
            f"{case.head_dim} {case.dtype}", {"cases": 0, "failed": 0}
        )
        outcome.cases += 1
        counts["cases"] += 1
        error: Exception | None = None
        try:
            check.run(case, attention, size)
        except Exception as caught:
            error = caught
        outcome.broken = size.device == "cuda" and not _usable()
        if error is None and outcome.broken:
            error = RuntimeError("the GPU reported an error after this case")
        if error is not None:
            outcome.failed += 1
            counts["failed"] += 1
            if outcome.counter_example is None:
                outcome.counter_example = _counter_example(check, case, size, error)
        if outcome.broken or isinstance(error, UnsupportedError):
            break  # nothing else can come of the rest
    outcome.seconds = round(time.monotonic() - begin, 3)
    return outcome


def _usable() -> bool:
    try:
        torch.cuda.synchronize()
    except Exception:  # whatever a broken context raises
        return False
    return True


def _counter_example(check: Check, case: Case, size: Size, error: Exception) -> CounterExample:
    call: Call | None = None
    found: Difference | None = None
    tensor = ""
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, Mismatch):
        call, found, tensor, what = error.call, error.found, error.tensor, error.what
    shapes = {} if call is None else {n: list(getattr(call, n).shape) for n in ("q", "k", "v")}
    options = {} if call is None else dict(call.options)
    if call is not None and call.slopes is not None:
        options["alibi_slopes"] = f"drawn, {tuple(call.slopes.shape)}"
    return CounterExample(
        check=check.id,
        case=case.name,
        what=what[:2000],
        device=size.device,
        dtype=case.dtype,
        head_dim=case.head_dim,
        feature=case.feature,
        seed=case.seed,
        parameters=dict(case.parameters),
        shapes=shapes,
        options={n: list(v) if isinstance(v, tuple) else v for n, v in options.items()},
        tensor=tensor,
        elements=0 if found is None else found.elements,
        differing=0 if found is None else found.differing,
        index=None if found is None or found.index is None else list(found.index),
        left=None if found is None else found.left,
        right=None if found is None else found.right,
    )
