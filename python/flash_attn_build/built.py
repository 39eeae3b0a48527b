"""What the build handed over, told before any other machine could have touched it.

All jobs of a release put files into one store, that of the run. So a job that runs after the build
and before the GPU runner starts says what the build put there, and every later one compares.
`python -m flash_attn_build.built` says it, as JSON and as the output "sha256" of a CI's job.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from . import manifest, outputs, shelf
from .errors import BuildError, SettingError, StepError

ROOT = Path(__file__).resolve().parents[2]


def listing(dist: Path) -> dict[str, str]:
    """Hashes the wheels that may be meant for a release, and their manifests.

    Args:
        dist: Folder for wheels.

    Returns:
        Path relative to the folder, to hexadecimal sha256.
    """
    wheels = shelf.find_wheels(dist)
    paths = [*wheels, *(wheel.with_name(manifest.file_name(wheel.name)) for wheel in wheels)]
    return {
        path.relative_to(dist).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(paths)
        if path.exists()
    }


def read(text: str) -> dict[str, str]:
    """Reads what `listing` said in another job.

    Args:
        text: JSON.

    Returns:
        Path to hexadecimal sha256.

    Raises:
        SettingError: It is no such JSON, or names no file: a comparison with nothing would let
            everything through.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if (
        not isinstance(found, dict)
        or not found
        or not all(re.fullmatch(r"[0-9a-f]{64}", str(value)) for value in found.values())
    ):
        raise SettingError(f"--built-sha256: expected a JSON object of files, got {text[:60]!r}")
    return found


def faults(dist: Path, told: Mapping[str, str]) -> Iterator[str]:
    """Compares what lies in a folder with what the build handed over.

    Args:
        dist: Folder for wheels.
        told: What the build handed over.

    Yields:
        Every difference.
    """
    there = listing(dist)
    for name in sorted({*there, *told}):
        if name not in told:
            yield f"{name}: the build did not hand this over"
        elif name not in there:
            yield f"{name}: the build handed this over, but it is not there"
        elif there[name] != told[name]:
            yield f"{name}: has sha256 {there[name]}, but the build handed over {told[name]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Says what the build handed over.

    Args:
        arguments: Words of the command line; those of the process if None.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="nox -s digests --", description=__doc__)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="wheels (dist)")
    given = parser.parse_args(arguments)
    try:
        found = listing(given.dist)
        if not found:
            raise SettingError(f"{given.dist}: holds no wheel")
        text = json.dumps(found)
        print(text)
        outputs.set_output("sha256", text)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return StepError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
