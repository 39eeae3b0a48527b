"""Runs tasks in a child process, and starts another after a task that killed it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from typing import Any

from . import outcome
from .environment import without_settings
from .tasks import OnCase, Options

OWN_WORKER = "flash_attn_deterministic.verify.worker:main"

# Same modules as the parent's, whatever folder this is run in.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import importlib; "
    "module, name = sys.argv[2].split(':'); getattr(importlib.import_module(module), name)()"
)
_TAIL = 1500  # bytes of stderr that an error shows


class Supervisor:
    """A worker that is started when needed, and again after it died.

    Args:
        options: of the run.
        worker: what the child runs, as "module:function".
        silence: seconds without an event after which a worker counts as hanging.
    """

    def __init__(self, options: Options, worker: str = OWN_WORKER, silence: float = 300.0) -> None:
        self._options = options
        self._worker = worker
        self._silence = silence
        self._process: subprocess.Popen[str] | None = None
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._errors = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._errors.close()

    def run(self, section: str, task: str, on_case: OnCase) -> dict[str, Any]:
        """Runs one task.

        Args:
            section: id of the section.
            task: id of the task in it.
            on_case: called before each case, with its name, its number and how many there are.

        Returns:
            `status`, `data` and, unless it passed or failed by itself, `reason`. If the worker
            died or hung, an error with the last case.
        """
        at = ""
        try:
            process = self._started()
            assert process.stdin is not None
            request = {"section": section, "task": task, "options": asdict(self._options)}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            while event := self._events.get(timeout=self._silence):
                if event["event"] == "case":
                    at = f" at case {event['name']}"
                    on_case(event["name"], event["number"], event["total"])
                elif event["event"] == "result":
                    if event.pop("broken"):
                        self.stop()
                    del event["event"]
                    return event
            reason = self._ending()
        except queue.Empty:
            reason = f"no sign of life for {self._silence:.0f} seconds"
        except BrokenPipeError:
            reason = self._ending()
        self.stop()
        tail = self._last_words()
        data = {"stderr": tail} if tail else {}
        return {"status": outcome.ERROR, "data": data, "reason": f"{reason}{at}"}

    def stop(self) -> None:
        """Kills the worker, if there is one."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None:
            return self._process
        self._errors.seek(0)
        self._errors.truncate()
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), self._worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=without_settings(),  # the checks set what they need themselves
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the parent, which then writes its report
        )
        self._process, self._events = process, queue.Queue()
        threading.Thread(target=_read, args=(process, self._events), daemon=True).start()
        return process

    def _ending(self) -> str:
        """Returns how the worker ended."""
        assert self._process is not None
        status = self._process.wait()
        if status >= 0:
            return f"the process ended with status {status}"
        names = {int(one): one.name for one in signal.Signals}
        return f"the process was killed by {names.get(-status, f'signal {-status}')}"

    def _last_words(self) -> str:
        """Returns the end of what the worker wrote to stderr."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _TAIL))
        return self._errors.read().decode("utf-8", "replace").strip()


def _read(process: subprocess.Popen[str], events: queue.Queue[dict[str, Any] | None]) -> None:
    """Puts a worker's events into a queue, then None."""
    assert process.stdout is not None
    # A ValueError: the stream was closed, or a last line was cut off.
    with contextlib.suppress(ValueError):
        for line in process.stdout:
            events.put(json.loads(line))
    events.put(None)
