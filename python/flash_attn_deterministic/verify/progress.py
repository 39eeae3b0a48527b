"""Progress on stderr: a line that is overwritten on a terminal, a line for each task elsewhere."""

from __future__ import annotations

from typing import TextIO

from .tasks import Task

_WIDTH = 110


class Progress:
    """Shows how many of the tasks of a run have ended, and the one that runs."""

    def __init__(self, count: int, stream: TextIO) -> None:
        self._count, self._stream, self._terminal = count, stream, stream.isatty()
        self._done = 0

    def show(self, task: Task, detail: str = "") -> None:
        """Shows that a task runs; `detail` says how far it is."""
        if self._terminal:
            self._write(f"[{self._done + 1}/{self._count}] {task.name} {detail}", "")

    def finish(self, task: Task, status: str) -> None:
        """Shows that a task has ended; on a terminal only if it did not pass."""
        self._done += 1
        if not self._terminal:
            self._write(f"{self._done}/{self._count}  {task.name}: {status}", "\n")
        elif status not in ("passed", "not-applicable"):
            self._write(f"{task.name}: {status}", "\n")

    def close(self) -> None:
        """Clears the line."""
        if self._terminal:
            self._write("", "\r")

    def _write(self, text: str, end: str) -> None:
        line = f"\r{text[:_WIDTH]:<{_WIDTH}}" if self._terminal else text
        self._stream.write(line + end)
        self._stream.flush()
