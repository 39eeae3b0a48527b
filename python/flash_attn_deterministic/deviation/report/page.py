"""One page that shows everything: claims, tests, numbers, verdicts, figures."""

from __future__ import annotations

import base64
import html
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ..forward import plan as forward
from ..forward.plan import Points, forward_points
from ..instrument import gradients
from ..kernels import kernel_study as kernels
from ..numbers.intervals import Interval, median
from ..numbers.metrics import METRICS
from ..study.files import read_json, write_text
from ..training import training_study as training
from .claims import judge_all
from .failure_claims import MODEL
from .forward_plots import forward_plots
from .gradient_plots import MEASURES, gradient_plots
from .judging import NOT_REPRODUCED, NOT_TESTED, REPRODUCED, UNDECIDED, Claim, Evidence, Outcome
from .kernel_plots import kernel_plots
from .names import attention_name, title
from .plots import Draw, draw_all
from .training_plots import training_plots

TITLE = "Is flash attention stable? A reproduction"
_MANY = 8
CAPTIONS = {
    "fig3": "Fig. 3. Largest difference between flash and baseline attention by number format. "
    "Median of the draws, band from the least to the largest. FP8 E4M3 is missing where l "
    "overflows.",
    "fig4": "Fig. 4. Largest deviation from FP64, hollow: baseline, filled: flash. Bars from the "
    "least to the largest draw. The FP64 baseline is the reference itself.",
    "fig5a": "Fig. 5a. Largest difference against sequence length, BF16.",
    "fig5b": "Fig. 5b. Mean and standard deviation of the difference from baseline, BF16.",
    "fig5-ratio": "Flash's largest deviation over baseline's, BF16. Dotted: ten times.",
    "fig6a": "Fig. 6a. Block sizes from a memory of M elements; these exchanged; and the loops "
    "exchanged, so that a row's O, l and m stay on chip in FP32.",
    "fig6b": "Fig. 6b. Tiles of equal area: square, wide (half the rows, twice the keys), tall.",
    "fig6c": "Fig. 6c. Keys per block.",
    "ablation": "Which step's rounding matters, preset paper.",
    "stochastic": "Nearest against stochastic rounding, preset paper: larger errors, less bias.",
    "bias": "Biased rounding of P V (BF16): mean error away from 0 by the number of keys at the "
    "maximum.",
    "backward": "Gradients of emulated kernels by what D = rowsum(dO * O) is formed from.",
    "kernels-forward": "Real kernels: largest deviation from FP64.",
    "kernels-backward": "Real kernels: deviation of the gradients from FP64.",
    "kernels-run-to-run": "Real kernels: how far repeats of one backward are from the first.",
    "fig7": "Fig. 7. Distance of weights from the base run over training, less that at "
    "step 0. Median of the seeds, band from the least to the largest.",
    "fig8": "Fig. 8. Wasserstein distance of weights, and distance as functions, less that at "
    "step 0.",
    "noise": "Distance from base (8 bits) by the bits of explicit attention.",
    "training-loss": "Loss of held-out batches at the end, paired by seed.",
    "gradients": "Errors of W_q's gradient against exact attention, on rows with equal maxima.",
    "outputs": "Relative error of the output of each call of attention.",
    "live": "Both attentions inside the trained model, on every call (dual compute).",
}


@dataclass(frozen=True)
class Study:
    """A folder's result, and its plots."""

    kind: str
    value: dict[str, Any]
    plots: list[Path]


def read_study(folder: Path) -> Study:
    """Reads a folder's result and draws its plots into its folder `plots`.

    Raises:
        ArgumentError: the folder holds no finished study.
    """
    readers: dict[str, Any] = {
        forward.RESULT_FILE: (read_json, lambda value: forward_plots(forward_points(value))),
        kernels.RESULT_FILE: (kernels.read_kernels, kernel_plots),
        training.RESULT_FILE: (training.read_training, training_plots),
        gradients.RESULT_FILE: (gradients.read_gradients, gradient_plots),
    }
    for name, (read, draw) in readers.items():
        if (folder / name).exists():
            value = read(folder / name)
            drawers: dict[str, Draw] = draw(value)
            return Study(value["kind"], value, draw_all(drawers, folder / "plots"))
    raise ArgumentError(
        f"results: expected folders of finished studies, got {folder} without {', '.join(readers)}"
    )


