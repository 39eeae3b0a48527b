"""Lines on standard error that say how far a study is."""

from __future__ import annotations

import sys
import time


class Progress:
    """Counts to `total`, and prints a line at most every few seconds."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.done = name, total, 0
        self.start = self.shown = time.monotonic()

    def advance(self, label: str) -> None:
        self.done += 1
        now = time.monotonic()
        if now - self.shown < 10 and self.done < self.total:
            return
        self.shown, taken = now, now - self.start
        left = taken / self.done * (self.total - self.done)
        text = f"{self.name} {self.done}/{self.total} {label}, {taken:.0f} s, {left:.0f} s left"
        print(text, file=sys.stderr, flush=True)
