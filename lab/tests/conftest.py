"""Ignores what torch 2.11 says of itself: its compiler imports a module of scripts."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    ignored = "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
    config.addinivalue_line("filterwarnings", ignored)
