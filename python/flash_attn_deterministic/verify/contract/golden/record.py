"""The file of golden hashes, and what speaks for them besides the wheel that computed them.

A wheel's results are no proof of themselves. So each call is compared with float64, and on a GPU
that runs two families of kernels, which share no main loop, with the other family bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ....errors import FlashAttnError
from ....schemas import FAMILIES
from ... import bounds
from ...shared.files import json_text, write_files
from .. import layouts
from ..call import Call, Tensors
from ..families import in_each
from .calls import GoldenCall
from .inputs import digest

PATH = Path(__file__).with_name("golden.json")


class GoldenError(FlashAttnError, ValueError):
    """Golden hashes could not be read, or must not be written over."""


@dataclass
class Evidence:
    """What was found so far."""

    # of calls that ran in both families: how many have the same bits, and the names of the others;
    # None: this GPU runs one
    families: dict[str, Any] | None
    # how many calls were compared with float64, and the worst error over its bound
    accuracy: dict[str, Any] = field(default_factory=lambda: {"calls": 0, "worst": {"ratio": 0.0}})

    def add(
        self, name: str, golden: GoldenCall, call: Call, parts: layouts.Parts, found: str
    ) -> None:
        """Examines a case whose results have these hashes."""
        self.accuracy["calls"] += 1
        for one, own in parts:
            for tensor, error in bounds.compare(one, own)[0].items():
                worst = self.accuracy["worst"]["ratio"]
                if error.ratio > worst or not worst:
                    worst = {"case": name, "tensor": tensor, "ratio": error.ratio}
                    self.accuracy["worst"] = worst
        if self.families is None:
            return
        one = parts[0][0]
        ran = in_each(lambda: (one.plan.family, hashes_of(golden.run(call)[1])))
        if any(hashes != found for _, hashes in ran):
            self.families["differing"].append(name)
        elif tuple(family for family, _ in ran) == FAMILIES:
            self.families["agreeing"] += 1


@dataclass(frozen=True)
class Entry:
    """The hashes of GPUs of one compute capability."""

    # the GPU, torch, toolkit and digests of sources that they were first computed with
    origin: Mapping[str, Any]
    evidence: Mapping[str, Any]  # of `Evidence`
    hashes: Mapping[str, str]  # of each case: those of its tensors, with spaces between them


@dataclass(frozen=True)
class Golden:
    """All golden hashes, of one version of the bits."""

    bits_version: int
    inputs: Mapping[str, str] = field(default_factory=dict)  # the hash of the inputs of each case
    entries: Mapping[str, Entry] = field(default_factory=dict)  # by compute capability, "9.0"

    def problem(self, entry: Entry) -> str:
        """Says why hashes must not be taken; "" if they may."""
        if not entry.evidence:
            return "there is no evidence for these hashes but the wheel itself"
        families, worst = entry.evidence["families"], entry.evidence["accuracy"]["worst"]
        if not worst["ratio"] <= 1.0:
            return (
                f"{worst['tensor']} of {worst['case']} is {worst['ratio']:.3g} times as far from "
                "float64 as roundings explain"
            )
        if families is None:
            if any(one.evidence and one.evidence["families"] for one in self.entries.values()):
                return ""
            return (
                "this GPU runs one family of kernels; record them on compute capability 9.0 first"
            )
        if families["differing"]:
            first, count = families["differing"][0], len(families["differing"])
            return f"{FAMILIES[0]} and {FAMILIES[1]} differ in {count} calls, the first {first}"
        return "" if families["agreeing"] else "no call ran in both families of kernels"

    def added(
        self, inputs: Mapping[str, str], compute_capability: str, entry: Entry, force: bool = False
    ) -> Golden:
        """Adds hashes of inputs and of results; those of cases that are not in them stay.

        Raises:
            GoldenError: others are there and `force` is not set, or nothing speaks for the new
                ones.
        """
        golden = replace(self, inputs=_merged("inputs", self.inputs, inputs, force))
        if why := self.problem(entry):
            raise GoldenError(f"golden hashes of bits_version {self.bits_version}: {why}")
        before = self.entries.get(compute_capability)
        if before is not None:
            what = f"bits_version {self.bits_version}, {compute_capability}"
            hashes = _merged(what, before.hashes, entry.hashes, force)
            entry = replace(before if hashes == before.hashes else entry, hashes=hashes)
        return replace(golden, entries={**self.entries, compute_capability: entry})


def hashes_of(results: Tensors) -> str:
    """Returns the hash of each result, with spaces between them."""
    return " ".join(digest([tensor]) for tensor in results.values())


def _merged(
    what: str, before: Mapping[str, str], after: Mapping[str, str], force: bool
) -> dict[str, str]:
    other = [name for name in after if before.get(name, after[name]) != after[name]]
    if other and not force:
        raise GoldenError(
            f"golden hashes, {what}: {len(other)} of {len(after)} cases have others, the first "
            f"{other[0]}; a release that changes a bit raises bits_version in cpp/instances.json "
            "(--force writes over them)"
        )
    return {**before, **after}


def read(bits_version: int, path: Path | None = None) -> Golden:
    """Reads a file of golden hashes (None: the package's): of another version its inputs alone.

    Raises:
        GoldenError: the file is none; but one that does not exist holds no hashes.
    """
    path = PATH if path is None else path
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        entries = {
            capability: Entry(**{**entry, "hashes": _flat(entry["hashes"])})
            for capability, entry in record["results"].items()
            if record["bits_version"] == bits_version
        }
        return Golden(bits_version, _flat(record["inputs"]), entries)
    except FileNotFoundError:
        return Golden(bits_version)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GoldenError(f"{path}: no file of golden hashes ({error})") from error


def write(golden: Golden, path: Path) -> None:
    """Writes a file of golden hashes, whole or not at all.

    Raises:
        ReportError: the file cannot be written.
    """
    record = {
        "bits_version": golden.bits_version,
        "inputs": _nested(golden.inputs),
        "results": {
            capability: {**asdict(entry), "hashes": _nested(entry.hashes)}
            for capability, entry in sorted(golden.entries.items())
        },
    }
    write_files(path.parent, {path.name: json_text(record)})


def _nested(hashes: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns hashes of cases such as "d64-bf16-alibi" by call, then by config."""
    found: dict[str, dict[str, str]] = {}
    for name, text in sorted(hashes.items()):
        head_dim, dtype, call = name.split("-", 2)
        found.setdefault(call, {})[f"{head_dim}-{dtype}"] = text
    return found


def _flat(hashes: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return {
        f"{config}-{call}": text for call, own in hashes.items() for config, text in own.items()
    }
