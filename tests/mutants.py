"""Changes the reference, one expression at a time, and asks the live checks of `verify`.

    python -m tests.mutants --out docs/results/mutants.json [--only walk] [--jobs 2]

Masks, softcap, ALiBi, windows and lengths: each mutant is the package with one operator, constant
or branch changed. It is killed where accuracy fails, a row of the contract fails, a call raises, or
nothing comes back in time. What the live checks leave alive changes no result, for a reason in
`tests.equivalent_mutants`, or is handed to the tests of the reference. What these leave alive too
is printed, and is the exit status 1: no check looks there. About half an hour on one core.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import dataclasses
import functools
import importlib.abc
import importlib.util
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from tests import conftest as _finds_flash_attn_build  # noqa: F401
from tests.equivalent_mutants import EQUIVALENT

PACKAGE = "flash_attn_deterministic"
# Module to functions; empty: all of it.
TARGETS: dict[str, tuple[str, ...]] = {
    "reference.walk": (
        "of", "visible", "hidden", "is_local", "scale", "scale_log2", "tanh_scale", "score_scale",
        "keep_scale",
    ),
    "reference.batch": (),
    "reference.forward": ("_rows", "_block"),
    "reference.backward": ("_add_rows",),
    "reference.calls": ("varlen_attention", "kvcache_attention", "varlen_attention_backward"),
    "reference.storage": (),
}  # fmt: skip
_LAYOUTS = ("reference.calls", "reference.storage")
# What accuracy can't see: sequences of one query, and the order of additions.
_OF_LAYOUTS, _OF_ROWS = ("decode", "varlen"), ("chunk", "split-size")
_TESTS = (
    "reference/test_reference.py", "reference/test_calls.py", "reference/test_backward.py",
    "contract/test_forward.py", "contract/test_backward.py", "interface/test_sinks.py",
    "interface/test_residual.py", "reference/test_dropout.py", "interface/test_interface.py",
    "interface/test_max_logits.py", "ops/test_ops.py",
)  # fmt: skip
# It changes the order of additions itself, and takes as long as all others.
_LEFT_OUT = "tests/unit/contract/test_backward.py::test_a_matmul_breaks_the_contract"
# Of CPU time; the package as it is takes 8 and 100.
_SECONDS_LIVE, _SECONDS_TESTS = 30, 300

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
    place: str  # module, function and changed line, as it is now
    source: str = dataclasses.field(repr=False)


def mutants(module: str, functions: tuple[str, ...], text: str) -> Iterator[Mutant]:
    """Yields the mutants of a module's functions."""
    whole = ast.parse(text)
    before = ast.unparse(whole).splitlines()
    for number, node in enumerate(ast.walk(whole)):
        if not isinstance(node, ast.FunctionDef) or (functions and node.name not in functions):
            continue
        tree = copy.deepcopy(whole)
        function = [*ast.walk(tree)][number]
        for part in _code(function):
            for owner, name, value in _changes(part):
                old = getattr(owner, name)
                setattr(owner, name, value)
                source = ast.unparse(tree)
                setattr(owner, name, old)
                pairs = zip(before, source.splitlines(), strict=True)
                line = next(now.strip() for was, now in pairs if was != now)
                yield Mutant(module, f"{module}.{node.name}: {line}", source)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and what is in it, but for types and zip's `strict`, which only asserts."""
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    yield node
    for name, value in ast.iter_fields(node):
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST) and name not in ("annotation", "returns"):
                yield from _code(part)


def _changes(node: ast.AST) -> Iterator[tuple[Any, str, Any]]:
    """Yields each change of a node: a part of it, the name of a field, and the field's value."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
        yield node, "ops", [_OPERATORS[type(node.ops[0])]()]
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in _OPERATORS:
        yield node, "op", _OPERATORS[type(node.op)]()
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, "value", not node.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, "value", node.value + 1
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node, "op", ast.UAdd()
    elif isinstance(node, (ast.IfExp, ast.If)):
        yield node, "test", ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Name) and node.id in _NAMES:
        yield node, "id", _NAMES[node.id]
    elif isinstance(node, ast.Attribute) and node.attr == "abs":
        yield node, "attr", "clone"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a changed text."""

    def __init__(self, mutant: Mutant) -> None:
        self._name, self._source = f"{PACKAGE}.{mutant.module}", mutant.source

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, f"<mutant of {self._name}>", "exec"), module.__dict__)


def _live(mutant: Mutant) -> str:
    """Returns the first of the live checks that fails; "" if none does."""
    from flash_attn_deterministic.verify import accuracy
    from flash_attn_deterministic.verify.contract import CHECKS, Attention, run_check, size_of
    from flash_attn_deterministic.verify.features import FEATURES

    ours = Attention.installed()
    in_layouts = mutant.module in _LAYOUTS
    # Those that call the module; first those with most options at once.
    cases = [case for case in accuracy.cases("cpu") if not in_layouts or case.form != "dense"]
    cases.sort(key=lambda case: (case.form != "dense", -len(FEATURES[case.feature])))
    checks = _OF_LAYOUTS if in_layouts else (*_OF_LAYOUTS, *_OF_ROWS)
    for case in cases:
        for row in accuracy.measure((64, "bf16"), "cpu", ours, [case])["rows"]:
            if not row["passed"]:
                return f"accuracy: {row['name']}"
    size = dataclasses.replace(
        size_of("cpu", quick=True), configs=((64, "bf16"),), features=("everything-causal",)
    )
    for check in CHECKS:
        if check.id in checks:
            outcome = run_check(check, size, ours)
            if outcome.failed:
                return f"contract: {check.id}"
    return ""


