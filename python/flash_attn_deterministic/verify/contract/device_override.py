"""Lets the library plan for another GPU than the one at hand (docs/adr/0014)."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ..shared.commands import variable


def device_override(settings: str) -> AbstractContextManager[None]:
    """Within the block, all plans of the process are made for other hardware, or for one path.

    Settings are such as "sms=1,shared=101376" (multiprocessors, bytes of shared memory of a thread
    block), "path=parts" (wherever kernels can take it) or "heads=8" (whose key blocks a backward in
    turns works on side by side).
    """
    return variable("FLASH_ATTENTION_TEST_DEVICE", settings)  # the library reads it in each call
