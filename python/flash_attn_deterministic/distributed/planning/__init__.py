"""Layouts of tokens on ranks, the tokens that each rank needs, and the order of steps."""

from __future__ import annotations
