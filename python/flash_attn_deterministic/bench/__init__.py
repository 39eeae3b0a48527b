"""Times this package beside what a user would take instead, on the user's own machine.

Run as `flash-attn-deterministic bench`.
"""
