"""What tests of torch's inductor want of a machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

HAS_HEADERS = pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="inductor compiles with Python's headers, which this machine lacks",
)
