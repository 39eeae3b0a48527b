"""Upstream's pinned sources: fetched or given, checked, unpacked and patched."""
