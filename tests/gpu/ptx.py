"""Verifies the PTX of a wheel, which a GPU uses where the wheel has no machine code for it.

    python -m tests.gpu.ptx --wheel dist/X.whl --out evidence

Makes a wheel without any machine code, installs it into a folder of its own, runs `verify --quick`
there, and leaves its report as verification-compute_80.json, which the gate wants in docs/results.
The driver compiles every kernel at its first call: some six minutes on a quiet machine. The exit
status is that of `verify`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests import conftest as _finds_flash_attn_build  # noqa: F401

REPORT = "verification-compute_80.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes, installs and verifies the wheel."""
    from flash_attn_build.wheel.only_ptx import convert

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--wheel", type=Path, required=True, help="of the preset release")
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    options, more = parser.parse_known_args(arguments)  # what it does not know is for `verify`
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, site, report = convert(options.wheel, folder), folder / "site", folder / "report"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        subprocess.run([*pip, "--target", site, wheel], check=True)
        # The driver keeps what it compiled; its default of 1 GiB would drop kernels in between.
        environ = {**os.environ, "PYTHONPATH": str(site), "CUDA_CACHE_MAXSIZE": str(4 * 2**30)}
        command = [sys.executable, "-m", "flash_attn_deterministic", "verify", "--quick", *more]
        command += ["--wheel", str(wheel), "--out", str(report)]
        status = subprocess.run(command, env=environ).returncode
        made = report / "verification.json"
        if made.exists():
            options.out.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(made, options.out / REPORT)
    return status


if __name__ == "__main__":
    sys.exit(main())
