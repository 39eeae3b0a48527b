"""Fills the tables of README.md and docs/ from docs/results/: `python -m tests.benchmarks.tables`.

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`. With --check nothing is written;
the exit status says whether every table is up to date.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from flash_attn_build import files
from flash_attn_build.errors import BuildError

ROOT = Path(__file__).resolve().parents[2]
NOT_MEASURED = "Not measured yet."
KERNEL_HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # others run on the next of these

# Name of a file in docs/results/, without .json, to its content; also that of FOLDER/FOLDER.json.
Results = Mapping[str, Any]

_REGION = re.compile(
    r"^<!-- table:(?P<name>[\w-]+) -->\n(?P<body>.*?)^<!-- /table -->$", re.DOTALL | re.MULTILINE
)
_MARKS = re.compile(r"^<!-- /?table\b.*-->$", re.MULTILINE)


class TableError(BuildError):
    """A table can't be made: an unknown name, a region without an end, results of another form."""

    exit_code = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 1 if --check finds a stale table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, report stale tables")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/")
    options = parser.parse_args(arguments)
    try:
        stale = update(options.root, write=not options.check)
    except TableError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for path in stale:
        print(f"{path.relative_to(options.root)}: {'stale' if options.check else 'updated'}")
    if stale and options.check:
        print("Run `python -m tests.benchmarks.tables`, and commit.", file=sys.stderr)
        return 1
    return 0


def update(root: Path, *, write: bool) -> list[Path]:
    """Brings the tables of a source tree up to date.

    Args:
        root: Folder of README.md and docs/.
        write: Whether to write the files.

    Returns:
        The files whose tables were out of date.

    Raises:
        TableError: A table can't be made; nothing is written then.
    """
    results = read_results(root / "docs" / "results")
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    changed = {}
    for path in pages:
        if path.is_file():
            before = path.read_text(encoding="utf-8")
            after = fill(before, results, str(path.relative_to(root)))
            if after != before:
                changed[path] = after
    if write:
        for path, text in changed.items():
            files.write_text(path, text)
    return list(changed)


