"""Measurements for docs/results, and the tables made of them.

`flash-attn-deterministic bench --study NAME` takes times beside others. Here, `evidence` runs all
that is measured, `tables` fills README.md and docs/; `host` and `ranks` measure what bench can't.
"""
