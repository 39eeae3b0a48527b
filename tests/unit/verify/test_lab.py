"""Commands of flash-attn-deterministic-lab, where it is installed and where it is not."""

from __future__ import annotations

import pytest
from flash_attn_deterministic import lab
from flash_attn_deterministic.__main__ import main


@pytest.mark.parametrize("command", ["bench", "scoreboard", "deviation"])
def test_without_the_lab_a_line_says_what_to_install(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab, "entry_points", lambda group: [])
    assert main([command, "--device", "cpu"]) == 6
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{command} is in the package flash-attn-deterministic-lab, which is not" in error
    assert "in a clone: python -m pip install ./lab" in error
