"""Measurements for docs/results, and the tables made of them.

Each file here is a command, `python -m tests.benchmarks.NAME`: `evidence` runs all that measure,
`tables` fills README.md and docs/. What the commands have in common lies in `shared`.
"""
