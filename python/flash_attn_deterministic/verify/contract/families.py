"""Compares the kernels for every GPU with those of the GPU's own generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from ... import architectures
from ...build_info import build_info
from ...schemas import FAMILIES
from ..features import FEATURES
from . import layouts
from .call import Attention, Call
from .check import Case, Mismatch, cases_of, expect_same, make
from .device_override import device_override
from .sizes import Size

_Found = TypeVar("_Found")
_PARTS = "sm90,path=parts"  # where a call has several splits; otherwise as without


def family_cases(size: Size) -> Iterator[Case]:
    """Returns calls that kernels of both families take."""
    # At head dim 128 one of Hopper's tiles takes 128 keys at a time: splits of 64 would end within.
    splits = [*(split for split in size.splits if split % 128 == 0), 0]
    features = [name for name in size.features if not FEATURES[name].get("alibi")]
    return cases_of(size, features, seqlen_q=(70, 1100), split_size=splits)


def unavailable(size: Size) -> str:
    """Returns why there is one family only; "" if there are two."""
    if size.device == "cpu":
        return "the CPU has no kernels"
    capability = torch.cuda.get_device_capability(0)
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]} has one family of kernels"
    if not any(
        architectures.parse(name).exact and architectures.runs_on(name, capability)
        for name in build_info().architectures
    ):
        return "this wheel holds the kernels for every GPU alone (no 90a-real)"
    return ""


def family(case: Case, attention: Attention, size: Size) -> None:
    """Dense, packed, and over a cache with NaN and Inf behind its ends."""
    call = make(case, attention, size, seqlen_k=min(size.seqlen, 1100))
    taken = in_each(lambda: call.plan.family)
    if tuple(taken) != FAMILIES:
        raise Mismatch(
            f"the two calls ran kernels of {taken[0]} and {taken[1]}, expected one of each of "
            f"{FAMILIES[0]} and {FAMILIES[1]}",
            call,
        )
    rows, keys = ([t.shape[1]] * call.q.shape[0] for t in (call.q, call.k))
    used = [n - 37 * place for place, n in enumerate(keys)]
    _compare(call, "dense", lambda: [(call, call())])
    _compare(call, "packed", lambda: layouts.packed(call, rows, keys).parts)
    _compare(call, "over a cache", lambda: layouts.cached(call, used, room=keys[0] + 100))


def in_each(run: Callable[[], _Found], *families: str) -> list[_Found]:
    """Returns what a function finds in each family of kernels, or in some of them."""
    found = []
    for name in families or FAMILIES:
        with device_override(f"family={name}"):
            found.append(run())
    return found


def _compare(call: Call, form: str, run: Callable[[], layouts.Parts]) -> None:
    results = in_each(lambda: [own for _, own in run()], *FAMILIES, _PARTS)
    for expected, whole, parts in zip(*results, strict=True):
        expect_same(call, f"{form}: {FAMILIES[1]} against {FAMILIES[0]}", whole, expected)
        expect_same(call, f"{form}: parts of {FAMILIES[1]} against {FAMILIES[0]}", parts, expected)
