"""What the wheel and flash-attn-deterministic-lab share: each ships these files.

They import the standard library and torch alone, because either runs without the other
(docs/adr/0025).
"""
