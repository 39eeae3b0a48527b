"""One line on standard error that says how far a study is."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO


class Progress:
    """Counts to `total`: on a terminal one line, rewritten; elsewhere a line now and then."""

    def __init__(self, name: str, total: int, stream: TextIO | None = None) -> None:
        self.name, self.total, self.done = name, total, 0
        self.stream = sys.stderr if stream is None else stream
        self.start = time.monotonic()
        self.shown = -1e9

    def advance(self, label: str) -> None:
        self.done += 1
        self._show(label)

    def _show(self, label: str, last: bool = False) -> None:
        terminal = self.stream.isatty()
        now = time.monotonic()
        if not last and now - self.shown < (0.1 if terminal else 15.0):
            return
        self.shown = now
        text = f"{self.name} {self.done}/{self.total} {now - self.start:.0f} s{self._left(now)}"
        text += f" {label}" if label else ""
        print(
            f"\r{text[:99]:<99}" if terminal else text,
            end="" if terminal and not last else "\n",
            file=self.stream,
            flush=True,
        )

    def _left(self, now: float) -> str:
        if not 0 < self.done < self.total:
            return ""
        return f", about {(now - self.start) / self.done * (self.total - self.done):.0f} s left"

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._show("interrupted" if error else "", last=True)
