from __future__ import annotations

import os
from pathlib import Path

import pytest
from flash_attn_build.compile import jobs
from flash_attn_build.errors import BuildError
from flash_attn_build.files import write_text


def memory(gib: float) -> dict[str, str]:
    text = f"MemTotal: 99999999 kB\nMemAvailable: {int(gib * (1 << 20))} kB\n"
    return {"proc/meminfo": text}


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


@pytest.mark.parametrize("given", ["0", "-1", "x", "1.5", "²"])
def test_max_jobs_must_be_a_positive_whole_number(given: str) -> None:
    with pytest.raises(BuildError, match=r"MAX_JOBS: expected a whole number >= 1, got"):
        jobs.count({"MAX_JOBS": given})


BOX = {
    "proc/self/cgroup": "0::/box/inner\n",
    "sys/fs/cgroup/box/memory.max": str(22 * jobs.GIB),
    "sys/fs/cgroup/box/memory.current": str(4 * jobs.GIB),
    "sys/fs/cgroup/box/memory.stat": f"anon 1\ninactive_file {jobs.GIB}\n",
    "sys/fs/cgroup/box/inner/memory.max": "max",
    "sys/fs/cgroup/box/inner/memory.current": "1",
}


@pytest.mark.parametrize(
    ("given", "contents", "expected"),
    [
        pytest.param("64", memory(1), 64, id="MAX_JOBS alone decides"),
        pytest.param("", memory(1000), 16, id="cores decide"),
        pytest.param("", memory(5 * jobs.UNIT_BYTES / jobs.GIB + 0.1), 5, id="memory decides"),
        pytest.param("", memory(0.1), 1, id="never none"),
        pytest.param("", {}, 16, id="memory unknown"),
        pytest.param("", memory(100) | BOX, 3, id="a container's memory"),  # 22 - 4 + 1 GiB
        pytest.param(
            "", memory(100) | BOX | {"sys/fs/cgroup/box/cpu.max": "250000 100000"}, 2,
            id="a container's cores",
        ),
        pytest.param(
            "", {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "max 100000"}, 16,
            id="a container without limits",
        ),
    ],
)  # fmt: skip
def test_cores_and_available_memory_decide(
    tmp_path: Path, given: str, contents: dict[str, str], expected: int
) -> None:
    for name, text in contents.items():
        write_text(tmp_path / name, text)
    assert jobs.count({"MAX_JOBS": given}, tmp_path) == expected
