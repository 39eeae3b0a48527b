"""The report: claims, tests, numbers, verdicts, figures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ...pictures import Held, held
from ...shared.document import Document, Section, html, markdown
from ...shared.files import write_files
from ..numbers.intervals import Interval, finite, short
from ..study.files import SCHEMA, read_result, write_result
from ..training.training_study import SUMMARY_HEADER, by_seed, summary
from .claims import CLAIMS
from .judging import MARKS, Claim, Outcome, evidence_of, is_quick, study_of, title

TITLE = "Is flash attention stable? A reproduction"
UNITS = {"": "number", "x": "times"}  # of cases, in figures
_CASES = "The number of each case with its interval, and the range that the claim names, shaded."
MEASURES = {
    "error": "‖error‖ / ‖gradient‖",
    "noise": "‖error‖ / spread between batches",
    "systematic": "share of error² common to batches",
}

_KINDS = ("forward", "kernels", "training", "gradients")


def read_study(folder: Path) -> dict[str, Any]:
    """Reads a folder's result.

    Raises:
        ArgumentError: the folder holds no finished study.
    """
    for kind in _KINDS:
        if (folder / f"{kind}.json").exists():
            return read_result(folder, kind)
    raise ArgumentError(f"results: expected folders of finished studies, got {folder}")


def write_report(folders: list[Path], out: Path) -> list[Path]:
    """Writes report.html, which needs no other file, report.md, and deviation.json.

    report.md links the plots. deviation.json holds claims, numbers and verdicts, and where the
    studies come from: docs/deviation.md takes its tables from it.

    Raises:
        ArgumentError: no folders, one without a result, or two of a kind.
    """
    if not folders:
        raise ArgumentError("results: expected folders of finished studies, got none")
    values: dict[str, dict[str, Any]] = {}
    for folder in folders:
        value = read_study(folder)
        kind = study_of(value)
        if kind in values:
            raise ArgumentError(f"results: expected one study of a kind, got two of {kind}")
        values[kind] = value
    small = {kind: value for kind, value in values.items() if is_quick(value["configuration"])}
    evidence = evidence_of(values)
    # Claims of studies that are not there are counted only.
    tested = [claim for claim in CLAIMS if claim.study in evidence]
    quick = evidence_of(small)
    judged = [(claim, claim.judge(evidence, quick)) for claim in tested]
    sections = list(_sections(judged, values, _plots(judged, out / "plots")))
    counts = Counter(outcome.verdict for _, outcome in judged)
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    notice = ""
    if small:
        notice = (
            f"Quick studies ({', '.join(small)}): too few draws, lengths or steps for verdicts. "
            "This page shows what a report looks like, not what is true. "
        )
    intro = notice + (
        "The claims of Golden et al., “Is Flash Attention Stable?” (arXiv 2405.02803), of newer "
        "work, and of this project. Numbers and verdicts are worked out from the studies named "
        f"below: {found}. Brackets: 95 % intervals over draws, seeds or batches. "
        "What the words mean: docs/deviation.md."
    )
    document = Document(TITLE, intro, sections)
    write_files(out, {"report.html": html(document), "report.md": markdown(document, out)})
    write_result(out, _record(judged, values))
    return [out / name for name in ("report.html", "report.md", "deviation.json")]


def _record(
    judged: list[tuple[Claim, Outcome]], values: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """What was found, with the provenance of the first study on a GPU, or of the first."""
    first = max(values.values(), key=lambda value: value["hardware"]["gpu"] is not None)
    fields = ("date", "command", "hardware", "versions", "wheel", "sources", "bits_version")
    sources = [value["sources"] for value in values.values() if value["hardware"]["gpu"]]
    record = {name: first.get(name) for name in fields}
    if any(one != first["sources"] for one in sources):
        record["sources"] = None  # of several kernels: no file is of them all
    return {
        "kind": "deviation", "schema": SCHEMA, **record,
        "quick": [kind for kind, value in values.items() if is_quick(value["configuration"])],
        "studies": {kind: _setup(value) for kind, value in values.items()},
        "claims": [
            {"key": claim.key, "source": claim.source, "text": claim.text,
             "verdict": outcome.verdict, "condition": outcome.condition,
             "numbers": outcome.numbers}
            for claim, outcome in judged
        ],
    }  # fmt: skip


def _sections(
    judged: list[tuple[Claim, Outcome]], values: dict[str, dict[str, Any]], plots: dict[str, Path]
) -> Iterator[Section]:
    items = [f"{kind}: {_setup(value)}" for kind, value in values.items()]
    if left := len(CLAIMS) - len(judged):
        items.append(f"not here: the studies that test {left} other claims")
    yield Section("Studies", items=items)
    for claim, outcome in judged:
        figures = [(_CASES, plots[claim.key])] if claim.key in plots else []
        text = f"Test: {claim.how}"
        if outcome.condition:
            text = f"{outcome.condition[0].upper()}{outcome.condition[1:]}. {text}"
        yield Section(claim.text, text, outcome.numbers, figures, key=claim.key,
                      source=claim.source, verdict=outcome.verdict,
                      mark=MARKS.get(outcome.verdict, "none"))  # fmt: skip
    for value in values.values():
        if value["kind"] == "training":
            name = "Every run of the training study"
            yield Section(name, header=SUMMARY_HEADER, rows=summary(value))
        if value["kind"] == "gradients":
            yield from _gradient_tables(value)


def _plots(judged: list[tuple[Claim, Outcome]], folder: Path) -> dict[str, Path]:
    """Draws the cases of each claim, and returns the files by its key."""
    found = {}
    for claim, outcome in judged:
        if all(case.value.low == case.value.high for case in outcome.cases):
            continue  # counts have no intervals
        shown: dict[str, list[Held]] = {}
        for case in outcome.cases:
            value = case.value
            interval, wanted = (value.low, value.middle, value.high), (case.low, case.high)
            row = (case.name, interval, wanted, case.holds)
            shown.setdefault(UNITS.get(case.unit, case.unit.strip()), []).append(row)
        found[claim.key] = folder / f"{claim.key}.svg"
        write_files(folder, {found[claim.key].name: held(shown)})
    return found


def _setup(value: dict[str, Any]) -> str:
    where, setup, kind = value["hardware"], value["configuration"], value["kind"]
    machine = where["gpu"] or f"{where['system']}, {where['cpus']} cores"
    seconds = f"{value['seconds']:.0f} s"
    text = f"{machine}; torch {value['versions']['torch']}; {value['date']}; {seconds}"
    if kind == "training":
        text += f"; {setup['workload']}, {setup['steps']} steps, {len(by_seed(value, 'base'))} "
        text += f"paired seeds, base: {title(setup['base'])}"
    if kind == "gradients":
        text += f"; {setup['model']}, {value['parameters'] / 1e6:.3g} million parameters, "
        text += f"{setup['precision']}, {value['done']} batches"
    if kind == "forward":
        text += f"; {setup['seeds']} draws a point"
    return text


def _gradient_tables(value: dict[str, Any]) -> Iterator[Section]:
    """Errors of the gradients of a whole model and of its tensors, and of the outputs."""
    model, names = value["configuration"]["model"], list(value["whole"])
    rows = [[title(name), *_shown(value["whole"][name])] for name in names]
    rows += [
        [title(name), f"not run: {reason}", "", ""] for name, reason in value["missing"].items()
    ]
    text = (
        "Each attention against exact (FP64) attention in the same model, with 95 % bootstrap "
        "intervals over batches. Shares that batches have in common add up over steps."
    )
    header = ["attention", *MEASURES.values()]
    yield Section(f"Gradients of {model} against exact attention", text, header=header, rows=rows)
    kinds: dict[str, list[dict[str, Any]]] = {}  # tensors whose names differ in a number alone
    for tensor, found in value["layers"].items():
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", tensor), []).append(found)
    rows = [
        [kind, title(name), *(_least_and_largest(found, name, measure) for measure in MEASURES)]
        for kind, found in kinds.items()
        for name in names
    ]
    name = "The same of its tensors, the least and the largest of a kind"
    yield Section(name, header=["tensors", *header], rows=rows)
    rows = [
        [call, *(str(Interval.read(found[name])) if name in found else "-" for name in names)]
        for call, found in value["forward"].items()
    ]
    header = ["call", *map(title, names)]
    name = "Outputs of each call of attention on the same tensors: ‖output - exact‖ / ‖exact‖"
    yield Section(name, header=header, rows=rows)


def _least_and_largest(found: list[dict[str, Any]], name: str, measure: str) -> str:
    middles = finite(tensor[name][measure][1] for tensor in found)
    ends = dict.fromkeys((short(min(middles)), short(max(middles)))) if middles else ("-",)
    return " to ".join(ends)


def _shown(found: dict[str, list[float]]) -> list[str]:
    return [str(Interval.read(found[measure])) for measure in MEASURES]
