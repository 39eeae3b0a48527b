"""Archive and pin of the small upstream, for each test its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from flash_attn_build.upstream.pin import Pin
from upstream_samples import SDIST, make_archive, make_pin


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return make_archive(tmp_path / "sdist" / SDIST)


@pytest.fixture
def pin(tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> Pin:
    """A pin with a patch, whose sources come from the archive."""
    monkeypatch.setenv("FLASH_ATTENTION_SOURCE", str(archive))
    return make_pin(tmp_path / "pin", archive)
