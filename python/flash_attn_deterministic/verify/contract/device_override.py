"""Lets the library plan for another GPU than the one at hand (docs/adr/0014)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "FLASH_ATTENTION_TEST_DEVICE"  # the library reads it in each call


@contextmanager
def device_override(settings: str) -> Iterator[None]:
    """Within the block, all plans of the process are made for other hardware, or for one path.

    Args:
        settings: such as "sms=1,shared=101376" (multiprocessors, bytes of shared memory that a
            thread block may ask for), "path=parts" (the path, wherever kernels can take it) or
            "heads=8" (whose key blocks a backward in turns works on side by side).
    """
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = settings
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
