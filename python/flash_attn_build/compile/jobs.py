"""How many CUDA compilations run at once: `python -m flash_attn_build.compile.jobs` prints it."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import SettingError, exit_status
from ..files import ROOT

GIB = 1 << 30
# Compilers of another version need somewhat more or less than the one that was measured.
_ROOM = 1.1


def peak_bytes(root: Path = ROOT) -> int:
    """Memory that one CUDA compilation may need.

    Args:
        root: The source tree, whose docs/results holds the manifests of measured builds.

    Returns:
        The highest peak of a translation unit in those manifests, with room to spare, in bytes.

    Raises:
        SettingError: There is no such manifest.
    """
    results = root / "docs" / "results"
    found = [
        json.loads(path.read_text(encoding="utf-8"))["totals"]["peak_rss_bytes"]
        for path in results.glob("build*.json")
        if path.name != "build_cost_upstream.json"  # of upstream's own files
    ]
    if not found:
        raise SettingError(f"{results}: expected the manifest of a build, build.json; restore it")
    return int(max(found) * _ROOM)


def count(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Number of CUDA compilations that may run at once.

    Args:
        environ: Environment; MAX_JOBS in it, a whole number >= 1, is taken as it is.
        root: Root of the file system whose /proc and /sys are read.

    Returns:
        MAX_JOBS, or the smaller of the usable cores and the compilations that the available
        memory holds; at least 1.

    Raises:
        SettingError: MAX_JOBS is not a whole number >= 1.
    """
    given = environ.get("MAX_JOBS", "").strip()
    if given:
        if not given.isascii() or not given.isdigit() or int(given) < 1:
            raise SettingError(
                f"MAX_JOBS: expected a whole number >= 1, got {given!r}. "
                "Unset it to let the build choose."
            )
        return int(given)
    memory = available_memory(root)
    by_memory = usable_cores(root) if memory is None else memory // peak_bytes()
    return max(1, min(usable_cores(root), by_memory))


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity mask, cut to a container's CPU quota.

    Args:
        root: Root of the file system whose /proc and /sys are read.

    Returns:
        At least 1.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for group in _groups(root, "cpu"):
        quota = _words(group / "cpu.max")  # cgroup 2: "<quota> <period>", or "max <period>"
        if not quota:
            quota = _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        # cgroup 1 says -1 for no limit.
        if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
            cores = min(cores, int(quota[0]) / int(quota[1]))
    return max(1, math.floor(cores))


def available_memory(root: Path = Path("/")) -> int | None:
    """Memory that new processes may take without swapping, in bytes.

    Args:
        root: Root of the file system whose /proc and /sys are read.

    Returns:
        The system's MemAvailable, cut to what each enclosing control group leaves; None if
        the system does not report it.
    """
    left = []
    meminfo = _table(root / "proc/meminfo")
    if "MemAvailable" in meminfo:
        left.append(meminfo["MemAvailable"] * 1024)
    for group in _groups(root, "memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _words(group / limit_name), _words(group / usage_name)
            if limit and usage and limit[0].isdigit():
                # Cached file pages count as used, but the kernel frees them when memory is needed.
                stat = _table(group / "memory.stat")
                cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
                left.append(max(0, int(limit[0]) - int(usage[0]) + cached))
    return min(left) if left else None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those around it, in cgroup 1 and 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        # In a container the path may be the host's; the mount then shows the group itself.
        group = mount / path.lstrip("/")
        while group != mount:
            yield group
            group = group.parent
        yield mount


def _table(path: Path) -> dict[str, int]:
    rows = (line.replace(":", " ").split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _words(path: Path) -> list[str]:
    return _read(path).split()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(exit_status(lambda: print(count())))
