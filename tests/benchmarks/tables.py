"""Fills the tables of README.md and docs/ from docs/results/: `python -m tests.benchmarks.tables`.

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`. With --check nothing is written;
the exit status says whether every table is up to date. --pictures draws the pictures again, too.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOT_MEASURED = "Not measured yet."
KERNEL_HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # others run on the next of these
Results = Mapping[str, Any]  # name of a file in docs/results/, without .json, to its content

_REGION = re.compile(
    r"^<!-- table:(?P<name>[\w-]+) -->\n(?P<body>.*?)^<!-- /table -->$", re.DOTALL | re.MULTILINE
)
_MARKS = re.compile(r"^<!-- /?table\b.*-->$", re.MULTILINE)


class TableError(ValueError):
    """A table can't be made: an unknown name, a region without an end, results of another form."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 1 if --check finds a stale table, 6 after an error."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, report stale tables")
    parser.add_argument("--pictures", action="store_true", help="draw docs/results/*.svg, too")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/")
    options = parser.parse_args(arguments)
    try:
        stale = update(options.root, write=not options.check)
        if options.pictures:
            draw(options.root / "docs" / "results")
    except TableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 6
    for path in stale:
        print(f"{path.relative_to(options.root)}: {'stale' if options.check else 'updated'}")
    if stale and options.check:
        print("Run `python -m tests.benchmarks.tables`, and commit.", file=sys.stderr)
        return 1
    return 0


def update(root: Path, *, write: bool) -> list[Path]:
    """Brings the tables of a source tree up to date.

    Returns:
        The files whose tables were out of date.

    Raises:
        TableError: a table can't be made; nothing is written then.
    """
    results = read_results(root / "docs" / "results")
    changed = {}
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        if path.is_file():
            before = path.read_text(encoding="utf-8")
            after = fill(before, results, str(path.relative_to(root)))
            if after != before:
                changed[path] = after
    for path, text in changed.items() if write else ():
        path.write_text(text, encoding="utf-8")
    return list(changed)


def draw(folder: Path) -> None:
    """Draws the pictures that README.md and the scoreboard show."""
    from flash_attn_deterministic_lab.scoreboard import report as scoreboard

    results = read_results(folder)
    for name, picture in (("whole-model", _draw_model), ("scoreboard", scoreboard.picture)):
        if name in results:
            (folder / f"{name}.svg").write_text(picture(results[name]), encoding="utf-8")


