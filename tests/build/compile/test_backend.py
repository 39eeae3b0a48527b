from __future__ import annotations

from pathlib import Path

import pytest
from flash_attn_build import backend
from flash_attn_build.compile import build
from flash_attn_build.errors import BuildError
from flash_attn_build.files import ROOT


def test_frontends_get_the_wheel_of_nox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def make(request: build.Request) -> Path:
        asked.append(request)
        return request.out_dir / "a.whl"

    monkeypatch.setattr(backend, "build", make)
    assert backend.build_wheel(str(tmp_path), {"args": "--preset dev --local cu12"}) == "a.whl"
    assert backend.build_wheel(str(tmp_path), {"args": ["--preset dev", "--local cu12"]}) == "a.whl"
    expected = build.Request("dev", tmp_path, ROOT / "build/dev", local="cu12")
    assert asked == [expected, expected]


def test_settings_of_another_backend_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"expected args=.* got {'cmake.define.A': '1'}"):
        backend.build_wheel(str(tmp_path), {"args": "", "cmake.define.A": "1"})
