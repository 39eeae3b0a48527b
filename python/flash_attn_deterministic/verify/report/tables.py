"""The tables of a report, as rows of words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import numbers
from .numbers import milliseconds, ratio, size

MARKS = {
    "passed": "✓ passed",
    "failed": "✗ failed",
    "error": "✗ error",
    "not-applicable": "- not applicable",
    "not-run": "… not run",
    "incomplete": "… incomplete",
}


@dataclass(frozen=True)
class Table:
    """A table: a row has as many words as the header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: int = 99  # the first column of numbers: this and all after it are set to the right


def section_of(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a section by id."""
    found: Mapping[str, Any] = next(s for s in record["sections"] if s["id"] == name)
    return found


def _without_empty(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], numbers: int, references: int = 0
) -> Table:
    """Makes a table without the columns that are empty, the last rows' references aside."""
    own = rows[: len(rows) - references]
    kept = [i for i in range(len(header)) if i < 2 or any(row[i] for row in own)]
    picked = tuple(tuple(row[i] for i in kept) for row in rows)
    return Table(tuple(header[i] for i in kept), picked, numbers)


def sections(record: Mapping[str, Any]) -> Table:
    rows = [(s["title"], MARKS[s["status"]], f"{s['seconds']:.0f}") for s in record["sections"]]
    return Table(("section", "result", "seconds"), tuple(rows), 2)


def reasons(record: Mapping[str, Any]) -> list[str]:
    """Returns why sections did not pass."""
    return [
        f"{section['title']}: {section['reason']}"
        for section in record["sections"]
        if section["reason"] and section["status"] in ("failed", "error")
    ]


def facts(record: Mapping[str, Any]) -> Table:
    """What was verified, where."""
    environment, wheel, installed = (record[n] for n in ("environment", "wheel", "installed"))
    matches = {True: "yes", False: "no", None: "no wheel was named"}[installed["matches_wheel"]]
    gpu = environment.get("gpu")
    rows = [
        ("wheel", wheel["filename"] or "not named"),
        ("sha256", wheel["sha256"] or "-"),
        ("installed version", installed["version"] or "source tree"),
        ("installed files are the wheel's", matches),
        (
            "upstream",
            f"{record['pins']['upstream']['name']} {record['pins']['upstream']['version']}",
        ),
        ("upstream sha256", record["pins"]["upstream"]["sha256"]),
        *((f"patch {p['name']}", p["sha256"]) for p in record["pins"]["patches"]),
        ("CUDA toolkit of the wheel", record["build"]["cuda_toolkit"]),
        # Reports of earlier versions do not have it.
        ("bits version", str(record["build"].get("bits_version", "not counted"))),
        ("golden hashes", _golden(record["build"].get("golden"))),
        ("device", gpu or "CPU"),
    ]
    if gpu:
        rows += [
            ("compute capability", environment["compute_capability"]),
            ("multiprocessors, memory", f"{environment['sms']}, {environment['memory_gib']} GiB"),
            ("driver", environment["driver"] or "unknown"),
        ]
    rows += [
        ("torch", f"{environment.get('torch', 'unknown')} (CUDA {environment.get('cuda') or '-'})"),
        ("Python", f"{environment.get('python', 'unknown')}, {environment.get('system', '')}"),
        ("begun", record["started"]),
        ("took", f"{record['seconds']:.0f} s"),
    ]
    return Table(("", ""), tuple(rows))


def _golden(found: Mapping[str, Any] | None) -> str:
    """Says what speaks for the hashes of earlier wheels."""
    if found is None:
        return "none for this bits version on this device"
    words = [f"recorded on {found['origin']['gpu']}"]
    evidence = found["evidence"] or {}
    if evidence.get("families"):
        agreeing = evidence["families"]["agreeing"]
        words.append(f"{agreeing} calls have the same bits in two families of kernels")
    if evidence:
        accuracy = evidence["accuracy"]
        worst = ratio(accuracy["worst"]["ratio"])
        words.append(f"of {accuracy['calls']} calls the worst error is {worst} of what passes")
    return "; ".join(words)


def architectures(record: Mapping[str, Any]) -> Table:
    """Which GPU code of the wheel ran."""
    found = record["architectures"]
    rows = [(name, "machine code", "✓ ran here") for name in found["ran"]]
    rows += [(name, "PTX, compiled by the driver", "✓ ran here") for name in found["ran_as_ptx"]]
    rows += [(name, "machine code", "- unverified here") for name in found["unverified"]]
    return Table(("architecture", "kind", ""), tuple(rows))


def contract(record: Mapping[str, Any]) -> Table:
    """Rows are checks, columns are head dims with dtypes."""
    checks = section_of(record, "contract")["data"].get("checks", [])
    configs: list[str] = []
    for check in checks:
        configs += [name for name in check["by_config"] if name not in configs]
    rows = []
    for check in checks:
        cells = [_cell(check["by_config"].get(name)) for name in configs]
        rows.append((check["id"], MARKS[check["status"]], str(check["cases"]), *cells))
    return Table(("row", "result", "cases", *configs), tuple(rows), 2)


def promises(record: Mapping[str, Any]) -> Table:
    """What each row of the contract says."""
    checks = section_of(record, "contract")["data"].get("checks", [])
    rows = [(c["id"], c["promise"], c["reason"] or "") for c in checks]
    return Table(("row", "the same bits whatever", ""), tuple(rows))


def _cell(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return ""
    if counts["failed"]:
        return f"✗ {counts['failed']}/{counts['cases']}"
    return f"✓ {counts['cases']}"


def counter_example(check: Mapping[str, Any]) -> Table:
    """The first case of a check that failed, in full."""
    found = check["counter_example"]
    rows = [
        ("case", found["case"]),
        ("what", found["what"]),
        ("device", found["device"]),
        ("dtype, head dim", f"{found['dtype']}, {found['head_dim']}"),
        ("shapes", _pairs(found["shapes"])),
        ("options", _pairs(found["options"])),
        ("parameters", _pairs(found["parameters"])),
        ("seed", str(found["seed"])),
    ]
    if found["index"] is not None:
        rows += [
            ("tensor", f"{found['tensor']}: {found['differing']} of {found['elements']} differ"),
            ("first index", str(found["index"])),
            ("one side", f"{found['left']['bits']} = {found['left']['value']}"),
            ("other side", f"{found['right']['bits']} = {found['right']['value']}"),
        ]
    return Table(("", ""), tuple(rows))


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "-"


def accuracy(record: Mapping[str, Any]) -> Table:
    """The worst row of each head dim, dtype and tensor."""
    rows = section_of(record, "accuracy")["data"].get("rows", [])
    worst: dict[tuple[int, str, str], Mapping[str, Any]] = {}
    for row in rows:
        key = (row["head_dim"], row["dtype"], row["tensor"])
        if key not in worst or _height(row) > _height(worst[key]):
            worst[key] = row
    table = [
        (
            str(row["head_dim"]),
            row["dtype"],
            row["tensor"],
            row["name"].split(" ", 2)[2],
            numbers.error(row["ours"]["largest"]),
            "" if row["standard"] is None else numbers.error(row["standard"]["largest"]),
            ("" if row["passed"] else "✗ ") + ratio(row["ratio"]),
        )
        for row in worst.values()
    ]
    header = ("head dim", "dtype", "tensor", "worst call", "ours", "torch", "of what passes")
    return Table(header, tuple(table), 4)


def _height(row: Mapping[str, Any]) -> tuple[float, float]:
    """Orders rows: by ratio, then by error."""
    largest = row["ours"]["largest"] if "ours" in row else 0.0
    return numbers.height(row["ratio"]), numbers.height(largest)


PROTOTYPE = "prototype before this project"
SIDES = {
    "standard": "torch",
    "deterministic": "deterministic",
    "deterministic_512": "deterministic, splits of 512",
}


def seed(section: Mapping[str, Any]) -> Table:
    """Memory, performance or scaling: a row for each shape and side, the prototype's last."""
    rows = []
    for row in section["data"].get("rows", []):
        for side, peak in row["peak_bytes"].items():
            time = row.get("ms", {}).get(side)
            rows.append(
                (
                    f"{row['shape']} {row['dtype']}",
                    SIDES.get(side, side),
                    "" if time is None else milliseconds(time),
                    ratio(row["time_ratio"][side]) if side in row.get("time_ratio", {}) else "",
                    size(peak),
                    ratio(row["memory_ratio"][side]) if side in row["memory_ratio"] else "",
                )
            )
    figures = section["data"].get("seed")
    if figures:
        rows.append(
            (
                f"for reference: the {PROTOTYPE}, on an {figures['gpu']}",
                f"deterministic, splits of {figures['split_size']}",
                "",
                ratio(figures["time_ratio"]),
                "",
                ratio(figures["memory_ratio"]),
            )
        )
    header = ("shape", "side", "ms", "time", "peak memory", "memory")
    return _without_empty(header, rows, 2, references=1 if figures else 0)


def timed(section: Mapping[str, Any]) -> Table:
    """Decode or backward: a row for each shape."""
    rows = []
    for row in section["data"].get("rows", []):
        floor = memory = ""
        if "floor_ms" in row:
            floor = f"{ratio(row['ratio_to_floor'])} (floor {numbers.short(row['floor_ms'])} ms)"
        if "peak_bytes" in row:
            memory = f"{size(row['peak_bytes']['deterministic'])} ({ratio(row['memory_ratio'])})"
        rows.append(
            (
                f"{row['shape']} {row['dtype']}",
                milliseconds(row["ms"]["deterministic"]),
                milliseconds(row["ms"]["standard"]),
                ratio(row["time_ratio"]),
                ratio(row["ratio_to_upstream"]) if "ratio_to_upstream" in row else "",
                floor,
                memory,
            )
        )
    header = ("shape", "ours, ms", "torch, ms", "time", "to upstream", "to reading the cache")
    return _without_empty((*header, "peak memory"), rows, 1)


def invariance(section: Mapping[str, Any]) -> Table:
    """8 against 4 + 4."""
    rows = [
        (
            SIDES.get(row["side"], row["side"]),
            row["shape"],
            f"{row['differing']} of {row['elements']}",
            numbers.error(row["largest_difference"]),
        )
        for row in section["data"].get("rows", [])
    ]
    header = ("side", "shape", "numbers with other bits", "largest difference")
    return Table(header, tuple(rows), 2)


def measured(record: Mapping[str, Any]) -> dict[str, Table]:
    """Returns the tables of the sections that measure, by id, in order."""
    makers: dict[str, Callable[[Mapping[str, Any]], Table]] = {
        "memory": seed,
        "performance": seed,
        "batch-invariance": invariance,
        "scaling": seed,
        "decode": timed,
        "backward": timed,
    }
    found = {name: make(section_of(record, name)) for name, make in makers.items()}
    return {"accuracy": accuracy(record), **found}


def headline(record: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Returns what a reader wants to know first: title, value, explanation and status."""
    tiles = []

    def add(name: str, title: str, value: str, text: str) -> None:
        tiles.append((title, value, text, section_of(record, name)["status"]))

    data = {section["id"]: section["data"] for section in record["sections"]}
    checks = data["contract"].get("checks", [])
    ran = [check for check in checks if check["status"] not in ("not-applicable", "not-run")]
    good = sum(check["status"] == "passed" for check in ran)
    cases = sum(check["cases"] for check in ran)
    words = f"rows hold: {cases} cases, compared bit for bit"
    add("contract", "Contract", f"{good} of {len(ran)}", words)
    if data["accuracy"].get("worst"):
        largest = max(data["accuracy"]["worst"].values(), key=_height)
        words = "largest error over what passes; limit 1.00x"
        add("accuracy", "Accuracy", ratio(largest["ratio"]), words)
    torchs = "of torch's flash attention"
    for name, key, title in (
        ("performance", "time_ratio", "Forward time"),
        ("memory", "memory_ratio", "Forward memory"),
    ):
        for row in data[name].get("rows", []):
            add(name, title, ratio(row[key]["deterministic"]), f"{torchs}, {row['shape']}")
    if "geometric_mean" in data["decode"]:
        mean = data["decode"]["geometric_mean"]
        add("decode", "Decode time", ratio(mean), f"{torchs}, geometric mean")
    if data["backward"].get("rows"):
        worst = numbers.worst(row["time_ratio"] for row in data["backward"]["rows"])
        add("backward", "Backward time", ratio(worst), f"{torchs}, the worst shape")
    return tiles