def _model_cells(record: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Titles of the models compared, and what each does in every way to compute it."""
    names = {"sdpa": "torch's attention", "flash_attn_deterministic": "ours"}
    columns = [
        f"{names[row['attention']]}, other layers {row['other layers']}" for row in record["rows"]
    ]
    ways = [way for way in record["rows"][0] if way not in ("attention", "other layers")]
    return columns, [(way, [str(row[way]) for row in record["rows"]]) for way in ways]


def _model(results: Results) -> str:
    record = results["whole-model"]
    columns, rows = _model_cells(record)
    words = (
        f"Logits of one sequence, beside those it has alone; {record['batch']} sequences of "
        f"{record['seqlen']} tokens; the first column's decode step is not explained."
    )
    return table(record, ["", *columns], [[way, *cells] for way, cells in rows], words)


def _ranks(results: Results) -> str:
    """Forward and backward over several GPUs, beside one and torch's context parallel."""
    record = results["ranks"]
    peers = any("context_parallel" in case["seconds"] for case in record["cases"])
    rows = []
    for case in record["cases"]:
        shape, seconds = case["shape"], case["seconds"]
        name = f"B{shape['batch']} L{shape['seqlen']} H{shape['nheads']}/{shape['nheads_k']}"
        name += f" D{shape['head_dim']}"
        name += f" window {shape['window']}" if shape["window"] >= 0 else ""
        ms = {one: f"{1e3 * seconds[one]['both']:.1f}" for one in seconds}
        own = f"{ms['planned']} ({case['efficiency']['both']:.2f})"
        host = f"{1e3 * seconds['planned']['host']:.1f}"
        peer = [ms.get("context_parallel", "-")] * peers
        rows.append([name, ms["one"], own, *peer, host])
    header = ["", "one GPU, ms", f"{record['ranks']} GPUs, ms (efficiency)",
              *["torch's context_parallel, ms"] * peers, "host, ms"]  # fmt: skip
    words = (
        "bf16, causal, zigzag, forward + backward, all bits those of one GPU. Efficiency: time of "
        "one GPU over that of all of them together. Host: of a forward."
    )
    return table(record, header, rows, words)


def _vllm(results: Results) -> str:
    """Times of a whole model in vLLM, beside its own attention."""
    record = results["vllm"]
    rows = []
    for case in record["cases"]:
        both = [case.get(title) or {} for title in ("ours", "FLASH_ATTN")]
        cells = []
        for part in ("decode", "prefill"):
            ours, theirs = (found.get(part) for found in both)
            cells += ["-" if ms is None else f"{ms:.2f}" for ms in (ours, theirs)]
            cells.append(_ratio(ours / theirs if ours and theirs else None))
        name = f"D{case['head_dim']}, {case['requests']} x {case['tokens']:,}"
        rows.append([name, *cells])
    header = ["", *(f"{part}: {title}" for part in ("decode step", "prefill")
                    for title in ("ours", "FLASH_ATTN", "ratio"))]  # fmt: skip
    checks = {
        norm: "; ".join(f"{one['check']} {one['equal']}/{one['requests']}"
                        for one in found.get("checks", ())) or record["failed"].get(norm, "not run")
        for norm, found in record["checks"].items()
    }  # fmt: skip
    outcomes = ". ".join(f"{norm}: {outcome}" for norm, outcome in checks.items())
    words = (
        f"vLLM {record['versions']['vllm']}, ms, {record['layers']} layers. Requests whose bits "
        f"were equal, of a model of 4 layers: {outcomes}."
    )
    return table(record, header, rows, words)


def _draw_model(record: Mapping[str, Any]) -> str:
    from flash_attn_deterministic_lab.pictures import fields

    columns, rows = _model_cells(record)
    colours = {"same": "#1a7f4b", "other": "#c0392b"}
    cells = [
        (way if way.startswith("ms") else f"logits {way}", [(c, colours.get(c, "")) for c in own])
        for way, own in rows
    ]
    gpu, versions = record["hardware"]["gpu"], record["versions"]
    note = (
        "Bits of a sequence's logits beside those it has alone; the first decode time is not "
        f"explained. {gpu}, torch {versions['torch']}"
    )
    titles = [textwrap.fill(title, 18, break_on_hyphens=False) for title in columns]
    return fields(titles, cells, f"{note}, {record['date']}")


def read_results(folder: Path) -> dict[str, Any]:
    """Reads every JSON file of a folder.

    Raises:
        TableError: one of them is not JSON.
    """
    results = {}
    for path in sorted(folder.glob("*.json")):
        try:
            results[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise TableError(f"{path}: not JSON ({error}); write it again") from error
    return results


def fill(page: str, results: Results, where: str) -> str:
    """Fills the tables of a page of Markdown; `where` is its name in messages.

    Raises:
        TableError: an unknown table, a region without an end, or results that lack a field.
    """
    regions = list(_REGION.finditer(page))
    if len(_MARKS.findall(page)) != 2 * len(regions):
        raise TableError(
            f"{where}: a table region is not closed; expected a line `<!-- table:NAME -->` and "
            "then a line `<!-- /table -->`"
        )

    def region(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise TableError(f"{where}: no table {name!r}; there are {', '.join(sorted(TABLES))}")
        needed, make = TABLES[name]
        try:
            body = make(results) if needed in results else NOT_MEASURED
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise TableError(
                f"{where}: table {name!r}: docs/results/{needed}.json is not of the expected "
                f"form ({type(error).__name__}: {error}); measure it again"
            ) from error
        return f"<!-- table:{name} -->\n{body}\n<!-- /table -->"

    return _REGION.sub(region, page)


def table(
    record: Mapping[str, Any], header: Sequence[str], rows: Iterable[Sequence[str]], words: str = ""
) -> str:
    """Lays out a table, and a line under it: GPU, torch and date, then words."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    gpu = record["hardware"]["gpu"] or "no GPU"
    source = f"{gpu}, torch {record['versions']['torch']}, {record['date']}. {words}"
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\n{source.rstrip()}"


def _pair(one: Mapping[str, float] | None) -> str:
    if one is None:
        return "-"
    if one["cases"] == 1:
        return f"{one['mean']:.2f} (one shape)"
    few = f" of {one['cases']}" if one["cases"] < 5 else ""
    return f"{one['mean']:.2f} ({one['worst']:.2f}{few})"


def _means(results: Results, *, name: str, head_dims: bool = True) -> str:
    """Our time over others', by group of a study: geometric mean (worst)."""
    record = results[name]
    summary, titles = record["summary"], record["titles"]
    if not head_dims:
        summary = {g: own for g, own in summary.items() if not re.fullmatch(r"D\d+|all", g)}
    names = dict.fromkeys(name for own in summary.values() for name in own)
    order = sorted(names, key=lambda one: (one != "best", list(names).index(one)))
    rows = [[group, *(_pair(own.get(one)) for one in order)] for group, own in summary.items()]
    words = {"best": "the best", "read": "reading alone"}
    header = ["", *(words.get(one) or titles[one] for one in order)]
    text = f"Our time over theirs, geometric mean (worst) of {len(record['cases'])} shapes."
    if record["left_out"]:
        text += f" Not measured, for want of time: {len(record['left_out'])}, named in the JSON."
    if disturbed := sum(len(case.get("disturbed", ())) for case in record["cases"]):
        text += (
            f" Left out: {disturbed} times whose median is above 1.5 of their 10th percentile, "
            "and, where it is ours, the whole shape (named in the JSON)."
        )
    return table(record, header, rows, text)


_SIDES = {
    "peers-forward": {"FA2": "sdpa-flash", "FA3": "fa3-one-split", "FA4": "fa4",
                      "cuDNN": "sdpa-cudnn"},
    "peers-backward": {"FA2": "sdpa-flash", "FA3": "fa3-deterministic", "FA4": "fa4-deterministic",
                       "cuDNN": "sdpa-cudnn"},
}  # fmt: skip


def _by_head_dim(results: Results) -> str:
    """Our time over that of each other implementation, by head dim, forward and backward."""
    columns, shapes = {}, []
    for study, sides in _SIDES.items():
        cases = results[study]["cases"] if study in results else []
        dense = sum(case["group"] != "window" for case in cases)
        shapes.append(f"{dense} {study.removeprefix('peers-')}")
        summary = results[study]["summary"] if study in results else {}
        for title, name in sides.items():
            cells = [_pair(summary.get(f"D{dim}", {}).get(name)) for dim in KERNEL_HEAD_DIMS]
            if set(cells) != {"-"}:  # it ran
                columns[f"{study.removeprefix('peers-')}: {title}"] = cells
    header = ["head dim", *columns]
    rows = list(zip(map(str, KERNEL_HEAD_DIMS), *columns.values(), strict=True))
    words = (
        f"Our time over theirs, geometric mean (worst) of the {' and '.join(shapes)} drawn shapes "
        'without windows that they can run, all bf16 ("of 3": of three shapes), but for times that '
        "other work disturbed; padded head dims "
        "count with the next one. FA2: torch's flash backend; FA3: one split. Backwards of other "
        "packages run their deterministic modes; torch's two have none. cuDNN's forward: no "
        "chunks, for which torch has no causal mask but a tensor."
    )
    return table(results["peers-forward"], header, rows, words)


def _host(results: Results) -> str:
    record = results["host"]
    rows = [
        [name, f"{one['median']:.1f}", f"{one['p10']:.1f}"] for name, one in record["us"].items()
    ]
    names = {
        "import_ms": "import, on top of torch",
        "first_call_ms": "first call of a kernel, CUDA context made",
        "second_call_ms": "second call",
    }
    rows += [
        [name, *(f"{1e3 * record['start'][key][part]:.0f}" for part in ("median", "p10"))]
        for key, name in names.items()
    ]
    return table(record, ["call", "us", "10th percentile"], rows, "Eager calls, on the host.")


_EPS = {"bf16": 2.0**-7, "fp16": 2.0**-10}


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"  # a report keeps the worst


def _accuracy(results: Results) -> str:
    """Worst errors of the verified wheel, forward and backward."""
    record = results["verification"]
    (section,) = (section for section in record["sections"] if section["id"] == "accuracy")
    largest: dict[tuple[int, str, str], float] = {}
    spread: dict[str, float] = {}  # root mean squares
    for row in section["data"]["rows"]:
        theirs = row.get("against") or row["standard"]
        if theirs is None:  # torch has no such feature
            continue
        floor = _EPS[row["dtype"]] / 64  # smaller errors are chance
        worst, rmse = (
            max(row["ours"][measure], floor) / max(theirs[measure], floor)
            for measure in ("largest", "rmse")
        )
        key, direction = (row["head_dim"], row["dtype"], row["direction"]), row["direction"]
        largest[key] = max(largest.get(key, 0.0), worst)
        spread[direction] = max(spread.get(direction, 0.0), rmse)
    columns = [(dtype, way) for dtype in _EPS for way in ("forward", "backward")]
    found = {d for d, _, _ in largest} & {*KERNEL_HEAD_DIMS}
    rows = [
        [str(d), *(_ratio(largest.get((d, dtype, way))) for dtype, way in columns)]
        for d in sorted(found)
    ]
    environment = record["environment"]
    source = {
        "hardware": environment, "versions": environment, "date": record["started"][:10]
    }  # fmt: skip
    worst_rms = ", ".join(f"{value:.2f} {direction}" for direction, value in spread.items())
    words = (
        "Our largest error over that of torch's flash attention, of the cases that the report "
        "keeps: those nearest to their bounds. Backward: of dq, dk and dv. "
        f"Root mean square, the worst: {worst_rms}."
    )
    return table(source, ["head dim", *(" ".join(column) for column in columns)], rows, words)


def _build(results: Results) -> str:
    manifest = results["build"]
    totals, units = manifest["totals"], manifest["translation_units"]
    slowest = max(float(unit["wall_seconds"]) for unit in units)
    rows = [
        ["architectures", ", ".join(manifest["architectures"])],
        ["translation units", str(totals["translation_units"])],
        ["CPU time, minutes", f"{totals['cpu_seconds'] / 60:.1f}"],
        ["longest unit, seconds", f"{slowest:.0f}"],
        ["largest compiler process, GB", f"{totals['peak_rss_bytes'] / 1e9:.1f}"],
        ["wheel, MB", f"{manifest['wheel']['bytes'] / 1e6:.1f}"],
    ]
    lines = [[f"CUDA {manifest['cuda_toolkit']}", "wheel"], ["---", "---:"], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _deviation(results: Results) -> str:
    """The verdict on every claim of the studies of deviation."""
    record = results["deviation"]
    rows = [
        [
            one["text"],
            one["source"],
            one["verdict"] + (f": {one['condition']}" * bool(one["condition"])),
        ]
        for one in record["claims"]
    ]
    studies = "; ".join(f"{name}: {words}" for name, words in record["studies"].items())
    return table(record, ["claim", "of", "verdict"], rows, f"Studies: {studies}.")


# Claims that say whether a kernel's rounding matters to a training.
_MATTERS = ("null", "loss", "language-null", "language-loss", "model-noise")


def _matters(results: Results) -> str:
    """Numbers, with their intervals, of what an attention changes in a training."""
    found = [one for one in results["deviation"]["claims"] if one["key"] in _MATTERS]
    lines = [f"- {one['text']} **{one['verdict']}**: {'; '.join(one['numbers'])}." for one in found]
    return "\n".join(lines) or NOT_MEASURED


_STUDIES = (
    "decode",
    "paths",
    "servers",
    "latent",
    "peers-forward",
    "peers-backward",
)
# Name of a table: the result it can't do without, and what makes it.
TABLES: dict[str, tuple[str, Callable[[Results], str]]] = {
    **{name: (name, partial(_means, name=name)) for name in _STUDIES},
    "accuracy": ("verification", _accuracy),
    "build": ("build", _build),
    "deviation": ("deviation", _deviation),
    "deviation-matters": ("deviation", _matters),
    "by-head-dim": ("peers-forward", _by_head_dim),
    "host": ("host", _host),
    "ranks": ("ranks", _ranks),
    "servers-in-short": ("servers", partial(_means, name="servers", head_dims=False)),
    "vllm": ("vllm", _vllm),
    "whole-model": ("whole-model", _model),
}


if __name__ == "__main__":
    sys.exit(main())
