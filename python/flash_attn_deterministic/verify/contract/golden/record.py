"""The file of golden hashes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ....errors import FlashAttnError
from ...shared.files import write_files
from . import evidence

PATH = Path(__file__).with_name("golden.json")
_SCHEMA = 1


class GoldenError(FlashAttnError, ValueError):
    """Golden hashes could not be read, or must not be written over."""


@dataclass(frozen=True)
class Entry:
    """The hashes of one version of the bits on GPUs of one compute capability."""

    bits_version: int  # of the wheel that computed them
    compute_capability: str  # of the GPU, such as "9.0"
    # the GPU, torch, toolkit and digests of sources that they were first computed with
    origin: Mapping[str, Any]
    hashes: Mapping[str, str]  # of each case: those of its tensors, with spaces between them
    evidence: Mapping[str, Any] | None = None  # of `Evidence.record`; None up to bits_version 1


@dataclass(frozen=True)
class Golden:
    """All golden hashes."""

    inputs: Mapping[str, str] = field(default_factory=dict)  # the hash of the inputs of each case
    entries: tuple[Entry, ...] = ()  # hashes of results

    def find(self, bits_version: int, compute_capability: str) -> Entry | None:
        """Returns the hashes for a wheel on a GPU, None if there are none."""
        found = {(one.bits_version, one.compute_capability): one for one in self.entries}
        return found.get((bits_version, compute_capability))

    def problem(self, entry: Entry) -> str:
        """Says why hashes must not be taken; "" if they may."""
        others = any(
            one.bits_version == entry.bits_version and one.evidence and one.evidence["families"]
            for one in self.entries
        )
        return evidence.problem(entry.bits_version, entry.evidence, others)

    def added(
        self, inputs: Mapping[str, str], entry: Entry | None = None, force: bool = False
    ) -> Golden:
        """Adds hashes of inputs and of results; those of cases that are not in them stay.

        Raises:
            GoldenError: other hashes are there for the same cases, and `force` is not set; or
                nothing speaks for the new ones.
        """
        golden = replace(self, inputs=_merged("inputs", self.inputs, inputs, force))
        if entry is None:
            return golden
        why = self.problem(entry)
        if why:
            raise GoldenError(f"golden hashes, bits_version {entry.bits_version}: {why}")
        before = self.find(entry.bits_version, entry.compute_capability)
        if before is not None:
            what = f"bits_version {entry.bits_version}, {entry.compute_capability}"
            hashes = _merged(what, before.hashes, entry.hashes, force)
            entry = replace(before if hashes == dict(before.hashes) else entry, hashes=hashes)
        others = [one for one in self.entries if one is not before]
        order = sorted([*others, entry], key=lambda e: (e.bits_version, e.compute_capability))
        return replace(golden, entries=tuple(order))


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


def read(path: Path = PATH) -> Golden:
    """Reads a file of golden hashes; one that does not exist holds none.

    Raises:
        GoldenError: the file is no such file.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] != _SCHEMA:
            raise GoldenError(f"{path}: expected schema {_SCHEMA}, got {record['schema']!r}")
        entries = tuple(Entry(**entry) for entry in record["results"])
        return Golden(dict(record["inputs"]), entries)
    except FileNotFoundError:
        return Golden()
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, GoldenError):
            raise
        raise GoldenError(f"{path}: no file of golden hashes ({error})") from error


def write(golden: Golden, path: Path = PATH) -> None:
    """Writes a file of golden hashes, whole or not at all.

    Raises:
        ReportError: the file cannot be written.
    """
    record = {
        "schema": _SCHEMA,
        "inputs": dict(sorted(golden.inputs.items())),
        "results": [
            {**vars(entry), "hashes": dict(sorted(entry.hashes.items()))}
            for entry in golden.entries
        ],
    }
    write_files(path.parent, {path.name: json.dumps(record, indent=1) + "\n"})
