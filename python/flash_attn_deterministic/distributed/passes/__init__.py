"""Forward and backward of one rank, on the ops and the messages."""

from __future__ import annotations
