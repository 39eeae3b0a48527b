"""The child process that runs checks: it reads requests and writes events, as lines of JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from .tasks import OnCase, Options

Execute = Callable[[str, str, Options, OnCase], dict[str, Any]]


def main(execute: Execute | None = None) -> None:
    """Answers requests until there are no more.

    A request has section, task and options. Events: `ready` once; for each case of a task `case`
    with its name, number and total; then `result`, with status, data and broken.

    Args:
        execute: what runs a task; None: `tasks.execute`.
    """
    out = _private_stdout()
    if execute is None:
        import torch

        torch.set_num_threads(1)  # the CPU's checks are many small steps
        from .tasks import execute as own

        execute = own
    _send(out, event="ready")
    for line in sys.stdin:
        request = json.loads(line)
        options = Options(**request["options"])

        def on_case(name: str, number: int, total: int) -> None:
            _send(out, event="case", name=name, number=number, total=total)

        try:
            result = execute(request["section"], request["task"], options, on_case)
        except Exception as error:
            import traceback

            from .contract.check import usable

            traceback.print_exc()
            result = {
                "status": "error",
                "data": {},
                "reason": f"{type(error).__name__}: {error}"[:2000],
                "broken": options.device == "cuda" and not usable(),
            }
        _send(out, event="result", **result)


def _private_stdout() -> TextIO:
    """Returns the real stdout; what else prints there, libraries in C too, goes to stderr."""
    private = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(private, "w", encoding="utf-8")


def _send(out: TextIO, **event: Any) -> None:
    out.write(json.dumps(event) + "\n")
    out.flush()
