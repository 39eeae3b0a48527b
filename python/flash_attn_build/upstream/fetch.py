"""Downloads the pinned source distribution with pip, by pip's own settings, and runs none of it.

pip asks every source distribution's build backend for metadata, and upstream's would run setup.py,
which wants torch. A stand-in for setuptools answers, from a folder that comes first on the path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from ..errors import RefusedError, ToolchainError
from ..files import write_text
from .pin import Pin

CHECK = "check pip's settings (`pip config list`), or set FLASH_ATTENTION_SOURCE to the archive"
_BACKEND = """import os, sys

def prepare_metadata_for_build_wheel(folder, settings=None):
    info = os.path.join(folder, "{stem}.dist-info")
    os.mkdir(info)
    with open(os.path.join(info, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return os.path.basename(info)

__legacy__ = sys.modules[__name__]  # what pip asks where there is no pyproject.toml
"""
# Of what pip prints: where it looked, and why nothing was found there.
_TOLD = re.compile(r"^(?:ERROR|WARNING|Looking|Could not|An error| +(?:Expected|Got) ).*", re.M)


def download(pin: Pin, folder: Path) -> Path:
    """Downloads the archive of the pinned hash into an empty folder; returns its path.

    Raises:
        ToolchainError: pip found no such archive, or one of its settings cannot be used.
        RefusedError: pip found an archive of this name and version, with other bytes.
    """
    stem = f"{pin.name.replace('-', '_')}-{pin.version}"
    backend = _BACKEND.format(stem=stem, name=pin.name, version=pin.version)
    path = folder / "path"
    write_text(path / "setuptools" / "__init__.py", "")
    write_text(path / "setuptools" / "build_meta.py", backend)
    # With the hash, nothing of another archive is even unpacked.
    wanted = f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n"
    write_text(folder / "wanted.txt", wanted)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")])),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_USE_PEP517": "1",  # pip before 25.3 would run setup.py itself
    }
    command = [sys.executable, "-m", "pip", "download", "--no-input", "-vv", "--no-deps"]
    command += ["--no-binary=:all:", "--no-build-isolation", "--require-hashes"]
    command += ["--requirement", str(folder / "wanted.txt"), "--dest", str(folder / "got")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode == 0:
        (found,) = (folder / "got").iterdir()
        return found
    said = done.stdout + done.stderr
    told = " ".join(" ".join(_TOLD.findall(said) or said.splitlines()[-3:]).split())
    name = f"{pin.name} {pin.version} (source distribution, sha256 {pin.sha256})"
    if "DO NOT MATCH THE HASHES" in said:
        raise RefusedError(f"{name}: {told}; find out why other bytes are served; {CHECK}")
    raise ToolchainError(f"{name}: {told}; {CHECK}")
