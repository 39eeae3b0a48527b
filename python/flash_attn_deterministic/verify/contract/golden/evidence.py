"""What speaks for golden hashes besides the wheel that computed them.

A wheel's results are no proof of themselves. So each call is compared with float64, and on a GPU
that runs two families of kernels, which share no main loop, with the other family bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ... import bounds, exact
from ..call import Call, Tensors
from ..device_override import device_override
from .calls import GoldenCall

FAMILIES = ("sm80", "sm90")
_FIRST = 2  # the first bits_version that needs it


@dataclass
class Evidence:
    """What was found so far."""

    two_families: bool  # whether the GPU runs both
    agreeing: int = 0  # calls that ran in both, with the same bits
    differing: list[str] = field(default_factory=list)  # calls that did not
    calls: int = 0  # calls that were compared with float64
    worst: dict[str, Any] = field(default_factory=lambda: {"ratio": 0.0})  # error over its bound

    def add(self, name: str, golden: GoldenCall, call: Call, results: Tensors, found: str) -> None:
        """Examines a call.

        Args:
            name: of the case.
            golden: which call it is.
            call: its inputs.
            results: of the call.
            found: their hashes.
        """
        from . import hashes_of

        self.calls += 1
        for tensor, ratio in ratios(golden, call, results):
            if ratio > self.worst["ratio"] or not self.worst["ratio"]:
                self.worst = {"case": name, "tensor": tensor, "ratio": ratio}
        if not self.two_families:
            return
        hashes, ran = [], []
        for family in FAMILIES:
            with device_override(f"family={family}"):
                one, _ = next(golden.sequences(call, results))
                ran.append(call.attention.family(one.q, one.k, one.v, **one.keywords))
                hashes.append(hashes_of(golden.results(call)))
        if {found, *hashes} != {found}:
            self.differing.append(name)
        elif tuple(ran) == FAMILIES:
            self.agreeing += 1

    def record(self) -> dict[str, Any]:
        """Returns it as the file of golden hashes and reports have it."""
        families = {"agreeing": self.agreeing, "differing": self.differing}
        return {
            "families": families if self.two_families else None,
            "accuracy": {"calls": self.calls, "worst": self.worst},
        }


def ratios(golden: GoldenCall, call: Call, results: Tensors) -> Iterable[tuple[str, float]]:
    """Yields the name of each result, and its error over the bound, for each sequence."""
    for one, own in golden.sequences(call, results):
        options = {n: x for n, x in one.keywords.items() if n != "split_size"}
        softcap, dtype = options.get("softcap", 0.0), one.q.dtype
        truth = exact.Definition(**options)
        if "dq" in own:
            plain = exact.Definition(**options, dtype=dtype)
            dq, dk, dv, *_ = own.values()
            three = [d.gradients(one.q, one.k, one.v, one.dout) for d in (truth, plain)]
            found = bounds.gradients((dq, dk, dv), three[0], three[1], dtype, softcap)
        else:
            found = bounds.forward(own, truth.forward(one.q, one.k, one.v), dtype, softcap)
        yield from ((name, error.ratio) for name, error in found.items())


def problem(bits_version: int, evidence: Mapping[str, Any] | None, others: bool) -> str:
    """Says why hashes must not be taken; "" if they may.

    Args:
        bits_version: of the hashes.
        evidence: theirs, as `Evidence.record` returned it.
        others: whether there are hashes of the version from a GPU with two families.
    """
    if bits_version < _FIRST:
        return ""
    if evidence is None:
        return "there is no evidence for these hashes but the wheel itself"
    families, worst = evidence["families"], evidence["accuracy"]["worst"]
    if not worst["ratio"] <= 1.0:
        return (
            f"{worst['tensor']} of {worst['case']} is {worst['ratio']:.3g} times as far from "
            "float64 as roundings explain"
        )
    if families is None:
        words = "this GPU runs one family of kernels; record them on compute capability 9.0 first"
        return "" if others else words
    if families["differing"]:
        first, count = families["differing"][0], len(families["differing"])
        return f"{FAMILIES[0]} and {FAMILIES[1]} differ in {count} calls, the first {first}"
    return "" if families["agreeing"] else "no call ran in both families of kernels"
