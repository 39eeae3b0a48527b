"""Servers on loopback, clean environments that install from them, and programs that stand in."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from flash_attn_build.files import write_text


@contextmanager
def serving(server: HTTPServer) -> Iterator[str]:
    """Lets a server work in a thread; yields its address."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    # A proxy of the machine has no part in this.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def static(
    folder: Path, asked: list[str] | None = None, refuse: bool = False
) -> AbstractContextManager[str]:
    """Serves the files of a folder, or answers all with status 503; notes what is asked for."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            if asked is not None:
                asked.append(self.path)

        def do_GET(self) -> None:
            self.send_error(503) if refuse else super().do_GET()

    return serving(ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))))


def uploads(folder: Path) -> AbstractContextManager[str]:
    """A package index that keeps in a folder whatever is uploaded."""
    import pypiserver  # type: ignore[import-untyped, unused-ignore]

    class Handler(WSGIRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    folder.mkdir()
    app = pypiserver.app(roots=[folder], password_file=".", authenticate=[], disable_fallback=True)
    return serving(make_server("127.0.0.1", 0, app, handler_class=Handler))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tree_of(folder: Path) -> dict[str, bytes]:
    """Bytes of all files below a folder, by POSIX path relative to it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def program(path: Path, text: str) -> Path:
    """Writes a shell script that may be run."""
    write_text(path, f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


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
