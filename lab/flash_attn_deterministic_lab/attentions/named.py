"""What the tools share that take functions of others: finding one by its name, and its errors."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from ..errors import ArgumentError


def find_callable(name: str, argument: str) -> Any:
    """Imports MODULE:NAME, also from the working directory, or FILE.py:NAME.

    Messages begin with `argument`, as the user calls it.

    Raises:
        ArgumentError: there is none, or it can't be called.
    """
    module, _, attribute = name.partition(":")
    path = Path(module)
    is_file = path.suffix == ".py"
    folder = str(path.parent.resolve() if is_file else Path.cwd())
    if folder not in sys.path:
        # An installed command has its own folder there, and not the one that it runs in.
        sys.path.append(folder)
    try:
        loaded = _of_file(path.resolve()) if is_file else importlib.import_module(module)
        found = getattr(loaded, attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{argument}: expected MODULE:NAME or FILE.py:NAME of a callable, got {name!r}: {error}"
        ) from error
    if not callable(found):
        raise ArgumentError(f"{argument}: expected {name} to be a callable, got {found!r}")
    return found


@functools.cache
def _of_file(path: Path) -> Any:
    """Runs a file once: a model and its batches may be names of the same one."""
    spec = importlib.util.spec_from_file_location(f"file_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"there is no file {path.name} in {path.parent}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def first_line_or_kind(error: BaseException) -> str:
    """Returns the first line of an error's text, without folders: results are published.

    Of an error without words, its kind.
    """
    line = next(iter(str(error).strip().splitlines()), "")
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", line) or type(error).__name__


def kind_and_line(error: BaseException) -> str:
    """Returns both, of at most 300 characters."""
    return f"{type(error).__name__}: {first_line_or_kind(error)}"[:300]
