"""Messages between ranks: groups, agreement before a call, exchanges of tokens."""

from __future__ import annotations
