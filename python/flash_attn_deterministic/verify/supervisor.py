"""Runs tasks in a child process, and starts another after a task that killed it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from . import outcome, tasks
from .environment import without_settings
from .tasks import OnCase, Options, Task

Execute = Callable[[Task, Options, OnCase], dict[str, Any]]
_TAIL = 1500  # characters of stderr that an error shows


class Supervisor:
    """A worker that is started when needed, and again after it died.

    Args:
        options: of the run.
        execute: what runs a task in the child: a function of a module.
        silence: seconds without an event after which a worker counts as hanging.
    """

    def __init__(
        self, options: Options, execute: Execute = tasks.execute, silence: float = 300.0
    ) -> None:
        self._options, self._execute, self._silence = options, execute, silence
        self._process: Any = None
        self._events: Any = None
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name) / "stderr"

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._folder.cleanup()

    def run(self, task: Task, on_case: OnCase) -> dict[str, Any]:
        """Runs one task; `on_case` is told name, number and total before each case.

        Returns `status`, `data` and, unless it passed or failed by itself, `reason`. If the worker
        died or hung, an error with the last case.
        """
        at = ""
        try:
            if self._process is None:
                self._start()
            self._events.send(task)
            while self._events.poll(self._silence):
                case, found, usable = self._events.recv()
                if found is None:
                    at = f" at case {case[0]}"
                    on_case(*case)
                    continue
                if not usable:
                    self.stop()
                return dict(found)
            reason = f"no sign of life for {self._silence:.0f} seconds"
        except (EOFError, ConnectionError):
            reason = self._ending()
        self.stop()
        tail = self._errors.read_text("utf-8", "replace")[-_TAIL:].strip()
        data = {"stderr": tail} if tail else {}
        return {"status": outcome.ERROR, "data": data, "reason": f"{reason}{at}"}

    def stop(self) -> None:
        """Kills the worker, if there is one."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.join()
            self._events.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._errors.write_text("")
        self._events, other = context.Pipe()
        arguments = (other, self._execute, self._options, str(self._errors))
        self._process = context.Process(target=_work, args=arguments, daemon=True)
        with without_settings():  # the checks set what else they need themselves
            self._process.start()
        other.close()

    def _ending(self) -> str:
        """Returns how the worker ended."""
        self._process.join()
        status = self._process.exitcode
        if status >= 0:
            return f"the process ended with status {status}"
        names = {int(one): one.name for one in signal.Signals}
        return f"the process was killed by {names.get(-status, f'signal {-status}')}"


def _work(events: Connection, execute: Execute, options: Options, errors: str) -> None:
    """Runs tasks in the child until there are no more.

    Sends name, number and total of each case; then the result, and whether the process can go on.
    """
    os.setsid()  # Ctrl-C is for the parent, which then writes its report
    descriptor = os.open(errors, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):  # libraries in C print, too
        os.dup2(descriptor, stream)
    import torch

    from .contract import check

    torch.set_num_threads(1)  # the CPU's checks are many small steps
    while True:
        try:
            task = events.recv()
        except EOFError:
            return
        try:
            found = execute(task, options, lambda *case: events.send((case, None, True)))
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"[:2000]
            found = {"status": outcome.ERROR, "data": {}, "reason": reason}
        sys.stderr.flush()
        events.send(((), found, check.usable(options.device)))
