"""The row "ranks" of the contract: attention over P ranks has the bits of one device."""

from __future__ import annotations
