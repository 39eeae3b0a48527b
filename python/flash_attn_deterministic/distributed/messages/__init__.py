"""What the ranks send each other: groups, agreement before a call, exchanges."""

from __future__ import annotations
