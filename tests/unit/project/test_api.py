"""The API page is made of the docstrings."""

from __future__ import annotations

import flash_attn_deterministic as package
import pytest

from tests import api


@pytest.mark.parametrize("name", package.__all__)
def test_every_public_name_is_on_the_page(name: str) -> None:
    assert f"\n### {name}\n" in api.page()
