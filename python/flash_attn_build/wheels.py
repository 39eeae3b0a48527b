"""Builds a release's wheels in manylinux images with cibuildwheel, one per CUDA toolkit."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import build, files, manifest, outputs, surroundings
from .errors import BuildError, SettingError, StepError
from .gate.policy import Policy, Toolkit, load_policy

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(kit: Toolkit, dist: Path, root: Path = ROOT) -> Path:
    """Builds the wheel of one toolkit.

    Args:
        kit: The toolkit.
        dist: Folder for wheels: the wheel and its manifest go to its folder of the toolkit.
        root: The source tree.

    Returns:
        The wheel.

    Raises:
        StepError: cibuildwheel failed.
        WheelError: The wheel is not what it must be.
    """
    from .wheelcheck import check

    out = dist / kit.label
    out.mkdir(parents=True, exist_ok=True)
    epoch = build.source_date_epoch(os.environ, root)
    with tempfile.TemporaryDirectory(dir=out, prefix=".build-") as folder:
        command = [sys.executable, "-m", "cibuildwheel", "--only", kit.cibuildwheel]
        command += ["--output-dir", folder, str(root)]
        environ = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
        environ.pop("PYTHONPATH", None)  # cibuildwheel's own environments are not ours
        status = subprocess.run(command, env=environ, check=False).returncode
        made = list(Path(folder).glob("*.whl"))
        if status or len(made) != 1:
            raise StepError(f"cibuildwheel made no wheel (exit status {status}, see above)")
        info = check(made[0])
        settings = {
            "preset": "release",
            "defines": [],
            "environment": surroundings.given(os.environ),
            "source_date_epoch": int(epoch),
        }
        tools = {"cibuildwheel": importlib.metadata.version("cibuildwheel")}
        # What each translation unit cost stays in the container.
        text = manifest.describe(made[0], info, [], settings, tools, {})
        files.write_json(out / manifest.file_name(made[0].name), text)
        made[0].chmod(0o644)
        return made[0].replace(out / made[0].name)


def listing(policy: Policy) -> str:
    """Lists the toolkits for a CI's matrix.

    Args:
        policy: The release policy.

    Returns:
        JSON: a list of objects with the toolkit's series and label.
    """
    return json.dumps(
        [{"series": kit.series, "label": kit.label} for kit in policy.toolkits.values()]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds the wheels of the toolkits named, or lists them.

    Args:
        arguments: Words of the command line; those of the process if None.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="nox -s wheels --", description=__doc__)
    parser.add_argument("toolkits", nargs="*", help="such as 13.0 (all of the release policy)")
    parser.add_argument("--list", action="store_true", help="list the toolkits as JSON")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="for wheels (dist)")
    given = parser.parse_args(arguments)
    try:
        policy = load_policy()
        if given.list:
            text = listing(policy)
            print(text)
            outputs.set_output("toolkits", text)
            return 0
        for series in given.toolkits or policy.toolkits:
            if series not in policy.toolkits:
                known = ", ".join(policy.toolkits)
                raise SettingError(f"toolkits: expected {known}, got {series!r}")
            print(f"wheels: {build_wheel(policy.toolkits[series], given.dist.resolve())}")
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}. Wheels that were there are as they were.", file=sys.stderr)
        return StepError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
