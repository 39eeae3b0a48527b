"""What compute-sanitizer reports of right code, and kernels that a tool can't follow.

Each entry says why, and what else looks at the place. Any other finding fails.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tests.gpu.sanitizers.calls import HEAD_DIMS


@dataclass(frozen=True)
class Exempt:
    """A finding that is no fault, or a kernel that a tool leaves alone: it stops the process else.

    Args:
        tool: of compute-sanitizer.
        head_dims: where it is reported, or would.
        what: a regular expression, found in the report with its indented lines; or a part of the
            kernel's name.
        reason: why, and what else looks at the place.
    """

    tool: str
    head_dims: tuple[int, ...]
    what: str
    reason: str


EXPECTED = (
    Exempt(
        "racecheck", (192, 256), r"Race reported between [\s\S]*fwd_sm90_kernel",
        "shared memory of Q is reused for keys, which a warp may clear; the order goes by lane "
        "0, the loading thread and the copy engine, which racecheck does not follow; "
        "tests.emulator does, and finds it in order",
    ),
    Exempt(
        "racecheck", (576,), r"Race reported between [\s\S]*latent_sm90_kernel",
        "weights and ends of rows pass from one warpgroup to another at named barriers of 256 of "
        "the 384 threads, which racecheck does not follow, where both wait (bar.sync) neither; "
        "tests.gpu.decode.test_latent compares every bit with the kernel for every GPU, in which "
        "racecheck finds nothing",
    ),
)  # fmt: skip
_DIFFERENT_LOOPS = (
    "warps with different work meet at a named barrier from different loops, which PTX allows "
    "and synccheck takes for divergence; tests.emulator counts the arrivals at each of its "
    "barriers, and reports one that waits for a warp that does not come"
)
EXCLUDED = (
    Exempt("synccheck", HEAD_DIMS, "values_kernel", _DIFFERENT_LOOPS),
    Exempt("synccheck", (192, 256), "bwd_sm90_kernel", _DIFFERENT_LOOPS),
)


@dataclass
class Findings:
    """Reports of logs, apart by whether they are listed."""

    count: int = 0
    expected: dict[str, int] = field(default_factory=dict)  # by reason
    unexpected: list[str] = field(default_factory=list)  # first lines

    def add(self, other: Findings) -> None:
        """Adds those of another log."""
        self.count += other.count
        for reason, count in other.expected.items():
            self.expected[reason] = self.expected.get(reason, 0) + count
        self.unexpected += other.unexpected


# What the tools say of themselves and of the program, in lines that begin like a report.
_NO_REPORT = re.compile(
    r"COMPUTE-SANITIZER|(ERROR|RACECHECK|LEAK) SUMMARY|Target application|Tracking kernel|$"
)


def findings(tool: str, head_dim: int, log: str) -> Findings:
    """Reads the reports of a log: a line that begins with "=========", and indented ones after."""
    found = Findings()
    for report in re.findall(r"^========= ?(?!\s)(.*(?:\n========= {2,}.*)*)", log, re.MULTILINE):
        if _NO_REPORT.match(report):
            continue
        found.count += 1
        for one in EXPECTED:
            if tool == one.tool and head_dim in one.head_dims and re.search(one.what, report):
                found.expected[one.reason] = found.expected.get(one.reason, 0) + 1
                break
        else:
            first = report.splitlines()[0]
            found.unexpected.append(f"{tool} at head dim {head_dim}: {first}")
    return found
