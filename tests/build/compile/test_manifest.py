from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from flash_attn_build import files
from flash_attn_build.compile import manifest


def unit(output: str, *flags: str) -> dict[str, Any]:
    return {
        "output": output,
        "command": ["/opt/cuda/bin/nvcc", *flags, "-c", "/src/x", "-o", output],
    }


def test_flags_are_what_the_units_of_a_target_and_language_share() -> None:
    """And not what names an input, an output or a folder of this machine."""
    kernels, ops = "CMakeFiles/kernels.dir/a.cpp.o", "CMakeFiles/ops.dir/cpp/a.cpp.o"
    units = [
        unit("a.cu.o", "-O3", "-I/src/build/up", "-I/src/cpp", "-frandom-seed=a"),
        unit("b.cu.o", "-O3", "-I/src/build/up", "-I/src/cpp", "-frandom-seed=b"),
        unit(kernels, "-O2", "-MF", "c.d"),
        unit(ops, "-fPIC"),
    ]
    assert manifest.flags(units, {"/src": ".", "/src/build": "build"}) == {
        "cuda": ["-O3", "-Ibuild/up", "-I./cpp"], "kernels cxx": ["-O2"], "ops cxx": ["-fPIC"]
    }  # fmt: skip
    assert manifest.flags([], {}) == {}


def test_tool_versions_leave_out_what_is_not_installed() -> None:
    versions = manifest.tool_versions("13.0.88", ("/bin/echo", "g++"))
    assert versions["nvcc"] == "13.0.88"
    assert versions["g++"] == "--version"  # said by echo, run as a launcher would be
    assert {"auditwheel", "torch", "python"} <= set(versions)
    assert "colorama" not in versions
    assert all(versions.values())


def test_a_list_of_locked_tools_that_is_empty(tmp_path: Path) -> None:
    files.write_text(tmp_path / "locks" / "build.txt", "# nothing\n")
    with pytest.raises(LookupError, match=r"locks/build\.txt: names no version"):
        list(manifest.locked("13.0.88", tmp_path))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "m.json"
    files.write_json(path, {"old": 1})

    def fail(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}
    assert list(path.parent.iterdir()) == [path]
