"""Makes the build's tools importable, and only those.

The folder they live in also holds the sources of the shipped package. With that folder on the
path, tests would import the sources instead of the installed wheel.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.junitxml import xml_key

ROOT = Path(__file__).resolve().parents[1]
# pytest's names of -m, -k, --deselect, --lf, --sw, --ignore and --ignore-glob.
_LEAVE_OUT = ("markexpr", "keyword", "deselect", "lf", "stepwise", "ignore", "ignore_glob")


def _load_tools() -> None:
    folder = ROOT / "python" / "flash_attn_build"
    spec = importlib.util.spec_from_file_location(
        "flash_attn_build", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


if "flash_attn_build" not in sys.modules:
    _load_tools()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests of a built wheel where none is named."""
    if not os.environ.get("FLASH_ATTN_WHEEL"):
        skip = pytest.mark.skip(reason="FLASH_ATTN_WHEEL names no wheel; `nox -s test` builds one")
        for item in items:
            if item.get_closest_marker("build"):
                item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    _write_collected(session.config, len(session.items))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    _write_collected(node.config, len(ids))


def _write_collected(config: pytest.Config, number: int) -> None:
    """Writes into JUnit's file how many tests there are: an interrupted run has fewer results.

    No number stands for a run whose options leave out tests.
    """
    options = [name for name in _LEAVE_OUT if config.getoption(name, None)]
    words = f"not all, by {', '.join(options)}" if options else str(number)
    xml, named = config.stash.get(xml_key, None), ("collected", words)
    if xml and named not in xml.global_properties:  # no worker has it, and each collects the same
        xml.add_global_property(*named)
