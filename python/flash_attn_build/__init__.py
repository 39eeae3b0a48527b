"""Builds, checks and releases the wheel; never part of it. docs/architecture.md has the map."""
