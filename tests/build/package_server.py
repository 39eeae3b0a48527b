"""A package server on loopback, and clean environments to install from it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def serve(command: Sequence[str], log: Path) -> Iterator[str]:
    """Runs a server on a free port ("{port}" in the command); yields its address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = [word.replace("{port}", str(port)) for word in command]
    address = f"http://127.0.0.1:{port}/"
    # A proxy of the machine has no part in this.
    with log.open("w") as output, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait(address, process, log)
            yield address
        finally:
            process.terminate()
            process.wait()


def package_server(folder: Path, log: Path, *options: str) -> Sequence[str]:
    """Command of a pypiserver that keeps its packages in a folder."""
    folder.mkdir()
    words = [sys.executable, "-m", "pypiserver", "run", "-i", "127.0.0.1", "-p", "{port}"]
    return [*words, "--disable-fallback", *options, str(folder)]


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(address, timeout=5).close()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"the server did not start: {log.read_text()}")


def clean_environment(folder: Path) -> Path:
    """Makes an environment; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def pip_install(python: Path, index: str, *arguments: str, fails: bool = False) -> str:
    """Installs from one index and nowhere else, whatever pip's settings are; returns the output.

    With this environment's pip: the one that comes with a Python may be too old for PEP 658.
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHONPATH"))}
    environ["PIP_CONFIG_FILE"] = os.devnull
    command = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--index-url", index, *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr
