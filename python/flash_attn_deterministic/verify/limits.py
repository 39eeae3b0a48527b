"""All limits that measured numbers are compared with."""

from __future__ import annotations

# Largest error against float64 of a plain call, over that of torch's flash attention. What others
# may have is in bounds.py.
ACCURACY_RATIO = 2.0

# Error of dq with a residual of out, over that without, where values are alike.
RESIDUAL_RATIO = 0.6

# Time over torch's, over the same ratio of the last release (last_release.json).
TIME_RATIO = 1.08

# Peak memory above the inputs, over torch's flash attention, and bytes on top.
MEMORY_RATIO = 1.05
MEMORY_BYTES = 2**20


def memory_passes(ours: int, standard: int) -> bool:
    """Returns whether a peak is within the limit."""
    return ours <= MEMORY_RATIO * standard + MEMORY_BYTES
