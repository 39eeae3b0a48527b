"""What pytest is told: which cases to run, for how long, and which failures are listed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from .differences import Differences
from .drawing import count, draw


class Conformance:
    """A plugin of pytest, which holds the results.

    Args:
        seed: of the drawn cases and their order.
        per_test: cases to draw of each test function, at most.
        seconds: after which no further case starts.
        differences: listed ones.
    """

    def __init__(self, seed: int, per_test: int, seconds: float, differences: Differences) -> None:
        self.possible = 0
        self.outcomes: Counter[str] = Counter()
        self.by_test: dict[str, Counter[str]] = {}
        self.listed: Counter[str] = Counter()
        self.failed: list[dict[str, str]] = []
        self._seed, self._per_test, self._differences = seed, per_test, differences
        self._end = time.monotonic() + seconds
        self.stopped = False  # whether the plugin itself ended the run

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, name: str, obj: Any) -> None:
        """Draws the cases of a test function before pytest makes all of them."""
        if name.startswith("test_") and callable(obj):
            self.possible += count(obj)
            draw(obj, self._per_test, self._seed)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mixes the cases of all tests, so that each gets its share of the time."""
        for module in {item.module for item in items if isinstance(item, pytest.Function)}:
            for helper in self._differences.helpers:
                if hasattr(module, helper.name):
                    setattr(module, helper.name, lambda first, *_, **__: first)
        random.Random(self._seed).shuffle(items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Function, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Notes the result of a case."""
        report = yield
        if report.when == "call" or report.outcome == "skipped":
            test = item.originalname
            outcome: str = report.outcome
            if outcome == "failed":
                outcome = self._failure(item, call)
                if outcome == "listed":
                    report.outcome = "skipped"
                    report.wasxfail = "listed"
            self.outcomes[outcome] += 1
            self.by_test.setdefault(test, Counter())[outcome] += 1
        elif report.outcome == "failed":
            self.outcomes["failed"] += 1
            self.failed.append({"case": item.name, "message": _message(call)})
        return report

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Ends the run when its time is up, or when a fault has broken the GPU's context."""
        if time.monotonic() > self._end:
            self._stop = "the time is up"
        elif self.failed and "CUDA error" in self.failed[-1]["message"]:
            self._stop = "a CUDA error; later cases would fail whatever they are"
        else:
            return
        self._session.shouldstop = self._stop
        self.stopped = True

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keeps the session, to end it."""
        self._session = session

    def _failure(self, item: pytest.Function, call: pytest.CallInfo[None]) -> str:
        message = _message(call)
        for difference in self._differences.failures:
            if difference.covers(item.originalname, item.callspec.params, message):
                self.listed[difference.reason] += 1
                return "listed"
        self.failed.append({"case": item.name, "message": message})
        return "failed"


def _message(call: pytest.CallInfo[None]) -> str:
    if call.excinfo is None:
        return ""
    return f"{call.excinfo.typename}: {call.excinfo.value}"[:2000]
