from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import fake_wheel
import pytest
from flash_attn_build import files
from flash_attn_build.compile import manifest


def unit(output: str, *flags: str) -> dict[str, Any]:
    return {
        "output": output,
        "wall_seconds": 2.5,
        "command": ["/opt/cuda/bin/nvcc", *flags, "-c", "/src/x", "-o", output],
    }


UNITS = [
    unit("a.cu.o", "-O3", "-I/src/build/up", "-I/src/cpp", "-frandom-seed=a"),
    unit("b.cu.o", "-O3", "-I/src/build/up", "-I/src/cpp", "-frandom-seed=b"),
    unit("c.cpp.o", "-O2", "-MF", "c.d"),
]


def test_describes_the_wheel(tmp_path: Path) -> None:
    wheel = fake_wheel.pack(tmp_path, {"x": b"y"})
    places = {"/src": ".", "/src/build": "build"}
    cost = {"cpu_seconds": 31.75, "peak_rss_bytes": 900}
    text = manifest.describe(
        wheel, fake_wheel.INFO, UNITS, {"preset": "dev"}, {"cmake": "4"}, places, cost
    )
    data = wheel.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    assert text["wheel"] == {"name": wheel.name, "sha256": sha256, "bytes": len(data)}
    for key in ("upstream", "instances", "sources", "bits_version"):
        assert text[key] == fake_wheel.INFO[key]
    assert text["build"] == {"preset": "dev"}
    assert text["translation_units"] == [
        {"output": name, "wall_seconds": 2.5} for name in ("a.cu.o", "b.cu.o", "c.cpp.o")
    ]
    assert text["totals"] == {"translation_units": 3, **cost}
    assert text["flags"] == {"cuda": ["-O3", "-Ibuild/up", "-I./cpp"], "cxx": ["-O2"]}
    assert json.loads(json.dumps(text)) == text


def test_flags_of_each_target() -> None:
    kernels, ops = "CMakeFiles/kernels.dir/a.cpp.o", "CMakeFiles/ops.dir/cpp/a.cpp.o"
    assert manifest.flags([unit(kernels, "-O2"), unit(ops, "-fPIC")], {}) == {
        "kernels cxx": ["-O2"],
        "ops cxx": ["-fPIC"],
    }
    assert manifest.flags([], {}) == {}


def test_tool_versions_leave_out_what_is_not_installed() -> None:
    versions = manifest.tool_versions("13.0.88", ("/bin/echo", "g++"))
    assert versions["nvcc"] == "13.0.88"
    assert versions["g++"] == "--version"  # said by echo, run as a launcher would be
    assert {"auditwheel", "torch", "python"} <= set(versions)
    assert "colorama" not in versions
    assert all(versions.values())


def test_the_machine_is_named_with_its_image() -> None:
    found = manifest.machine({"ImageOS": "ubuntu24", "ImageVersion": "20261115.1.0"})
    assert found["image"] == "ubuntu24 20261115.1.0"
    assert manifest.machine({}) == {"system": found["system"], "image": ""}
    assert found["system"]


def test_a_list_of_locked_tools_that_is_empty(tmp_path: Path) -> None:
    files.write_text(tmp_path / "locks" / "build.txt", "# nothing\n")
    with pytest.raises(LookupError, match=r"locks/build\.txt: names no version"):
        list(manifest.locked("13.0.88", tmp_path))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "m.json"
    files.write_json(path, {"old": 1})
    assert path.stat().st_mode & 0o777 == 0o644

    def fail(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}
    assert list(path.parent.iterdir()) == [path]
