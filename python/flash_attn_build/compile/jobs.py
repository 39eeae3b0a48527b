"""How many CUDA compilations run at once: `python -m flash_attn_build.compile.jobs` prints it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from ..errors import SettingError, exit_status

GIB = 1 << 30
UNIT_BYTES = 6 * GIB  # the largest translation unit takes 5.1


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
    if not given:
        return max(1, min(usable_cores(root), available_memory(root) // UNIT_BYTES))
    if not re.fullmatch(r"0*[1-9][0-9]*", given):
        raise SettingError(
            f"MAX_JOBS: expected a whole number >= 1, got {given!r}. "
            "Unset it to let the build choose."
        )
    return int(given)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity mask, cut to a container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    for group in _groups(root):
        quota, _, period = _read(group / "cpu.max").partition(" ")  # or "max <period>"
        if quota.isdigit():
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that new processes may take without swapping: the system's, cut to a container's."""
    memory = re.search(r"^MemAvailable: +(\d+)", _read(root / "proc/meminfo"), re.MULTILINE)
    left = int(memory[1]) * 1024 if memory else sys.maxsize
    for group in _groups(root):
        limit, used = _read(group / "memory.max"), _read(group / "memory.current")
        if limit.strip().isdigit() and used:
            # Cached file pages count as used, but the kernel frees them when memory is needed.
            stat = re.search(r"^inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE)
            left = min(left, int(limit) - int(used) + (int(stat[1]) if stat else 0))
    return max(0, left)


def _groups(root: Path) -> list[Path]:
    """Folders of this process's control group and of those around it."""
    mount = root / "sys/fs/cgroup"
    own = re.search(r"^0::/(.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE)
    group = mount / (own[1] if own else "")
    return [group, *(above for above in group.parents if mount in (above, *above.parents))]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(exit_status(lambda: print(count())))
