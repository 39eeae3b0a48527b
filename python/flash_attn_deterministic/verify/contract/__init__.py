"""The contract: what the bits of a row must not depend on. One list of checks, for all devices.

Each check draws named cases, runs the package's functions in several ways, and compares integer
views of the results. A check sees attention through `Attention` alone, so that tests can put a
broken one in its place.
"""

from __future__ import annotations

from .call import Attention
from .check import Check, Outcome, run_check
from .checks import CHECKS
from .sizes import Size, size_of

__all__ = ["CHECKS", "Attention", "Check", "Outcome", "Size", "run_check", "size_of"]
