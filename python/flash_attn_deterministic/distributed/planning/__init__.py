"""Which tokens lie on which rank, what a rank needs of the others, and in which order."""

from __future__ import annotations
