"""The pin's data file and the patch list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from flash_attn_build.errors import RefusedError
from flash_attn_build.upstream.pin import Pin, load_pin
from upstream_samples import FIRST, NAME, PATCH

SECOND = "0002-second.patch"


def test_the_pin_of_this_project_matches_its_patches() -> None:
    pin = load_pin()
    assert pin.name == NAME
    for path in pin.patch_files():
        intro = path.read_text().partition("\n--- ")[0]
        assert f"{pin.name} {pin.version}" in " ".join(intro.split())


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "x"}', None])
def test_a_file_that_is_no_pin(pin: Pin, text: str | None) -> None:
    pin.path.unlink() if text is None else pin.path.write_text(text)
    with pytest.raises(RefusedError, match=r"upstream\.json: is not a pin .*; restore it"):
        load_pin(pin.path)


PATCHES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: (f / FIRST).unlink(), FIRST),
    "not listed": (lambda f: (f / SECOND).write_text(PATCH), SECOND),
    "changed": (lambda f: (f / FIRST).write_text(PATCH + "\n"), FIRST),
    "another order": (lambda f: (f / FIRST).rename(f / SECOND), f"{FIRST}, {SECOND}"),
}


@pytest.mark.parametrize(("change", "words"), PATCHES.values(), ids=PATCHES)
def test_patches_that_are_not_those_of_the_list(
    pin: Pin, change: Callable[[Path], object], words: str
) -> None:
    change(pin.path.parent / "patches")
    with pytest.raises(RefusedError, match=rf"not those that upstream.json lists \({words}\)"):
        pin.patch_files()
