"""The report: claims, tests, numbers, verdicts, figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ...pictures import Panels, draw_all
from ...shared.document import Document, Section, html, markdown
from ..forward.plan import forward_points
from ..numbers.intervals import Interval, median_interval
from ..study.files import SCHEMA, read_result, write_result, write_text
from ..training.training_study import SUMMARY_HEADER, by_seed, summary
from .claims import CLAIMS, judge_all
from .forward_plots import forward_plots
from .judging import MARKS, Claim, Outcome, evidence_of, is_quick, study_of
from .names import title
from .study_plots import MEASURES, gradient_plots, kernel_plots, training_plots

TITLE = "Is flash attention stable? A reproduction"
CAPTIONS = {
    "fig3": "Fig. 3. Largest difference between flash and baseline attention by number format. "
    "Median of the draws, band from the least to the largest. FP8 E4M3 is missing where l "
    "overflows.",
    "fig4": "Fig. 4. Largest deviation from FP64. Bars from the least to the largest draw. The "
    "FP64 baseline is the reference itself.",
    "fig5a": "Fig. 5a. Largest difference against sequence length, BF16.",
    "fig5b": "Fig. 5b. Mean and standard deviation of the difference from baseline, BF16.",
    "fig5-ratio": "Flash's largest deviation over baseline's, BF16. Dotted: ten times.",
    "fig6a": "Fig. 6a. Blocks with M/4d keys, and with both dimensions swapped, over M/4d.",
    "fig6b": "Fig. 6b. Square blocks, and blocks of equal area with four times as many keys as "
    "rows, over the area.",
    "fig6c": "Fig. 6c. Keys per block.",
    "ablation": "Which step's rounding matters, preset paper.",
    "backward": "Gradients of emulated kernels by what D = rowsum(dO * O) is formed from.",
    "kernels-forward": "Real kernels: largest deviation from FP64.",
    "kernels-backward": "Real kernels: deviation of the gradients from FP64.",
    "fig7": "Fig. 7. Distance of weights from the base run over training. Median of the seeds, "
    "band from the least to the largest.",
    "fig8": "Fig. 8. The same of trainings in FP16: from FP32, and of flash from explicit "
    "attention.",
    "loss": "Held-out loss of each attention over that of base: median, least and largest seed.",
    "gradients": "Errors of the gradient of each parameter tensor, forward and backward together.",
    "systematic": "Share of these errors that batches have in common.",
    "outputs": "Relative error of the output of each call of attention on the same tensors.",
}

_FIGURES: dict[str, Callable[[dict[str, Any]], Mapping[str, Panels]]] = {
    "forward": lambda value: forward_plots(forward_points(value)),
    "kernels": kernel_plots,
    "training": training_plots,
    "gradients": gradient_plots,
}


def read_study(folder: Path) -> tuple[dict[str, Any], list[Path]]:
    """Reads a folder's result and draws its plots into its folder `plots`.

    Raises:
        ArgumentError: the folder holds no finished study.
    """
    for kind, figures in _FIGURES.items():
        if (folder / f"{kind}.json").exists():
            value = read_result(folder, kind)
            return value, draw_all(figures(value), folder / "plots")
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
    plots: dict[str, Path] = {}
    for folder in folders:
        value, drawn = read_study(folder)
        kind = study_of(value)
        if kind in values:
            raise ArgumentError(f"results: expected one study of a kind, got two of {kind}")
        values[kind] = value
        plots |= {path.stem: path for path in drawn}
    small = {kind: value for kind, value in values.items() if is_quick(value["configuration"])}
    evidence = evidence_of(values)
    # Claims of studies that are not there are counted only.
    judged = [one for one in judge_all(evidence, evidence_of(small)) if one[0].study in evidence]
    sections = list(_sections(judged, values, plots))
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
    page, text = out / "report.html", out / "report.md"
    document = Document(TITLE, intro, sections)
    write_text(page, html(document))
    write_text(text, markdown(document, out))
    write_result(out, _record(judged, values))
    return [page, text, out / "deviation.json"]


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
        # Each figure is shown once, with the first claim that it is about.
        figures = [(_caption(name), plots.pop(name)) for name in claim.figures if name in plots]
        text = f"Test: {claim.how}"
        if outcome.condition:
            text = f"{outcome.condition[0].upper()}{outcome.condition[1:]}. {text}"
        yield Section(claim.text, text, outcome.numbers, figures, key=claim.key,
                      source=claim.source, verdict=outcome.verdict,
                      mark=MARKS.get(outcome.verdict, "some"))  # fmt: skip
    if plots:
        yield Section(
            "More figures", figures=[(_caption(name), path) for name, path in plots.items()]
        )
    for value in values.values():
        yield from _tables(value)


def _caption(name: str) -> str:
    for prefix, words in (("language-", " Language model."), ("model-", " Of the given model.")):
        if name.startswith(prefix):
            return CAPTIONS[name.removeprefix(prefix)] + words
    return CAPTIONS[name]


def _setup(value: dict[str, Any]) -> str:
    where, setup, kind = value["hardware"], value["configuration"], value["kind"]
    machine = where["gpu"] or f"{where['system']}, {where['cpus']} cores"
    seconds = value["seconds"]
    total = sum(seconds.values()) if isinstance(seconds, dict) else seconds
    text = f"{machine}; torch {value['versions']['torch']}; {value['date']}; {total:.0f} s"
    if kind == "training":
        text += f"; {setup['workload']}, {setup['steps']} steps, {len(by_seed(value, 'base'))} "
        text += f"paired seeds, base: {title(setup['base'])}"
    if kind == "gradients":
        text += f"; {setup['model']}, {value['parameters'] / 1e6:.3g} million parameters, "
        text += f"{setup['precision']}, {value['done']} batches"
    if kind == "forward":
        text += f"; {setup['seeds']} draws a point, d = {setup['head_dim']}, M = {setup['sram']}"
    return text


def _tables(value: dict[str, Any]) -> Iterator[Section]:
    """Tables that no claim has: errors of the gradients, every run."""
    kind = value["kind"]
    if kind == "training":
        yield Section("Every run of the training study", header=SUMMARY_HEADER, rows=summary(value))
    if kind == "gradients":
        yield _whole_table(value)
    if kind == "kernels" and value["backward"]:
        yield _gradients_table(value["backward"])


def _whole_table(value: dict[str, Any]) -> Section:
    """Returns the errors of the gradients of a whole model, by attention."""
    rows = [
        [title(name), *(str(Interval.read(whole[measure])) for measure in MEASURES)]
        for name, whole in value["whole"].items()
    ]
    rows += [
        [title(name), f"not run: {reason}", "", ""] for name, reason in value["missing"].items()
    ]
    name = f"Gradients of {value['configuration']['model']} against exact attention"
    text = (
        "Each attention against exact (FP64) attention in the same model, with 95 % bootstrap "
        "intervals over batches. Shares that batches have in common add up over steps."
    )
    return Section(name, text, header=["attention", *MEASURES], rows=rows)


def _gradients_table(points: list[dict[str, Any]]) -> Section:
    """Relative errors of every attention on every distribution, at the largest length."""
    seqlen = max(point["seqlen"] for point in points)
    rows: dict[tuple[str, ...], list[str]] = {}
    for p in points:
        if p["seqlen"] == seqlen:
            key = (title(p["inputs"]), p["format"].upper(), str(p["head_dim"]),
                   title(p["backend"]))  # fmt: skip
            rows.setdefault(key, list(key)).append(_median(p["result"]["relative"], ".2e"))
    header = ["inputs", "format", "d", "attention", "dq", "dk", "dv"]
    name = f"Deviation of gradients, length {seqlen}: ‖d‖ / ‖gradient‖"
    return Section(name, header=header, rows=list(rows.values()))


def _median(values: Sequence[float | None], digits: str) -> str:
    found = median_interval(values).middle
    return "overflow" if math.isnan(found) else f"{found:{digits}}"
