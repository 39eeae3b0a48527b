"""What the wheel and flash-attn-deterministic-lab share: each ships these files.

They import the standard library, torch and what torch brings (jinja2) alone, because either runs
without the other (docs/adr/0025).
"""
