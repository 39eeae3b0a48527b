from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flash_attn_build import files
from flash_attn_build.compile import jobs
from flash_attn_build.errors import SettingError


def system(root: Path, **contents: str) -> Path:
    for name, text in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def memory(gib: float) -> str:
    return f"MemTotal: 99999999 kB\nMemAvailable: {int(gib * (1 << 20))} kB\n"


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


@pytest.mark.parametrize("given", ["0", "-1", "x", "1.5", "²"])
def test_max_jobs_must_be_a_positive_whole_number(given: str) -> None:
    with pytest.raises(SettingError, match=r"MAX_JOBS: expected a whole number >= 1, got"):
        jobs.count({"MAX_JOBS": given})


def test_max_jobs_alone_decides(tmp_path: Path) -> None:
    assert jobs.count({"MAX_JOBS": "64"}, system(tmp_path, proc__meminfo=memory(1))) == 64


@pytest.mark.parametrize(
    ("gib", "expected"),
    [
        pytest.param(1000, 16, id="cores decide"),
        pytest.param(5 * jobs.peak_bytes() / jobs.GIB + 0.1, 5, id="memory decides"),
        pytest.param(0.1, 1, id="never none"),
    ],
)
def test_cores_and_available_memory_decide(tmp_path: Path, gib: float, expected: int) -> None:
    assert jobs.count({"MAX_JOBS": ""}, system(tmp_path, proc__meminfo=memory(gib))) == expected


def test_a_system_that_does_not_tell_its_memory_uses_its_cores(tmp_path: Path) -> None:
    assert jobs.count({}, tmp_path) == 16


@pytest.mark.parametrize(
    "contents",
    [
        pytest.param(
            {
                "proc__self__cgroup": "0::/box/inner\n",
                "sys__fs__cgroup__box__memory.max": str(8 * jobs.GIB),
                "sys__fs__cgroup__box__memory.current": str(4 * jobs.GIB),
                "sys__fs__cgroup__box__memory.stat": f"anon 1\ninactive_file {jobs.GIB}\n",
                "sys__fs__cgroup__box__inner__memory.max": "max",
                "sys__fs__cgroup__box__inner__memory.current": "1",
            },
            id="version 2, limit on an enclosing group",
        ),
        pytest.param(
            {
                "proc__self__cgroup": "7:cpu,cpuacct:/\n4:memory:/host/path\n0::/\n",
                "sys__fs__cgroup__memory__memory.limit_in_bytes": str(8 * jobs.GIB),
                "sys__fs__cgroup__memory__memory.usage_in_bytes": str(4 * jobs.GIB),
                "sys__fs__cgroup__memory__memory.stat": f"total_inactive_file {jobs.GIB}\n",
            },
            id="version 1, mounted at the group",
        ),
    ],
)
def test_a_container_limit_counts_less_what_it_uses_but_for_its_cache(
    tmp_path: Path, contents: dict[str, str]
) -> None:
    root = system(tmp_path, proc__meminfo=memory(100), **contents)
    assert jobs.available_memory(root) == 5 * jobs.GIB


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        pytest.param(
            {"proc__self__cgroup": "0::/a", "sys__fs__cgroup__a__cpu.max": "250000 100000"},
            2,
            id="version 2",
        ),
        pytest.param(
            {"proc__self__cgroup": "0::/a", "sys__fs__cgroup__a__cpu.max": "max 100000"},
            16,
            id="version 2, no limit",
        ),
        pytest.param(
            {
                "proc__self__cgroup": "3:cpu,cpuacct:/",
                "sys__fs__cgroup__cpu,cpuacct__cpu.cfs_quota_us": "50000",
                "sys__fs__cgroup__cpu,cpuacct__cpu.cfs_period_us": "100000",
            },
            1,
            id="version 1, less than a core",
        ),
        pytest.param(
            {
                "proc__self__cgroup": "3:cpu,cpuacct:/",
                "sys__fs__cgroup__cpu,cpuacct__cpu.cfs_quota_us": "-1",
                "sys__fs__cgroup__cpu,cpuacct__cpu.cfs_period_us": "100000",
            },
            16,
            id="version 1, no limit",
        ),
    ],
)
def test_cpu_quota_cuts_the_cores(tmp_path: Path, contents: dict[str, str], expected: int) -> None:
    assert jobs.usable_cores(system(tmp_path, **contents)) == expected


def command(given: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(files.ROOT / "python"), "MAX_JOBS": given}
    command = [sys.executable, "-m", "flash_attn_build.compile.jobs"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)


def test_command_prints_one_number() -> None:
    done = command("3")
    assert (done.returncode, done.stdout) == (0, "3\n")


def test_command_fails_on_a_bad_setting() -> None:
    done = command("many")
    assert (done.returncode, done.stdout) == (SettingError.exit_code, "")
    assert "MAX_JOBS" in done.stderr


def test_memory_for_a_job_covers_every_build_that_was_measured() -> None:
    root = Path(__file__).resolve().parents[2]
    peaks = [
        unit["peak_rss_bytes"]
        for path in (root / "docs" / "results").glob("build*.json")
        for unit in json.loads(path.read_text())["translation_units"]
        if path.name != "build_cost_upstream.json"
    ]
    assert len(peaks) > 40
    assert max(peaks) < jobs.peak_bytes() < 1.25 * max(peaks)


def test_without_a_measured_build_nothing_is_guessed(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"expected the manifest of a build"):
        jobs.peak_bytes(tmp_path)
