"""Progress on stderr: a bar with the time left on a terminal, a line for each task elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from .tasks import Task

_WIDTH = 24
_INTERVAL = 0.1  # seconds between two drawings


class Progress:
    """Tells how far a run is.

    Args:
        tasks: all of them, in order.
        stream: usually stderr.
    """

    def __init__(self, tasks: Sequence[Task], stream: TextIO) -> None:
        self._stream = stream
        self._bar = stream.isatty()
        self._total = sum(task.weight for task in tasks)
        self._done = 0.0
        self._begin = time.monotonic()
        # The last news: how much was done, and when.
        self._news = (0.0, self._begin)
        self._drawn = 0.0

    def show(self, task: Task, fraction: float = 0.0, detail: str = "") -> None:
        """Shows that a task is under way; fraction is of the task."""
        now = time.monotonic()
        if not self._bar or (now - self._drawn < _INTERVAL and fraction > 0):
            return
        self._drawn = now
        part = (self._done + fraction * task.weight) / max(self._total, 1e-9)
        filled = round(part * _WIDTH)
        bar = "#" * filled + "-" * (_WIDTH - filled)
        line = f"[{bar}] {part:4.0%} {self.left(part)} left  {task.name} {detail}"
        self._stream.write(f"\r{line[:110]:<110}")
        self._stream.flush()

    def finish(self, task: Task, status: str) -> None:
        """Shows that a task has ended."""
        self._done += task.weight
        if self._bar:
            if status not in ("passed", "not-applicable"):
                self._stream.write(f"\r{task.name}: {status}".ljust(111) + "\n")
        else:
            part = self._done / max(self._total, 1e-9)
            self._stream.write(f"{part:4.0%}  {task.name}: {status}\n")
        self._stream.flush()

    def close(self) -> None:
        """Clears the bar."""
        if self._bar:
            self._stream.write("\r" + " " * 110 + "\r")
            self._stream.flush()

    def left(self, part: float) -> str:
        """Returns the time left as minutes:seconds, from the part that is done."""
        now = time.monotonic()
        if part > self._news[0]:
            self._news = (part, now)
        known, at = self._news
        # At the start the tasks' own weights are the better guess.
        whole = self._total if known < 0.02 else (at - self._begin) / known
        # Between two pieces of news it counts down, and not below what has not begun.
        seconds = max(whole * (1 - known) - (now - at), 0.0)
        if seconds < 1 and part < 1:
            return "?:??"
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
