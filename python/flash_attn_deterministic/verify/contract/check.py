"""A check of the contract, its cases, and the results of running them."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ...errors import UnsupportedError
from ..shared.bits import Difference, difference
from .call import Attention, Call, Tensors, draw
from .sizes import Size

_SHORT = {"seqlen_q": "q", "seqlen_k": "k", "split_size": "split", "page_size": "page"}


@dataclass(frozen=True)
class Case:
    """One case of a check; the same case always draws the same numbers."""

    name: str  # unique within its check
    head_dim: int  # of q, k and v
    dtype: str  # "bf16" or "fp16"
    feature: str  # a name in features.FEATURES
    seed: int  # of the random numbers
    parameters: Mapping[str, int] = field(default_factory=dict)  # what else the check varies

    def __getitem__(self, name: str) -> int:
        return self.parameters[name]


def cases_of(size: Size, features: Iterable[str], **axes: Iterable[int]) -> Iterator[Case]:
    """Yields a case for each config, feature and choice of the values of parameters."""
    choices = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    for (head_dim, dtype), feature, choice in itertools.product(
        size.configs, tuple(features), choices
    ):
        yield case_of(head_dim, dtype, feature, choice)


def feature_cases(size: Size) -> Iterator[Case]:
    """Yields a case for each config, feature and number of queries."""
    return cases_of(size, size.features, seqlen_q=size.seqlen_q)


def case_of(head_dim: int, dtype: str, feature: str, parameters: dict[str, int]) -> Case:
    """Returns a case whose seed follows from its name."""
    words = [f"d{head_dim}", dtype, feature]
    words += [f"{_SHORT.get(name, name)}{value}" for name, value in parameters.items()]
    name = "-".join(words)
    return Case(name, head_dim, dtype, feature, zlib.crc32(name.encode()) >> 1, parameters)


class Mismatch(Exception):
    """Two results that should have the same bits do not, or a check could not see what it should.

    `call` is what one side comes from, `tensor` the result that is wrong, `found` where it differs.
    """

    def __init__(
        self, what: str, call: Call, tensor: str = "", found: Difference | None = None
    ) -> None:
        super().__init__(what)
        self.what, self.call, self.tensor, self.found = what, call, tensor, found


@dataclass(frozen=True)
class Check:
    """One row of the contract."""

    id: str  # as in the table of the contract
    promise: str  # "the same bits whatever ..." in a few words
    cases: Callable[[Size], Iterable[Case]]  # what to run, for a size
    run: Callable[[Case, Attention, Size], None]  # runs one case; raises Mismatch
    # returns why it does not apply to a run, or the run cannot decide it; "" if it can
    unavailable: Callable[[Size], str] = lambda size: ""


@dataclass
class Outcome:
    """The result of a check."""

    cases: int = 0  # how many ran
    failed: int = 0  # how many of them failed
    counter_example: dict[str, Any] | None = None  # the first that failed
    # the same counts by head dim and dtype, such as "64 bf16"
    by_config: dict[str, dict[str, int]] = field(default_factory=dict)


def expect_same(call: Call, what: str, left: Tensors, right: Tensors) -> None:
    """Raises Mismatch if results of the same names differ in a bit, or are no numbers."""
    for name in left:
        found = difference(left[name], right[name])
        if found is not None:
            raise Mismatch(f"{what}: {name}: {found.words}", call, name, found)
    expect_numbers(call, what, left)


def expect_numbers(call: Call, what: str, results: Tensors) -> None:
    """Checks for NaN and Inf: kernels that return nothing else would be equal bit for bit.

    Raises:
        Mismatch: there is one. A softmax_lse may be infinite: that of a row that sees no key is.
    """
    for name, tensor in results.items():
        odd = tensor.isnan() if name == "softmax_lse" else ~tensor.isfinite()
        if bool(odd.any()):
            words = f"{int(odd.sum())} of {odd.numel()} elements are NaN or infinite"
            raise Mismatch(f"{what}: {name}: {words}", call, name)


def expect_different(call: Call, what: str, left: Tensors, right: Tensors) -> None:
    """The opposite of `expect_same`, for what must change the bits of some result.

    Raises:
        Mismatch: all are equal.
    """
    if all(difference(left[name], right[name]) is None for name in left):
        raise Mismatch(f"{what}: expected other bits, got the same", call, "out")


def make(case: Case, attention: Attention, size: Size, **shape: int) -> Call:
    """Draws the call of a case; a batch of 2 and 2 KV heads, and the size's, where not given."""
    nheads = shape.get("nheads", size.nheads)
    parameters = {**case.parameters, **shape}
    seqlen_q = parameters.get("seqlen_q", size.seqlen_q[-1])
    call = draw(
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
    # Ties, zeros of both signs, and scores that make earlier sums vanish.
    call.v[:, ::3, :, ::2] = 0.0
    call.v[:, ::5, :, ::2] = -0.0
    call.k[:, 1::7] = call.k[:, :1]
    call.k[:, 3::31, :1] *= 100.0
    return call


def run_check(
    check: Check,
    size: Size,
    attention: Attention,
    on_case: Callable[[Case, int, int], None] = lambda case, number, total: None,
) -> Outcome:
    """Runs all cases of a check, also after one that failed; tells each with its number and
    count.
    """
    outcome = Outcome()
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
        working = usable(size.device)
        if error is None and not working:
            error = RuntimeError("the GPU reported an error after this case")
        if error is not None:
            outcome.failed += 1
            counts["failed"] += 1
            if outcome.counter_example is None:
                outcome.counter_example = _counter_example(check, case, size, error)
        if not working or isinstance(error, UnsupportedError):
            break  # nothing else can come of the rest
    return outcome


def usable(device: str) -> bool:
    """Returns whether a GPU still works for this process; the CPU does."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception:  # a broken context raises errors of several types
        return False
    return True


def _described(option: Any) -> Any:
    if isinstance(option, torch.Tensor):
        return f"drawn, {tuple(option.shape)}"
    return list(option) if isinstance(option, tuple) else option


def _counter_example(check: Check, case: Case, size: Size, error: Exception) -> dict[str, Any]:
    """Returns a case that failed as docs/verification.schema.json has it: it can be drawn again."""
    example: dict[str, Any] = {
        "check": check.id,
        "case": case.name,
        "what": f"{type(error).__name__}: {error}"[:2000],
        "device": size.device,
        "dtype": case.dtype,
        "head_dim": case.head_dim,
        "feature": case.feature,
        "seed": case.seed,
        "parameters": dict(case.parameters),
        **{"shapes": {}, "options": {}, "tensor": "", "elements": 0, "differing": 0},
        **dict.fromkeys(("index", "left", "right")),
    }
    if isinstance(error, Mismatch):
        call = error.call
        given = call.keywords if call.slopes is not None else call.options
        options = {name: _described(value) for name, value in given.items()}
        shapes = {name: list(getattr(call, name).shape) for name in ("q", "k", "v")}
        example |= {"what": error.what[:2000], "tensor": error.tensor}
        example |= {"shapes": shapes, "options": options}
        if error.found is not None:
            example |= {n: v for n, v in asdict(error.found).items() if n in example}
            example["index"] = error.found.index and list(error.found.index)
    return example
