"""The environment variables of the package, by what they set; docs/api.md has the table.

Of several names for one thing, the first that is set counts; FA2_ is the old prefix. The library
itself reads FLASH_ATTENTION_FAMILY and FLASH_ATTENTION_TEST_DEVICE.
"""

from __future__ import annotations

from collections.abc import Mapping

from .checks.describe import shown
from .errors import ArgumentError
from .schemas import FAMILIES

ENABLED = ("FLASH_ATTENTION_DETERMINISTIC", "FA2_DETERMINISTIC")
SPLIT_SIZE = ("FLASH_ATTENTION_SPLIT_SIZE", "FA2_SPLIT_SIZE")
REPAIR_VLLM_NORM = ("FLASH_ATTENTION_REPAIR_VLLM_NORM", "FA2_REPAIR_VLLM_NORM")
FAMILY = "FLASH_ATTENTION_FAMILY"
_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def read(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    """Returns name and value of the first variable that is set; "" counts as unset."""
    values = ((name, environ.get(name, "").strip()) for name in names)
    return next(((name, text) for name, text in values if text), (names[0], ""))


def read_flag(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, bool | None]:
    """Returns name and value of a flag; None: unset.

    Raises:
        ArgumentError: another word.
    """
    name, text = read(environ, names)
    if text and text.lower() not in _WORDS:
        raise ArgumentError(f"{name}: expected one of {', '.join(_WORDS)}, got {shown(text)}")
    return name, _WORDS.get(text.lower())


def check_family(environ: Mapping[str, str]) -> None:
    """Checks FLASH_ATTENTION_FAMILY, which the library reads for calls on a GPU alone.

    Raises:
        ArgumentError: another word.
    """
    family = environ.get(FAMILY, FAMILIES[0])
    if family not in FAMILIES:
        raise ArgumentError(f"{FAMILY}: expected {' or '.join(FAMILIES)}, got {shown(family)}")
