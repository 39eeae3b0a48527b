"""How many CUDA compilations run at once: `python -m flash_attn_build.compile.jobs` prints it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from ..errors import BuildError, exit_status

GIB = 1 << 30
UNIT_BYTES = 6 * GIB  # the largest translation unit takes 5.1


def count(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """MAX_JOBS, or as many as usable cores and free memory hold, at least 1.

    Both are cut to the limits of a container (cgroup v2). `root`: whose /proc and /sys are read.
    """
    given = environ.get("MAX_JOBS", "").strip()
    if not given:
        return max(1, min(_cores(root), _memory(root) // UNIT_BYTES))
    if not re.fullmatch(r"0*[1-9][0-9]*", given):
        raise BuildError(
            f"MAX_JOBS: expected a whole number >= 1, got {given!r}. "
            "Unset it to let the build choose."
        )
    return int(given)


def _cores(root: Path) -> int:
    cores = len(os.sched_getaffinity(0))
    for group in _groups(root):
        quota, _, period = _read(group / "cpu.max").partition(" ")  # or "max <period>"
        if quota.isdigit():
            cores = min(cores, int(quota) // int(period))
    return cores


def _memory(root: Path) -> int:
    found = re.search(r"^MemAvailable: +(\d+)", _read(root / "proc/meminfo"), re.MULTILINE)
    left = int(found[1]) * 1024 if found else sys.maxsize
    for group in _groups(root):
        limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current")
        if limit.isdigit() and used:
            # Cached file pages count as used, but the kernel frees them when memory is needed.
            cached = re.search(r"^inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE)
            left = min(left, int(limit) - int(used) + (int(cached[1]) if cached else 0))
    return left


def _groups(root: Path) -> list[Path]:
    """Folders of this process's control group and of those around it."""
    mount = root / "sys/fs/cgroup"
    own = re.search(r"^0::/(.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE)
    group = mount / (own[1] if own else "")
    return [group, *(above for above in group.parents if mount in (above, *above.parents))]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(exit_status(lambda: print(count())))
