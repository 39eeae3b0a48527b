"""The lab as a distribution: it runs without flash-attn-deterministic, and has its version."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LAB = Path(__file__).parents[1]


def test_every_module_imports_without_our_package() -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        "sys.modules['flash_attn_deterministic'] = None\n"
        "import flash_attn_deterministic_lab as lab\n"
        "names = [one.name for one in pkgutil.walk_packages(lab.__path__, lab.__name__ + '.')]\n"
        "assert len(names) > 40, names\n"
        "for name in names:\n"
        "    importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_is_that_of_the_wheel() -> None:
    command = [sys.executable, "setup.py", "--version"]
    done = subprocess.run(command, cwd=LAB, capture_output=True, text=True, check=True)
    text = (LAB.parent / "pyproject.toml").read_text()
    assert done.stdout.split()[-1:] == re.findall(r'^version = "(.+)"$', text, re.MULTILINE)


def test_both_ship_the_same_files() -> None:
    link = LAB / "flash_attn_deterministic_lab" / "shared"
    own = LAB.parent / "python" / "flash_attn_deterministic" / "verify" / "shared"
    assert link.resolve() == own.resolve()
    for path in own.glob("*.py"):
        # Neither may need the other.
        assert not re.search(r"^\s*(from \.\.|import flash_attn)", path.read_text(), re.M), path
