"""The environment variables of the package, by what they set; docs/api.md has the table.

Of several names for one thing, the first that is set counts; FA2_ is the old prefix. The library
itself reads FLASH_ATTENTION_FAMILY and FLASH_ATTENTION_TEST_DEVICE.
"""

from __future__ import annotations

from collections.abc import Mapping

ENABLED = ("FLASH_ATTENTION_DETERMINISTIC", "FA2_DETERMINISTIC")
SPLIT_SIZE = ("FLASH_ATTENTION_SPLIT_SIZE", "FA2_SPLIT_SIZE")
REPAIR_VLLM_NORM = ("FLASH_ATTENTION_REPAIR_VLLM_NORM", "FA2_REPAIR_VLLM_NORM")


def read(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    """Returns name and value of the first variable that is set; "" counts as unset."""
    values = ((name, environ.get(name, "").strip()) for name in names)
    return next(((name, text) for name, text in values if text), (names[0], ""))
