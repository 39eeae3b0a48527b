from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import flash_attn_deterministic
import pytest
import torch
from flash_attn_deterministic import build_info as record
from flash_attn_deterministic import lab
from flash_attn_deterministic.__main__ import _COMMANDS, main
from flash_attn_deterministic.build_info import Instance, build_info
from flash_attn_deterministic.checks import kernels
from flash_attn_deterministic.info import collect as info
from flash_attn_deterministic.ops import library


@pytest.mark.parametrize(
    ("toolkit", "floor"),
    [("13.0.88", 580), ("13.2", 580), ("12.8.93", 525), ("11.8", 450), ("14.0", None), ("", None)],
)
def test_driver_floor(toolkit: str, floor: int | None) -> None:
    assert info.driver_floor(toolkit) == floor


def test_a_source_tree_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    first = info.collect().text().splitlines()[0]
    assert first == "flash-attn-deterministic  not installed; this is a source tree"


def test_collects_the_wheels_own_record() -> None:
    collected = info.collect()
    built = build_info()
    assert collected.upstream == built.upstream
    assert collected.architectures == built.architectures
    assert collected.torch_floor == built.torch_target
    assert collected.torch_version == torch.__version__


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    built = replace(build_info(), architectures=("80-real", "90-real"))
    monkeypatch.setattr(kernels, "build_info", lambda: built)
    kernels.device_problem.cache_clear()
    yield
    kernels.device_problem.cache_clear()


@pytest.mark.usefixtures("two_gpus")
def test_devices_report_whether_they_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "kernels_missing", "")
    good, old = info.collect().devices
    assert (good.name, good.capability, good.runs, good.reason) == ("GPU 0", "9.0", True, "")
    assert not old.runs
    assert "compute capability 7.5; this wheel holds code for 80-real, 90-real" in old.reason
    text = info.collect().text()
    assert "cuda:0 GPU 0, compute capability 9.0: can run\n" in text
    assert "cuda:1 GPU 1, compute capability 7.5: cannot run: " in text


@pytest.mark.usefixtures("two_gpus")
def test_devices_cannot_run_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "kernels_missing", "the wheel holds no kernels")
    assert {(d.runs, d.reason) for d in info.collect().devices} == {
        (False, "the wheel holds no kernels")
    }


def test_kernels_of_another_family_are_listed_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    instances = (
        Instance("fwd", "bf16", 64),
        Instance("fwd", "bf16", 64, "sm90"),
        Instance("fwd", "bf16", 128, "sm90"),
    )
    built = replace(build_info(), instances=instances)
    monkeypatch.setattr(info, "build_info", lambda: built)
    assert info.collect().instances == {"fwd": {"bf16": [64]}, "fwd sm90": {"bf16": [64, 128]}}


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("architectures", "slower"),
    [
        pytest.param(("80-real", "90-real"), True, id="without-90a"),
        pytest.param(("80-real", "90-real", "90a-real"), False, id="with-90a"),
    ],
)
def test_note_for_a_hopper_gpu_without_its_kernels(
    architectures: tuple[str, ...], slower: bool
) -> None:
    collected = replace(info.collect(), architectures=architectures)
    assert ("this wheel holds no 90a-real" in collected.text()) is slower


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    collected = info.collect()
    assert collected.devices == ()
    assert "no CUDA device" in collected.text()


def test_unknown_toolkit_is_called_unknown() -> None:
    collected = replace(info.collect(), driver_floor=None)
    assert "Linux driver unknown" in collected.text()


def test_command_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for fact in ("2.8.3.post2", build_info().cuda_toolkit, *build_info().architectures):
        assert fact in printed


def test_command_prints_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flash_attn_deterministic", "info", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found == json.loads(info.collect().json())
    assert set(found["mode"]) == {"enabled", "split_size", "keep_residual"}


def test_command_reports_a_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "_PATH", tmp_path / "_build_info.json")
    monkeypatch.setattr(info, "build_info", build_info.__wrapped__)
    assert main(["info"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: " in captured.err
    assert "nox -s build" in captured.err


@pytest.mark.parametrize(
    "argv", [[], ["unknown"], ["info", "--yaml"]], ids=["nothing", "command", "option"]
)
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: flash-attn-deterministic" in capsys.readouterr().err


def _options(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, str | None]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _options(inner, f"{path} {name}")
        else:
            yield f"{path} {'/'.join(action.option_strings) or action.dest}", action.help


def test_every_option_has_help() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for name in _COMMANDS:
        importlib.import_module(f"flash_attn_deterministic.{name}").add_command(commands)
    lab.add_commands(commands)
    options = dict(_options(parser))
    assert len(options) > 40
    assert [name for name, text in options.items() if not text] == []


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'flash_attn_fun'"):
        _ = flash_attn_deterministic.flash_attn_fun
