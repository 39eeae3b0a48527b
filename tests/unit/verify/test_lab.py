"""Commands of flash-attn-deterministic-lab, where it is installed and where it is not."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

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
    assert "run `python -m pip install flash-attn-deterministic[lab]`" in error


def test_verify_hands_other_attention_to_the_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_command(commands: Any) -> None:
        parser = commands.add_parser("scoreboard")
        for name in ("attention", "device", "out", "seconds"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--quick", action="store_true")
        parser.set_defaults(run=run)

    def run(arguments: Any) -> int:
        seen.update(vars(arguments))
        return 3

    seen: dict[str, Any] = {}
    monkeypatch.setattr(EntryPoint, "load", lambda entry: add_command)
    entry = EntryPoint("scoreboard", "lab:add_command", "flash_attn_deterministic.commands")
    monkeypatch.setattr(lab, "entry_points", lambda group: [entry] if "commands" in group else [])
    arguments = ["verify", "--attention", "fa3,my:f", "--device", "cpu", "--seconds", "5"]
    assert main([*arguments, "--quick", "--out", str(tmp_path)]) == 3
    assert (seen["attention"], seen["device"], seen["quick"]) == ("fa3,my:f", "cpu", True)
    assert (seen["seconds"], seen["out"]) == ("5.0", str(tmp_path))
