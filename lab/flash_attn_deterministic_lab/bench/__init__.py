"""Times this package and its alternatives on the user's machine.

Run as `flash-attn-deterministic bench`.
"""
