# ruff: noqa: E501 -- tables
"""Writes docs/api.md from signatures and docstrings, without importing the package.

python -m tests.api [--check]
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "flash_attn_deterministic"
PAGE = ROOT / "docs" / "api.md"
# Title, the name before each function, and where its public names are defined.
PARTS = (
    ("Attention", "", ("interface/dense.py", "interface/varlen.py", "interface/kvcache.py")),
    ("The mode", "", ("mode.py",)),
    ("The plan of a call", "", ("plan.py",)),
    ("In the place of flash_attn", "", ("integrations/alias.py",)),
    ("Several ranks", "distributed.", ("distributed/api.py",)),
    ("Exceptions", "", ("errors.py",)),
)
PREFACES = {
    "The mode": """\
| | mode on | mode off |
|---|---|---|
| forward | the order of additions of `split_size`, whatever the schedule | the fastest order for shape and GPU |
| backward, `deterministic` None or False | a fixed order | atomic additions; under `torch.use_deterministic_algorithms` a fixed order |
| `deterministic=True` | a fixed order | a fixed order |
| `deterministic="never"` | atomic additions | the same; both raise under `torch.use_deterministic_algorithms`, on CUDA (the CPU adds nothing atomically) |

| variable | value | meaning |
|---|---|---|
| `FLASH_ATTENTION_DETERMINISTIC`, `FA2_DETERMINISTIC` | 1, true, yes, on or 0, false, no, off | whether the mode is on when a process starts; of two the first counts |
| `FLASH_ATTENTION_SPLIT_SIZE`, `FA2_SPLIT_SIZE` | tokens, 0: one split | its split size |
| `FLASH_ATTENTION_FAMILY` | sm80 or sm90 | which kernels run where both can; read in each call on a GPU, checked when a process starts |
| `FLASH_ATTENTION_REPAIR_VLLM_NORM`, `FA2_REPAIR_VLLM_NORM` | the same | whether vLLM's plugin repairs [its norm](integrations.md#the-norm-of-vllms-batch-invariant-mode) |
| `FLASH_ATTENTION_RANK_CHECKS` | first, always or off | when ranks compare their calls: [distributed](distributed.md#errors) |
| `FLASH_ATTENTION_TEST_DEVICE` | `sms=132,shared=232448,path=parts,family=sm80,heads=8`, any of these | for tests: plans as if the CUDA GPU at hand had so many multiprocessors and so many bytes of shared memory a block, or with a path (one_cta, parts, few_rows, scores_first), family, or heads in flight. The compute capability stays: plans of Hopper's kernels need a Hopper GPU, and without a GPU there are none |"""
}
Definition = ast.FunctionDef | ast.ClassDef


def public() -> set[str]:
    """The names in __all__ of the package."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise ValueError("__init__.py: expected __all__")


def definitions(file: str) -> Iterator[Definition]:
    """The public functions and classes of a module, in order."""
    names = public()
    for node in ast.parse((PACKAGE / file).read_text()).body:
        if isinstance(node, Definition) and node.name in names:
            yield node


def signature(node: Definition, prefix: str) -> str:
    """A function as it is called, or a class with its bases."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    arguments = node.args
    pairs: list[str] = []
    defaults: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
    for argument, default in zip(arguments.args, [*defaults, *arguments.defaults], strict=True):
        pairs.append(_parameter(argument, default))
    if arguments.vararg:
        pairs.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        pairs.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        pairs.append(_parameter(argument, default))
    if arguments.kwarg:
        pairs.append(f"**{arguments.kwarg.arg}")
    lines = "".join(f"    {pair},\n" for pair in pairs)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{prefix}{node.name}(\n{lines}){returns}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    return argument.arg + kind + (f" = {ast.unparse(default)}" if default is not None else "")


def page() -> str:
    """The whole page."""
    parts = [
        "# API\n\nGenerated from the docstrings by `python -m tests.api`; "
        "`import flash_attn_deterministic` gives all names."
    ]
    for title, prefix, files in PARTS:
        parts += [f"## {title}", *([PREFACES[title]] if title in PREFACES else [])]
        if title == "Exceptions":
            errors = ast.parse((PACKAGE / "errors.py").read_text())
            parts.append(f"```\n{ast.get_docstring(errors)}\n```")
        for node in (node for file in files for node in definitions(file)):
            text = inspect.cleandoc(ast.get_docstring(node) or "")
            parts.append(
                f"### {prefix}{node.name}\n\n```\n{signature(node, prefix)}\n\n{text}\n```"
            )
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Writes or checks the page."""
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        print("docs/api.md: not as the docstrings are; run `python -m tests.api`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