def _tests(mutant: Mutant) -> str:
    """Returns the first test of the reference that fails; "" if none does."""
    import pytest

    failed: list[str] = []

    class Listener:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                failed.append(report.nodeid)

    folder = Path(__file__).parent / "unit"
    words = ["-x", "-q", "-n0", "-p", "no:cacheprovider", f"--deselect={_LEFT_OUT}"]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        status = pytest.main([*words, *(str(folder / name) for name in _TESTS)], [Listener()])
    return next(iter(failed), f"pytest ended with {status}") if status else ""


def _try(mutant: Mutant, ask: Callable[[Mutant], str], seconds: int, answer: Any) -> None:
    """Sends what killed a mutant; "" if nothing did. In a process of its own."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    sys.meta_path.insert(0, _Finder(mutant))
    try:
        answer.send(ask(mutant))
    except BaseException as error:
        answer.send(type(error).__name__)


def _killer(mutant: Mutant, ask: Callable[[Mutant], str], seconds: int) -> str:
    """Tries a mutant in a process of its own; returns what killed it, or ""."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_try, args=(mutant, ask, seconds, sender))
    process.start()
    sender.close()
    try:
        # A process that waits takes no CPU time.
        killer: str = receiver.recv() if receiver.poll(10 * seconds) else "no answer in time"
    except EOFError:
        killer = "no answer in time"
    process.kill()
    process.join()
    return killer


def main() -> int:
    """Prints a line for each survivor, and how many were killed by what."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON: how many, and what survived")
    parser.add_argument("--only", default="", help="part of a module's name")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    arguments = parser.parse_args()
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    # Once, for all processes; the package itself each of them imports anew.
    import pytest  # noqa: F401
    import torch
    import torch.fx.experimental.symbolic_shapes  # the first op imports it

    torch.set_num_threads(1)
    tried = [
        mutant
        for module, functions in TARGETS.items()
        if arguments.only in module
        for mutant in mutants(module, functions, _path(root, module).read_text("utf-8"))
    ]
    reasons = {place: reason for reason, places in EQUIVALENT.items() for place in places}
    unchanged = Mutant("tree", "no change", _path(root, "tree").read_text("utf-8"))
    killed_by = dict.fromkeys(tried, "nothing")
    for name, ask, seconds in (("live", _live, _SECONDS_LIVE), ("tests", _tests, _SECONDS_TESTS)):
        if killer := _killer(unchanged, ask, seconds):
            sys.exit(f"the package as it is does not pass: {killer}")
        left = [mutant for mutant, by in killed_by.items() if by == "nothing"]
        if name == "tests":
            left = [mutant for mutant in left if mutant.place not in reasons]
        print(f"{name}: {len(left)} of {len(tried)} mutants", flush=True)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            answers = pool.map(functools.partial(_killer, ask=ask, seconds=seconds), left)
            for mutant, killer in zip(left, answers, strict=True):
                killed_by[mutant] = name if killer else "nothing"
                print(f"{killer or 'not killed'}  {mutant.place}", flush=True)
    from flash_attn_deterministic.verify.shared.files import json_text

    record = _record(killed_by, reasons, root)
    arguments.out.write_text(json_text(record), encoding="utf-8")
    unexplained = record["survivors"].get("", [])
    for place in unexplained:
        print(f"survived, and is not in tests/equivalent_mutants.py: {place}")
    return int(bool(unexplained))


def _record(
    killed_by: Mapping[Mutant, str], reasons: Mapping[str, str], root: Path
) -> dict[str, Any]:
    """Counts by module what killed the mutants, and lists survivors by reason."""
    from flash_attn_build.files import read_tree, tree_sha256
    from flash_attn_deterministic.verify.shared.provenance import provenance

    counts: dict[str, dict[str, int]] = {}
    survivors: dict[str, list[str]] = {}
    for mutant, by in killed_by.items():
        of_module = counts.setdefault(mutant.module, {"live": 0, "tests": 0, "nothing": 0})
        of_module[by] += 1
        if by == "nothing":
            survivors.setdefault(reasons.get(mutant.place, ""), []).append(mutant.place)
    return {
        "schema": "mutants/1",
        **provenance(["python", "-m", "tests.mutants", *sys.argv[1:]], "cpu"),
        "depends_on_kernels": False,
        "reason": "changes the reference, which is Python and runs on the CPU",
        "reference": tree_sha256(read_tree(root, ["reference"])),
        "mutants": len(killed_by),
        "killed_by": counts,
        "survivors": survivors,
    }


def _path(root: Path, module: str) -> Path:
    return root.joinpath(*module.split(".")).with_suffix(".py")


if __name__ == "__main__":
    sys.exit(main())
