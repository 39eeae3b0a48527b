"""Errors of builds and releases, and how their commands and messages tell them."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any


class BuildError(Exception):
    """A step failed. The message says what to do next."""


class RefusedError(BuildError):
    """Sources, a wheel or a report are not what they must be."""


def exit_status(work: Callable[[], object], left: str = "") -> int:
    """Runs the work of a command; no temporary file is left if it fails or is terminated.

    `left`, the state of what the command writes, is printed after an OSError or an interrupt.

    Returns:
        Exit status: 0, or 1, or 128 plus the signal's number; stderr has the reason.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        work()
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error}. {left}".rstrip(), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"error: interrupted. {left}".rstrip(), file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def printable(text: str) -> str:
    """Text of others for terminals and logs: one line of ASCII, no command to GitHub's runner.

    Such a command also begins with `::`, but only at the beginning of a line.
    """
    escaped = re.sub("[^ -~]", lambda found: found[0].encode("unicode_escape").decode(), text)
    return escaped.replace("##[", r"#\x23[")


def differences(found: Any, expected: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Compares JSON with what it must hold: "build.preset: expected 'release', got 'dev'"."""
    for key, value in expected.items():
        name = f"{where}.{key}" if where else key
        got = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(value, Mapping) and value:
            yield from differences(got, value, name)
        # As text 1, 1.0 and true differ.
        elif json.dumps(got, sort_keys=True) != json.dumps(value, sort_keys=True):
            yield f"{name}: expected {repr(value)[:120]}, got {repr(got)[:120]}"


def first_of(names: Collection[str]) -> str:
    """Lists names, of many the first three: "a, b, c and 2 more"."""
    some = ", ".join(sorted(names)[:3])
    return f"{some} and {len(names) - 3} more" if len(names) > 3 else some
