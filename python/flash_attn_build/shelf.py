"""Where wheels and reports lie between the build and a release, and which of them are meant."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from . import manifest
from .errors import SettingError
from .gate.policy import Policy, Toolkit


def find_wheels(dist: Path) -> list[Path]:
    """Lists the wheels that may be meant for a release.

    Args:
        dist: Folder for wheels.

    Returns:
        Those in it, and in its folders of CUDA toolkits (dist/cu130); not those of dist/dev.
    """
    return sorted([*dist.glob("*.whl"), *dist.glob("cu[0-9]*/*.whl")])


def find_reports(folder: Path) -> list[Path]:
    """Lists the verification reports below a folder.

    Args:
        folder: The folder.

    Returns:
        Every `verification.json`.
    """
    return sorted(folder.rglob("verification.json"))


def toolkit_of(wheel: Path, policy: Policy) -> Toolkit | None:
    """Tells which toolkit a wheel was built with.

    Args:
        wheel: The wheel; its manifest lies beside it.
        policy: The release policy.

    Returns:
        The toolkit; None if there is no manifest, or no such toolkit in the policy.
    """
    try:
        text = json.loads(wheel.with_name(manifest.file_name(wheel.name)).read_text())
        return policy.toolkit_of(str(text["cuda_toolkit"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def choose(dist: Path, series: str, policy: Policy) -> Path:
    """Chooses the wheel of one toolkit.

    Args:
        dist: Folder for wheels.
        series: The toolkit's, such as "13.0".
        policy: The release policy.

    Returns:
        The wheel.

    Raises:
        SettingError: There is none, or more than one.
    """
    wheels = find_wheels(dist)
    found = [w for w in wheels if (kit := toolkit_of(w, policy)) and kit.series == series]
    if len(found) != 1:
        there = ", ".join(_told(wheel, policy) for wheel in wheels) or "no wheel"
        raise SettingError(
            f"{dist}: expected one wheel of CUDA {series}, found {len(found)} ({there}). "
            "`nox -s build` makes it, with its manifest; remove the others."
        )
    return found[0]


def copy_with_manifest(wheel: Path, folder: Path) -> Path:
    """Copies a wheel and its manifest, so that what is judged is what is uploaded.

    Args:
        wheel: The wheel.
        folder: A folder of our own.

    Returns:
        The copy.
    """
    beside = wheel.with_name(manifest.file_name(wheel.name))
    for path in (wheel, beside):
        if path.exists():
            shutil.copyfile(path, folder / path.name)
    return folder / wheel.name


def _told(wheel: Path, policy: Policy) -> str:
    kit = toolkit_of(wheel, policy)
    return f"{wheel.parent.name}/{wheel.name}: " + (
        f"CUDA {kit.series}" if kit else "no manifest of a known toolkit"
    )
