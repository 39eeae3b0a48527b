"""Changes the reference, one expression at a time, and asks the live checks of `verify`.

    python -m tests.mutants --out mutants.json [--only window] [--seconds 1500] [--jobs 12]
    python -m tests.mutants --out again.json --survivors mutants.json

Masks, softcap, ALiBi, windows and lengths: each mutant is the package with one operator, constant
or branch changed. It is killed where accuracy fails, a row of the contract fails, a call raises, or
nothing comes back in time. What survives is printed with its line: it changes no result, or no
check looks there. Those of a first run are handed to the tests of the reference by a second one.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import dataclasses
import importlib.abc
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "flash_attn_deterministic"
# Module to functions; empty: all of it.
TARGETS: dict[str, tuple[str, ...]] = {
    "reference.walk": (
        "visible", "hidden", "is_local", "scale", "scale_log2", "tanh_scale", "score_scale",
        "keep_scale",
    ),
    "reference.batch": (),
    "reference.forward": ("_rows", "_block"),
    "reference.backward": ("_add_rows",),
    "reference.calls": ("varlen_attention", "kvcache_attention"),
    "reference.storage": (),
}  # fmt: skip
_LAYOUTS = ("reference.calls", "reference.storage")
# What accuracy can't see: the order of additions, and sequences of one query.
_CHECKS = {False: ("chunk", "split-size"), True: ("decode", "varlen")}
_TESTS = ("reference", "contract", "checks", "interface/test_interface.py")
_SECONDS = 240.0  # of a mutant

_OPERATORS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A changed module."""

    module: str
    line: int
    change: str  # "a -> b"
    source: str = dataclasses.field(repr=False)


def mutants(module: str, functions: tuple[str, ...], text: str) -> Iterator[Mutant]:
    """Yields the mutants of a module's functions."""
    whole = ast.parse(text)
    for number, node in enumerate(ast.walk(whole)):
        if not isinstance(node, ast.FunctionDef) or (functions and node.name not in functions):
            continue
        tree = copy.deepcopy(whole)
        function = [*ast.walk(tree)][number]
        for part in _code(function):
            for undo, words in _changes(part):
                line = getattr(part, "lineno", 0)
                yield Mutant(module, line, words.replace("\n", " ")[:120], ast.unparse(tree))
                undo()


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and what is in it, but for types."""
    yield node
    for name, value in ast.iter_fields(node):
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST) and name not in ("annotation", "returns"):
                yield from _code(part)


def _changes(node: ast.AST) -> Iterator[tuple[Any, str]]:
    """Changes a node in each way; yields what undoes it, and the change in words."""

    def change(owner: Any, name: str, value: Any) -> tuple[Any, str]:
        before, old = getattr(owner, name), ast.unparse(node)
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before), f"{old} -> {ast.unparse(node)}"

    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
        yield change(node, "ops", [_OPERATORS[type(node.ops[0])]()])
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in _OPERATORS:
        yield change(node, "op", _OPERATORS[type(node.op)]())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield change(node, "value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield change(node, "value", node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield change(node, "op", ast.UAdd())
    elif isinstance(node, (ast.IfExp, ast.If)):
        yield change(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Name) and node.id in _NAMES:
        yield change(node, "id", _NAMES[node.id])
    elif isinstance(node, ast.Attribute) and node.attr == "abs":
        yield change(node, "attr", "clone")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a changed text."""

    def __init__(self, mutant: Mutant) -> None:
        self._name, self._source = f"{PACKAGE}.{mutant.module}", mutant.source

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, f"<mutant of {self._name}>", "exec"), module.__dict__)


def _try(mutant: Mutant, by_tests: bool, answer: Any) -> None:
    """Sends what killed a mutant; "" if nothing did. In a process of its own."""
    sys.meta_path.insert(0, _Finder(mutant))
    try:
        answer.send(_failing_test() if by_tests else _killer(mutant.module))
    except BaseException as error:
        answer.send(f"{type(error).__name__}")


def _killer(module: str) -> str:
    from flash_attn_deterministic.verify import accuracy
    from flash_attn_deterministic.verify.contract import CHECKS, Attention, run_check, size_of

    ours = Attention.installed()
    # Those first that call the module.
    in_layouts = module in _LAYOUTS
    cases = sorted(accuracy.cases("cpu"), key=lambda case: (case.form == "dense") == in_layouts)
    for case in cases:
        for row in accuracy.measure((64, "bf16"), "cpu", ours, [case])["rows"]:
            if not row["passed"]:
                return f"accuracy: {row['name']}"
    size = dataclasses.replace(
        size_of("cpu", quick=True), configs=((64, "bf16"),), features=("everything-causal",)
    )
    for check in CHECKS:
        if check.id in _CHECKS[in_layouts]:
            outcome = run_check(check, size, ours)
            if outcome.failed:
                return f"contract: {check.id}"
    return ""


def _failing_test() -> str:
    """Returns the first test of the reference that fails; "" if none does."""
    import pytest

    failed: list[str] = []

    class Listener:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                failed.append(report.nodeid)

    folder = Path(__file__).parent / "unit"
    words = ["-x", "-q", "-p", "no:cacheprovider", *(str(folder / name) for name in _TESTS)]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        status = pytest.main(words, plugins=[Listener()])
    return next(iter(failed), f"pytest ended with {status}") if status else ""


def _killed_by(mutant: Mutant, by_tests: bool) -> str:
    """Tries a mutant in a process of its own; returns what killed it, or ""."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_try, args=(mutant, by_tests, sender))
    process.start()
    killer: str = receiver.recv() if receiver.poll(_SECONDS) else "no answer in time"
    process.kill()
    process.join()
    return killer


def main() -> int:
    """Prints a line for each survivor, and how many were killed by what."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON: every mutant and its killer")
    parser.add_argument("--only", default="", help="part of a module's name")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="no mutant starts later"
    )
    parser.add_argument(
        "--survivors", type=Path, help="only those that survived in this file; asks tests/unit"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    arguments = parser.parse_args()
    before: list[dict[str, Any]] = []
    if arguments.survivors is not None:
        before = json.loads(arguments.survivors.read_text(encoding="utf-8"))
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    import torch

    torch.set_num_threads(1)
    end = time.monotonic() + arguments.seconds
    tried: list[Mutant] = []
    for module, functions in TARGETS.items():
        if arguments.only not in module:
            continue
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        known = [row for row in before if row["module"] == module]
        for number, mutant in enumerate(mutants(module, functions, path.read_text("utf-8"))):
            if not before or (number < len(known) and not known[number]["killer"]):
                tried.append(mutant)

    def outcome(mutant: Mutant) -> str | None:
        return _killed_by(mutant, bool(before)) if time.monotonic() < end else None

    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for mutant, killer in zip(tried, pool.map(outcome, tried), strict=True):
            if killer is None:
                continue
            row = {"module": mutant.module, "line": mutant.line, "change": mutant.change}
            rows.append({**row, "killer": killer})
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            if not killer:
                print(f"survived: {mutant.module}:{mutant.line}: {mutant.change}", flush=True)
    survived = sum(not row["killer"] for row in rows)
    print(
        f"{len(rows)} of {len(tried)} mutants, {len(rows) - survived} killed, {survived} survived"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