def read_results(folder: Path) -> dict[str, Any]:
    """Reads every JSON file of a folder, and of folders in it those that bear the folder's name.

    Raises:
        TableError: One of them is not JSON.
    """
    results = {}
    inner = (path for path in folder.glob("*/*.json") if path.stem == path.parent.name)
    for path in sorted([*folder.glob("*.json"), *inner]):
        try:
            results[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise TableError(f"{path}: not JSON ({error}); write it again") from error
    return results


def fill(page: str, results: Results, where: str) -> str:
    """Fills the tables of a page of Markdown; `where` is its name in messages.

    Raises:
        TableError: An unknown table, a region without an end, or results that lack a field.
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
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise TableError(
                f"{where}: table {name!r}: docs/results/{needed}.json is not of the expected "
                f"form ({type(error).__name__}: {error}); write it again with its script"
            ) from error
        return f"<!-- table:{name} -->\n{body}\n<!-- /table -->"

    return _REGION.sub(region, page)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lays out a table; all columns but the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(
    record: Mapping[str, Any], header: Sequence[str], rows: Iterable[Sequence[str]], words: str = ""
) -> str:
    """Lays out a table, and a line under it: GPU, torch and date, then words."""
    gpu = record.get("hardware", {}).get("gpu", "no GPU")
    source = f"{gpu}, torch {record['versions']['torch']}, {record['date']}. {words}"
    return f"{markdown(header, rows)}\n\n{source.rstrip()}"


# --- Cells: "-" where nothing was measured --------------------------------------------------------


def _spread(times: Mapping[str, float] | None) -> str:
    if times is None:
        return "-"
    return f"{times['median']:.3g} ({times['p10']:.3g} to {times['p90']:.3g})"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _pair(one: Mapping[str, float] | None) -> str:
    return "-" if one is None else f"{one['mean']:.2f} ({one['worst']:.2f})"


def _whole(number: float | None) -> str:
    return "-" if number is None else f"{number:.0f}"


def _megabytes(count: float | None, digits: int = 1) -> str:
    return "-" if count is None else f"{count / 1e6:.{digits}f}"


def _mean_and_worst(ratios: Sequence[float]) -> tuple[str, str]:
    if not ratios:
        return "-", "-"
    return f"{geometric_mean(ratios):.2f}", f"{max(ratios):.2f}"


# --- Times of forward, backward and packed sequences ----------------------------------------------


def _forward(results: Results, *, dtypes: Sequence[str]) -> str:
    record = results["forward"]
    rows = [
        [
            case["name"],
            *(_spread(case["ms"].get(side)) for side in ("ours", "fa2", "sdpa")),
            *(_ratio(case.get(f"ratio_to_{side}")) for side in ("fa2", "sdpa")),
            _whole(case["tflops"]),
        ]
        for case in record["cases"]
        if case["dtype"] in dtypes
    ]
    header = ["shape", "ours, ms", "FA2, ms", "SDPA, ms", "to FA2", "to SDPA", "TFLOP/s"]
    return table(record, header, rows, "Median (10th to 90th percentile).")


# Sides of the backward benchmark: key in the record, column.
_BACKWARD_SIDES = {
    "ours": "ours",
    "ours_atomics": "ours, atomics",
    "fa2": "FA2",
    "fa2_deterministic": "FA2 det.",
    "sdpa": "SDPA",
}


def _backward(results: Results) -> str:
    record = results["backward"]
    theirs = ("fa2", "fa2_deterministic")
    rows = [
        [
            case["name"],
            *(_spread(case["ms"].get(side)) for side in _BACKWARD_SIDES),
            *(_ratio(case.get(f"ratio_to_{side}")) for side in theirs),
            *(_megabytes(case["scratch_bytes"].get(side)) for side in ("ours", *theirs)),
            _whole(case["tflops"]),
        ]
        for case in record["cases"]
    ]
    header = ["shape", *(f"{name}, ms" for name in _BACKWARD_SIDES.values()), "to FA2"]
    header += ["to FA2 det.", "scratch, MB", "of FA2", "of FA2 det.", "TFLOP/s"]
    words = "Median (10th to 90th percentile). FA2 det.: upstream's deterministic mode."
    return table(record, header, rows, words)


def _varlen(results: Results) -> str:
    record = results["varlen"]
    rows = [
        [
            case["name"],
            *(_spread(case["ms"][side]) for side in ("ours", "fa2")),
            _ratio(case["ratio_to_fa2"]),
            _whole(case["tflops"]),
        ]
        for case in record["cases"]
    ]
    words = "Median (10th to 90th percentile). L: the shortest and the longest sequence."
    return table(record, ["shape", "ours, ms", "FA2, ms", "to FA2", "TFLOP/s"], rows, words)


def _by_head_dim(results: Results) -> str:
    """Ratios to upstream's own kernels by head dim, and by feature."""
    columns = (("forward", "fa2"), ("backward", "fa2"), ("backward", "fa2_deterministic"))
    groups: dict[str, list[list[float]]] = {}
    for place, (name, side) in enumerate(columns):
        for case in results.get(name, {}).get("cases", ()):
            ratio = case.get(f"ratio_to_{side}")
            if ratio is not None:
                group = case.get("feature") or f"head dim {case['head_dim']:3}"
                groups.setdefault(group, [[] for _ in columns])[place].append(ratio)
    if not groups:
        return NOT_MEASURED
    plain = sorted(group for group in groups if group.startswith("head dim"))
    order = [*plain, *(group for group in groups if group not in plain)]
    rows = [
        [" ".join(group.split()), *(cell for one in groups[group] for cell in _mean_and_worst(one))]
        for group in order
    ]
    header = ["", "forward", "worst", "backward", "worst", "to FA2 det.", "worst"]
    words = "Geometric mean and worst of the ratios to FA2; features at head dims 64 and 128."
    return table(results["forward"], header, rows, words)


def _summary(results: Results) -> str:
    """What users ask first: how much slower than upstream, in one line for each use."""
    prefill: dict[bool, list[float]] = {False: [], True: []}
    for case in results["forward"]["cases"]:
        if "ratio_to_fa2" in case:
            prefill[bool(case.get("feature"))].append(case["ratio_to_fa2"])
    rows = [["prefill", "FA2", *_mean_and_worst(prefill[False]), "none"]]
    if prefill[True]:
        features = "prefill: window, softcap, ALiBi, dropout"
        rows.append([features, "FA2", *_mean_and_worst(prefill[True]), "none"])
    if "varlen" in results:
        packed = [case["ratio_to_fa2"] for case in results["varlen"]["cases"]]
        rows.append(["prefill, packed sequences", "FA2", *_mean_and_worst(packed), "none"])
    if "decode" in results:
        cases, side = results["decode"]["cases"], f"ours_{results['decode']['split_size']}"
        decode = [case["ratio_to_fa2"][side] for case in cases if "ratio_to_fa2" in case]
        scratch = _megabytes(max(case["scratch_bytes"][side] for case in cases), 0)
        rows.append(["decode", "FA2", *_mean_and_worst(decode), f"at most {scratch} MB"])
    if "backward" in results:
        cases = results["backward"]["cases"]
        for side, name in (("fa2", "FA2, atomics"), ("fa2_deterministic", "FA2, deterministic")):
            ratios = [c[f"ratio_to_{side}"] for c in cases if f"ratio_to_{side}" in c]
            scratches = [c["scratch_bytes"] for c in cases if side in c["scratch_bytes"]]
            least = max(one["ours"] / one[side] for one in scratches)
            rows.append(["backward", name, *_mean_and_worst(ratios), f"at most {least:.2f} x"])
    header = ["deterministic", "against", "time, mean", "worst", "scratch memory"]
    words = (
        "Ratios of medians in one process, geometric mean of all shapes in `docs/benchmarks.md`; "
        "at the default split size."
    )
    return table(results["forward"], header, rows, words)


# --- Decode and split sizes -----------------------------------------------------------------------


def _decode(results: Results) -> str:
    record = results["decode"]
    splits, means = record["splits"], record["geometric_means"]
    default = f"ours_{record['split_size']}"

    def ratios(one: Mapping[str, Any]) -> list[str]:
        to_fa2, to_floor = one.get("ratio_to_fa2", {}), one["ratio_to_floor"]
        cells = [_ratio(to_fa2.get(f"ours_{size}")) for size in splits]
        return [*cells, _ratio(to_floor[default]), _ratio(to_floor.get("ours_paged"))]

    rows = [
        [
            case["name"],
            _spread(case["ms"][default]),
            _spread(case["ms"].get("fa2")),
            f"{case['floor_ms']:.3g}",
            *ratios(case),
            _megabytes(case["scratch_bytes"][default], 2),
        ]
        for case in record["cases"]
    ]
    rows.append(["geometric mean", *[""] * 3, *ratios(means), ""])
    header = ["shape", "ours, ms", "FA2, ms", "floor, ms"]
    header += [*(f"{size} to FA2" for size in splits), "to floor", "pages to floor", "scratch, MB"]
    floor = "reading keys and values as fast as a copy"  # results of before the kernel "read"
    if all("read" in case["ms"] for case in record["cases"]):
        floor = "a kernel that only reads the keys and values"
    words = (
        "bf16, through CUDA graphs; median (10th to 90th percentile). Ours, floor and scratch: "
        f"splits of {record['split_size']} tokens, the default. FA2: upstream's heuristic. Floor: "
        f"{floor}. Pages: ours from pages of 16 tokens in any order, with cache_seqlens."
    )
    return table(record, header, rows, words)


def _splits(results: Results) -> str:
    record = results["forward"]
    default = record.get("split_size")
    prefill: dict[int, list[float]] = {}
    timed = [case for case in record["cases"] if case.get("splits") and "ratio_to_fa2" in case]
    for case in timed:
        for size, one in case["splits"].items():
            prefill.setdefault(int(size), []).append(one["ratio_to_fa2"])
        if default is not None:
            prefill.setdefault(default, []).append(case["ratio_to_fa2"])
    if not prefill:
        return NOT_MEASURED
    cases = results["decode"]["cases"] if "decode" in results else []
    rows = []
    for size in sorted({*prefill, *(results["decode"]["splits"] if cases else ())},
                       key=lambda size: size or math.inf):  # fmt: skip
        name = f"ours_{size}"
        columns = [prefill.get(size, [])]
        for key in ("ratio_to_fa2", "ratio_to_floor"):
            columns.append([case[key][name] for case in cases if name in case.get(key, {})])
        cells = [cell for ratios in columns for cell in _mean_and_worst(ratios)]
        note = " (default)" if size == default else ""
        rows.append([f"{size}{note}" if size else "none", *cells])
    header = ["tokens per split"]
    for what in ("prefill to FA2", "decode to FA2", "decode to floor"):
        header += [what, "worst"]
    return table(record, header, rows, "Geometric mean and worst of all shapes.")


_DECODE_SIDES = {"contiguous": "contiguous", "fa3": "FA3", "fa2": "FA2", "read": "reading"}


def _decode_peers(results: Results) -> str:
    record = results["decode_peers"]
    found = {side for case in record["cases"] for side in case["ms"]}
    sides = [side for side in _DECODE_SIDES if side in found]

    def microseconds(times: Mapping[str, float] | None) -> str:
        return "-" if times is None else f"{1e3 * times['median']:.1f}"

    rows = [
        [
            case["name"],
            case["plan"]["path"],
            *(microseconds(case["ms"].get(side)) for side in ("ours", *sides)),
            *(_ratio(case["ours_over"].get(side)) for side in sides),
        ]
        for case in record["cases"]
    ]
    for group in dict.fromkeys(case["group"] for case in record["cases"]):
        cells = [_pair(record["means"].get(side, {}).get(group)) for side in sides]
        rows.append([f"{group}: mean (worst)", *[""] * (2 + len(sides)), *cells])
    header = ["shape", "path", "ours, us", *(f"{_DECODE_SIDES[side]}, us" for side in sides)]
    header += [f"to {_DECODE_SIDES[side]}" for side in sides]
    words = (
        f"bf16, causal, through CUDA graphs, splits of {record['split_size']} tokens; medians. FA3 "
        "and FA2 split by their heuristics. Reading: a kernel that only reads the keys and values."
        f"{_left_out(record)}"
    )
    return table(record, header, rows, words)


# --- Peers ----------------------------------------------------------------------------------------

# Sides of the comparisons with others: key in the record, column.
_PEERS = {
    "best": "the best",
    "fa4": "FA4",
    "fa4-deterministic": "FA4 det.",
    "fa3-one-split": "FA3",
    "fa3-deterministic": "FA3 det.",
    "fa3": "FA3 default",
    "sdpa-cudnn": "cuDNN",
    "sdpa-flash": "torch flash",
    "ours-atomics": "ours, atomics",
}


def _peers(results: Results, *, name: str) -> str:
    """Our time over others' by group: geometric mean and worst."""
    record = results[name]
    summary = record["summary"]
    sides = [side for side in _PEERS if any(side in group for group in summary.values())]
    rows = [[group, *(_pair(own.get(side)) for side in sides)] for group, own in summary.items()]
    words = (
        "Our time over theirs, geometric mean (worst) of the cases that they can run."
        f"{_left_out(record)}"
    )
    return table(record, ["", *(_PEERS[side] for side in sides)], rows, words)


def _peers_all(results: Results, *, name: str) -> str:
    """TFLOP/s of each side in each case."""
    record = results[name]
    found = {side for case in record["cases"] for side in case["tflops"]}
    sides = [side for side in _PEERS if side in found]
    rows = [
        [
            case["name"],
            *(_whole(case["tflops"].get(side)) for side in ("ours", *sides)),
            _ratio(case["ours_over"].get("best")),
        ]
        for case in record["cases"]
    ]
    header = ["TFLOP/s", "ours", *(_PEERS[side] for side in sides), "time to best"]
    return table(record, header, rows, f"Medians.{_left_out(record)}")


def _left_out(record: Mapping[str, Any]) -> str:
    count = len(record["left_out"]) + len(record["failed"])
    return f" Not measured, for want of time: {count} cases, named in the JSON." if count else ""


# --- Host time, start, accuracy -------------------------------------------------------------------


def _host_time(results: Results) -> str:
    record = results["host_time"]
    rows = [
        [name, f"{one['median']:.1f}", f"{one['p10']:.1f}"] for name, one in record["us"].items()
    ]
    words = "Median of eager loops, on the host."
    return table(record, ["call", "us", "10th percentile"], rows, words)


def _startup(results: Results) -> str:
    record = results["startup"]
    names = {
        "import_ms": "import, on top of torch",
        "first_call_ms": "first call of a kernel, CUDA context made",
        "second_call_ms": "second call",
    }
    times = record["times"]
    rows = [[text, _spread(times[name])] for name, text in names.items() if name in times]
    return table(record, ["", "ms"], rows)


def _accuracy(results: Results) -> str:
    """Worst errors of the verified wheel, forward and backward."""
    record = results["verification"]
    section = next(section for section in record["sections"] if section["id"] == "accuracy")
    largest: dict[tuple[int, str, str], float] = {}
    spread: dict[str, float] = {}  # root mean squares
    for row in section["data"]["rows"]:
        key, direction = (row["head_dim"], row["dtype"], row["direction"]), row["direction"]
        largest[key] = max(largest.get(key, 0.0), row["ratio"])
        floor = _EPS[row["dtype"]] / 64  # smaller errors are chance
        rmse = max(row["ours"]["rmse"], floor) / max(row["against"]["rmse"], floor)
        spread[direction] = max(spread.get(direction, 0.0), rmse)
    columns = [(dtype, way) for dtype in _EPS for way in ("forward", "backward")]
    rows = [
        [str(head_dim), *(_ratio(largest.get((head_dim, *column))) for column in columns)]
        for head_dim in KERNEL_HEAD_DIMS
    ]
    environment = record["environment"]
    source = {
        "hardware": environment, "versions": environment, "date": record["started"][:10]
    }  # fmt: skip
    words = (
        "Our largest error over that of torch's flash attention, the worst of all shapes; backward"
        f": of dq, dk and dv. Root mean square, the worst: {spread['forward']:.2f} forward, "
        f"{spread['backward']:.2f} backward."
    )
    return table(source, ["head dim", *(" ".join(column) for column in columns)], rows, words)


_EPS = {"bf16": 2.0**-7, "fp16": 2.0**-10}


def _accuracy_all(results: Results) -> str:
    record = results["accuracy"]
    columns = [(dtype, causal) for dtype in _EPS for causal in (False, True)]
    found = {
        (row["head_dim"], row["dtype"], row["causal"]): row["worst_ratio"] for row in record["rows"]
    }

    def cell(worst: Mapping[str, float] | None) -> str:
        return f"{worst['largest']:.2f} / {worst['rmse']:.2f}" if worst else "-"

    rows = [
        [str(head_dim), *(cell(found.get((head_dim, *column))) for column in columns)]
        for head_dim in sorted({head_dim for head_dim, _, _ in found})
    ]
    header = ["head dim", *(f"{dtype}{' causal' if causal else ''}" for dtype, causal in columns)]
    words = (
        "Our error over that of torch's flash attention, the worst of all shapes: largest error / "
        "root mean square."
    )
    return table(record, header, rows, words)


# --- The build ------------------------------------------------------------------------------------


def _build(results: Results) -> str:
    manifest = results["build"]
    totals = manifest["totals"]
    rows = [
        ["architectures", ", ".join(manifest["architectures"])],
        ["translation units", str(totals["translation_units"])],
        ["CPU time, minutes", f"{totals['cpu_seconds'] / 60:.1f}"],
        ["largest compiler process, GB", f"{totals['peak_rss_bytes'] / 1e9:.1f}"],
        ["wheel, MB", f"{manifest['wheel']['bytes'] / 1e6:.1f}"],
    ]
    if "build_cost_upstream" in results:
        pairs = _alike(_cost_pairs(results))
        ratio = sum(theirs for _, theirs, _, _ in pairs) / sum(ours for _, _, _, ours in pairs)
        rows.insert(3, [f"CPU time of {len(pairs)} of upstream's files, over ours", f"{ratio:.1f}"])
    return markdown([f"CUDA {manifest['cuda_toolkit']}", "wheel"], rows)


def _build_cost(results: Results) -> str:
    upstream = results["build_cost_upstream"]
    pairs = _cost_pairs(results)
    rows = [
        [name, f"{theirs:.0f}", replacement, f"{ours:.0f}", f"{theirs / ours:.1f}"]
        for name, theirs, replacement, ours in pairs
    ]
    theirs = sum(pair[1] for pair in _alike(pairs))
    ours = sum(pair[3] for pair in _alike(pairs))
    rows.append(["sum without split", f"{theirs:.0f}", "", f"{ours:.0f}", f"{theirs / ours:.1f}"])
    header = ["upstream's file", "CPU s", "ours", "CPU s", "ratio"]
    return (
        f"{markdown(header, rows)}\n\nUpstream's own files, nothing switched off, for "
        f"{', '.join(upstream['architectures'])} with the same toolkit and compression. One of "
        "ours holds both masks, but none of upstream's other options and no split kernel."
    )


def _cost_pairs(results: Results) -> list[tuple[str, float, str, float]]:
    """Upstream's files and ours for the same head dim and dtype: names and CPU seconds."""
    own = {_unit_name(unit["output"]): unit for unit in results["build"]["translation_units"]}
    pairs = []
    for unit in results["build_cost_upstream"]["translation_units"]:
        parts = re.fullmatch(
            r"(fwd|bwd)(?:_split)?_hdim(\d+)_(fp16|bf16)(?:_causal)?", unit["name"]
        )
        if parts is None:
            raise ValueError(f"name {unit['name']!r}")
        replacement = f"{parts[1]}_{parts[3]}_{parts[2]}"
        pairs.append(
            (unit["name"], unit["cpu_seconds"], replacement, own[replacement]["cpu_seconds"])
        )
    return pairs


def _alike(pairs: list[tuple[str, float, str, float]]) -> list[tuple[str, float, str, float]]:
    """The pairs that do the same work: ours hold no split kernel."""
    return [pair for pair in pairs if "_split" not in pair[0]]


def _build_units(results: Results) -> str:
    rows = [
        [
            _unit_name(unit["output"]),
            f"{unit['cpu_seconds']:.1f}",
            f"{unit['wall_seconds']:.1f}",
            f"{unit['peak_rss_bytes'] / 1e9:.2f}",
        ]
        for unit in results["build"]["translation_units"]
    ]
    return markdown(["translation unit", "CPU s", "wall s", "peak GB"], rows)


def _matrix(results: Results) -> str:
    """What `nox -s matrix --report FILE` wrote: a session for each toolkit and torch."""
    cells = {
        (each["args"]["toolkit"], each["args"]["torch"]): str(each["result"])
        for each in results["matrix"]["sessions"]
    }
    torches = list(dict.fromkeys(torch for _, torch in cells))
    rows = [
        [toolkit, *(cells.get((toolkit, torch), "not run") for torch in torches)]
        for toolkit in dict.fromkeys(toolkit for toolkit, _ in cells)
    ]
    table = markdown(["CUDA toolkit", *(f"torch {torch}" for torch in torches)], rows)
    return f"{table}\n\nCPU tests on an installed wheel (preset dev)."


def _unit_name(output: str) -> str:
    return Path(output).name.removesuffix(".o").removesuffix(".cu").removesuffix(".cpp")


# Name of a table: the result it can't do without, and what makes it.
TABLES: dict[str, tuple[str, Callable[[Results], str]]] = {
    "accuracy": ("verification", _accuracy),
    "accuracy-all": ("accuracy", _accuracy_all),
    "backward": ("backward", _backward),
    "build": ("build", _build),
    "build-cost": ("build_cost_upstream", _build_cost),
    "build-units": ("build", _build_units),
    "by-head-dim": ("forward", _by_head_dim),
    "decode": ("decode", _decode),
    "decode-peers": ("decode_peers", _decode_peers),
    "forward": ("forward", partial(_forward, dtypes=["bf16"])),
    "forward-all": ("forward", partial(_forward, dtypes=["bf16", "fp16"])),
    "host-time": ("host_time", _host_time),
    "matrix": ("matrix", _matrix),
    "peers-backward": ("peers_backward", partial(_peers, name="peers_backward")),
    "peers-backward-all": ("peers_backward", partial(_peers_all, name="peers_backward")),
    "peers-forward": ("peers_forward", partial(_peers, name="peers_forward")),
    "peers-forward-all": ("peers_forward", partial(_peers_all, name="peers_forward")),
    "splits": ("forward", _splits),
    "summary": ("forward", _summary),
    "startup": ("startup", _startup),
    "varlen": ("varlen", _varlen),
}


if __name__ == "__main__":
    sys.exit(main())
