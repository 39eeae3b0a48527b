"""The example scripts run, and keep what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_a_whole_model_keeps_its_bits() -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, str(EXAMPLES / "whole_model.py"), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, ours = done.stdout.splitlines()
    assert ours.startswith("flash_attn_deterministic, products and norms in blocks")
    assert ours.count("same bits") == 3