def write_report(folders: list[Path], out: Path) -> list[Path]:
    """Writes report.html, which needs no other file, and report.md, which links the plots.

    Args:
        folders: of finished studies, one of a kind.
        out: folder of the report.

    Returns:
        The two files.

    Raises:
        ArgumentError: no folders, one without a result, or two of a kind.
    """
    if not folders:
        raise ArgumentError("results: expected folders of finished studies, got none")
    studies: dict[str, Study] = {}
    for folder in folders:
        found = read_study(folder)
        if found.kind in studies:
            raise ArgumentError(f"results: expected one study of a kind, got two of {found.kind}")
        studies[found.kind] = found
    values = {kind: found.value for kind, found in studies.items()}
    evidence = Evidence(
        forward_points(values["forward"]) if "forward" in values else None,
        values.get("kernels"),
        values.get("training"),
        _sinks(values.get("gradients")),
    )
    judged = judge_all(evidence)
    page, text = out / "report.html", out / "report.md"
    write_text(page, _html(judged, list(studies.values())))
    write_text(text, _markdown(judged, list(studies.values()), out))
    return [page, text]


def _sinks(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """Gradients of another model say nothing of the failure's mechanism."""
    made = value is not None and value["configuration"]["model"].startswith(MODEL)
    return value if made else None


def _setups(studies: list[Study]) -> list[tuple[str, str]]:
    rows = []
    for found in studies:
        where = found.value["environment"]
        machine = where.get("gpu") or f"{where['machine']}, {where['cores']} cores"
        seconds = found.value["seconds"]
        total = sum(seconds.values()) if isinstance(seconds, dict) else seconds
        text = f"{machine}; torch {where['torch']}; {where['date']}; {total:.0f} s"
        if found.kind == "training":
            setup = found.value["configuration"]
            count = len(found.value["seeds"])
            text += f"; {setup['workload']}, {setup['steps']} steps, {count} paired seeds, "
            text += f"base: {attention_name(setup['base'])}"
        if found.kind == "gradients":
            setup = found.value["configuration"]
            text += f"; {setup['model']}, {setup['precision']}, {found.value['done']} batches"
        if found.kind == "forward":
            plan = found.value["configuration"]
            text += f"; {plan['seeds']} draws a point, d = {plan['head_dim']}, M = {plan['sram']}"
        rows.append((found.kind, text))
    return rows


_Table = tuple[str, list[str], list[list[str]]]


def _tables(studies: list[Study]) -> list[_Table]:
    """Tables that no claim has: every metric, errors of the gradients, times, every run."""
    tables: list[_Table] = []
    for found in studies:
        if found.kind == "forward" and "5" in found.value["figures"]:
            tables.append(_metrics_table(forward_points(found.value)["5"]))
        if found.kind == "training":
            rows = training.summary(found.value)
            tables.append(("Every run of the training study", training.SUMMARY_HEADER, rows))
        if found.kind == "gradients":
            rows = [
                [attention_name(name), *(str(Interval(*whole[m])) for m in MEASURES)]
                for name, whole in found.value["whole"].items()
            ]
            model = found.value["configuration"]["model"]
            header = ["attention", *MEASURES]
            tables.append((f"Gradients of {model} against exact attention", header, rows))
        if found.kind != "kernels":
            continue
        if found.value["backward"]:
            tables.append(_gradients_table(found.value["backward"]))
        rows = [
            [p["model"], attention_name(p["backend"]), f"{p['milliseconds']:.1f}",
             f"{p['speedup']:+.0%}" if "speedup" in p else ""]
            for p in found.value["speed"]
        ]  # fmt: skip
        if rows:
            tables.append(
                ("Time of a training step", ["model", "attention", "ms", "speed-up"], rows)
            )
    return tables


def _gradients_table(points: list[dict[str, Any]]) -> _Table:
    """Relative errors of every attention on every distribution, at the largest length."""
    seqlen = max(point["seqlen"] for point in points)
    rows: dict[tuple[str, ...], list[str]] = {}
    for p in points:
        if p["seqlen"] == seqlen:
            key = (title(p["inputs"]), p["format"].upper(), str(p["head_dim"]),
                   attention_name(p["backend"]))  # fmt: skip
            value = median(p["result"]["relative"])
            rows.setdefault(key, list(key)).append("overflow" if value is None else f"{value:.2e}")
    header = ["inputs", "format", "d", "attention", "dq", "dk", "dv"]
    return f"Deviation of gradients, length {seqlen}: ‖d‖ / ‖gradient‖", header, list(rows.values())


def _metrics_table(points: Points) -> _Table:
    """Every metric at one length, in BF16."""
    lengths = sorted({cell.seqlen for cell, _ in points})
    seqlen = lengths[max(0, len(lengths) - 3)]
    rows = []
    for cell, result in points:
        if cell.seqlen != seqlen:
            continue
        pairs = [(f"flash, {cell.preset}", result["flash"])]
        if cell.preset == points[0][0].preset:
            pairs.append(("baseline", result["baseline"]))
        for label, metrics in pairs:
            shown = [median(metrics[name]) for name in METRICS]
            numbers = ["overflow" if x is None else f"{x:.2g}" for x in shown]
            rows.append([title(cell.inputs), label, *numbers])
    header = ["inputs", "attention", *(name.replace("_", " ") for name in METRICS)]
    return f"Every metric, BF16, length {seqlen}, median of the draws", header, sorted(rows)


# --- Markdown ----------------------------------------------------------------------------------


def _markdown(judged: list[tuple[Claim, Outcome]], studies: list[Study], out: Path) -> str:
    lines = [f"# {TITLE}", "", "| claim | source | verdict |", "| --- | --- | --- |"]
    for claim, outcome in judged:
        lines.append(f"| {claim.text} | {claim.source} | **{outcome.verdict}** |")
    lines += [
        "",
        "What the words mean: `docs/deviation.md`. Brackets: 95 % bootstrap intervals.",
        "",
        "## Studies",
        "",
    ]
    lines += [f"- {kind}: {text}" for kind, text in _setups(studies)]
    plots = {path.stem: path for found in studies for path in found.plots}
    for claim, outcome in judged:
        lines += ["", f"## {claim.text}", "", f"{claim.source}. **{outcome.verdict}**"]
        lines[-1] += f": {outcome.condition}." if outcome.condition else "."
        lines += ["", f"Test: {claim.how}", ""]
        lines += _folded(outcome.numbers)
        for name in claim.figures:
            if name in plots:
                lines += ["", f"![{CAPTIONS[name]}]({_relative(plots[name], out)})"]
    for name, header, rows in _tables(studies):
        lines += ["", f"## {name}", "", _row(header), _row(["---"] * len(header))]
        lines += [_row(row) for row in rows]
    return "\n".join(lines) + "\n"


def _folded(numbers: list[str]) -> list[str]:
    """A list, which a reader has to open where it is long."""
    items = [f"- {number}" for number in numbers]
    if len(items) <= _MANY:
        return items
    return [f"<details><summary>{len(items)} numbers</summary>", "", *items, "", "</details>"]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _relative(path: Path, out: Path) -> str:
    return Path(os.path.relpath(path, out)).as_posix()


# --- HTML --------------------------------------------------------------------------------------

_STYLE = """
:root{color-scheme:light}
body{font:16px/1.5 system-ui,sans-serif;color:#1b1b1b;background:#fff;margin:0 auto;
max-width:60rem;padding:1rem 1.25rem 4rem}
h1{font-size:1.7rem;line-height:1.2}h2{font-size:1.2rem;margin:2.6rem 0 .3rem;line-height:1.3}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{text-align:left;vertical-align:top;padding:.4rem .6rem;border-bottom:1px solid #ddd}
.scroll{overflow-x:auto}
.verdict{display:inline-block;padding:.05rem .5rem;border-radius:.3rem;font-size:.85rem;
font-weight:600}
.yes{background:#d8f0e3;color:#0b4f2c}.some{background:#fdeccb;color:#5f3c00}
.no{background:#f9d9d3;color:#6d1606}.none{background:#e7e7e7;color:#333}
.source,.how{color:#555;font-size:.92rem}
figure{margin:1.2rem 0}figure img{max-width:100%;height:auto}
figcaption{color:#555;font-size:.88rem}
details{margin:.6rem 0}li{overflow-wrap:anywhere}
a{color:#00538a}
@media(max-width:40rem){body{font-size:15px;padding:.8rem}th,td{padding:.35rem .3rem}
thead{display:none}.claims tr{display:block;padding:.5rem 0;border-bottom:1px solid #ddd}
.claims td{display:block;border:0;padding:.1rem 0}figure{overflow-x:auto}
figure img{min-width:34rem}}
"""
_CLASSES = {REPRODUCED: "yes", NOT_REPRODUCED: "no", UNDECIDED: "none", NOT_TESTED: "none"}


def _html(judged: list[tuple[Claim, Outcome]], studies: list[Study]) -> str:
    plots = {path.stem: path for found in studies for path in found.plots}
    shown: set[str] = set()
    body = [_intro(judged), _claims_table(judged)]
    body.append("<h2>Studies</h2><ul>")
    body += [f"<li>{kind}: {html.escape(text)}</li>" for kind, text in _setups(studies)]
    body.append("</ul>")
    for claim, outcome in judged:
        body.append(_section(claim, outcome))
        for name in claim.figures:
            if name in plots and name not in shown:
                shown.add(name)
                body.append(_figure(name, plots[name]))
    rest = [name for name in plots if name not in shown]
    if rest:
        body.append("<h2>More figures</h2>")
        body += [_figure(name, plots[name]) for name in rest]
    for name, header, rows in _tables(studies):
        body.append(f"<h2>{html.escape(name)}</h2>{table_of(header, rows)}")
    return page_of(TITLE, body)


def page_of(name: str, body: list[str]) -> str:
    """Returns a page with a title, which needs no other file."""
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{html.escape(name)}</title><style>{_STYLE}</style></head>\n<body>\n"
        f"<h1>{html.escape(name)}</h1>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _intro(judged: list[tuple[Claim, Outcome]]) -> str:
    counts: dict[str, int] = {}
    for _, outcome in judged:
        counts[outcome.verdict] = counts.get(outcome.verdict, 0) + 1
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return (
        "<p>The claims of Golden et al., “Is Flash Attention Stable?” (arXiv 2405.02803), of newer "
        "work, and of this project, each tested by the studies named below. Numbers and verdicts "
        f"are worked out from their results: {html.escape(text)}. Numbers in brackets are 95 % "
        "bootstrap intervals over draws or seeds.</p>"
    )


def _badge(verdict: str) -> str:
    return f"<span class='verdict {_CLASSES.get(verdict, 'some')}'>{html.escape(verdict)}</span>"


def _brief(outcome: Outcome) -> str:
    """A condition that fits into the table."""
    text = outcome.condition
    return f"<br><span class='source'>{html.escape(text)}</span>" if 0 < len(text) <= 110 else ""


def _claims_table(judged: list[tuple[Claim, Outcome]]) -> str:
    rows = "".join(
        f"<tr><td><a href='#{claim.key}'>{html.escape(claim.text)}</a></td>"
        f"<td class='source'>{html.escape(claim.source)}</td>"
        f"<td>{_badge(outcome.verdict)}{_brief(outcome)}</td></tr>"
        for claim, outcome in judged
    )
    head = "<thead><tr><th>claim</th><th>source</th><th>verdict</th></tr></thead>"
    return f"<table class='claims'>{head}<tbody>{rows}</tbody></table>"


def _section(claim: Claim, outcome: Outcome) -> str:
    condition = f" {html.escape(outcome.condition)}." if outcome.condition else ""
    items = "".join(f"<li>{html.escape(number)}</li>" for number in outcome.numbers)
    numbers = ""
    if items:
        many = len(outcome.numbers) > _MANY
        numbers = f"<ul>{items}</ul>"
        if many:
            label = f"{len(outcome.numbers)} numbers"
            numbers = f"<details><summary>{label}</summary>{numbers}</details>"
    return (
        f"<h2 id='{claim.key}'>{html.escape(claim.text)}</h2>"
        f"<p>{_badge(outcome.verdict)}{condition}</p>"
        f"<p class='how'>{html.escape(claim.source)}. Test: {html.escape(claim.how)}</p>{numbers}"
    )


def _figure(name: str, path: Path) -> str:
    return embedded(CAPTIONS.get(name, name), path)


def embedded(caption: str, path: Path) -> str:
    """Returns a figure with the SVG inside."""
    data = base64.b64encode(path.read_bytes()).decode()
    caption = html.escape(caption)
    return (
        f"<figure><img alt='{caption}' src='data:image/svg+xml;base64,{data}'>"
        f"<figcaption>{caption}</figcaption></figure>"
    )


def table_of(header: list[str], rows: list[list[str]]) -> str:
    """Returns an HTML table that scrolls by itself where it is wide."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='scroll'>{table}</div>"
