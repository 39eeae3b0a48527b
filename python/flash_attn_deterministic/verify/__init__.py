"""Checks an installed wheel: contract, accuracy, memory, speed; writes a report of it.

Run as `flash-attn-deterministic verify`. Checks run in a child process, which the parent
(`supervisor`) starts again when a check has killed it.
"""
