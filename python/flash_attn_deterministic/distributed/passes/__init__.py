"""Forward and backward of one rank, made of ops and messages."""

from __future__ import annotations
