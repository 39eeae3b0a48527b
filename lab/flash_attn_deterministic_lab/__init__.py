"""Measures attention: times (`bench`), equal bits (`scoreboard`) and rounding (`deviation`).

It runs without flash-attn-deterministic, whose attention is one of those that a machine may have.
"""
