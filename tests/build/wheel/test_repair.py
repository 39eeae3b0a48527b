from __future__ import annotations

import hashlib
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import fake_wheel
import pytest
from flash_attn_build.errors import BuildError, RefusedError
from flash_attn_build.wheel import check, repair

LINUX = "py3-none-linux_x86_64"


def test_two_builds_at_two_times_and_places_give_the_same_bytes(tmp_path: Path) -> None:
    binary = fake_wheel.library(tmp_path / "library")
    files = fake_wheel.plain(binary)
    digests = set()
    for place, umask, order in (("one", 0o022, 1), ("two/deeper", 0o007, -1)):
        before = os.umask(umask)
        try:
            ordered = dict(list(files.items())[::order])
            wheel = fake_wheel.pack(tmp_path / place, ordered, LINUX)
            made = repair.repair(wheel, tmp_path / place / "out", fake_wheel.COMPONENTS, 1700000000)
        finally:
            os.umask(before)
        check.check(made)
        digests.add(hashlib.sha256(made.read_bytes()).hexdigest())
    assert len(digests) == 1
    with zipfile.ZipFile(made) as archive:
        dates = {info.date_time for info in archive.infolist()}
    assert dates == {tuple(time.gmtime(1700000000))[:6]}


ELSEWHERE = {"needed": ["torch_cpu", "torch_cuda", "elsewhere"]}


@pytest.mark.parametrize(("arguments", "expected"), [
    (ELSEWHERE, "could not be located"),
    (ELSEWHERE, "NotImplementedError"),
    # What start-up code of a current glibc is bound to.
    ({"calls": ["__libc_start_main"], "needed": []}, "GLIBC_2.34"),
], ids=["library", "library that could be copied in", "glibc"])  # fmt: skip
def test_what_the_platform_does_not_allow_is_refused(
    tmp_path: Path,
    arguments: dict[str, Any],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    binary = fake_wheel.library(tmp_path / "library", **arguments)
    if expected == "NotImplementedError":
        monkeypatch.setenv("AUDITWHEEL_LD_LIBRARY_PATH", str(tmp_path / "library"))
    wheel = fake_wheel.pack(tmp_path, fake_wheel.contents(binary, LINUX), LINUX)
    with pytest.raises(BuildError, match="auditwheel refuses"):
        repair.repair(wheel, tmp_path / "out", fake_wheel.COMPONENTS, 0)
    assert not list(tmp_path.glob("out/*.whl"))
    assert expected in "".join(capfd.readouterr())


def test_a_foreign_wheel_is_refused(tmp_path: Path) -> None:
    wheel = fake_wheel.pack(tmp_path, {"a.py": b"", "a-1.dist-info/WHEEL": b""}, LINUX)
    with pytest.raises(RefusedError, match=r"_build_info\.json and .*_C\.so missing"):
        repair.repair(wheel, tmp_path / "out", fake_wheel.COMPONENTS, 0)
