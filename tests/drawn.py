"""Drawn cases of the accuracy checks: lengths around edges, any head dim, features, layouts.

They reach what lists leave out: how features, layouts and lengths meet. The CPU's tests draw small
ones, those on a GPU large ones.
"""

from __future__ import annotations

import random

from flash_attn_deterministic.verify.accuracy import Case
from flash_attn_deterministic.verify.contract.sizes import Config
from flash_attn_deterministic.verify.features import FEATURES

EDGES = (1, 2, 16, 17, 63, 64, 65, 127, 128, 129, 256, 512, 1024)
_FORMS = (
    *("dense", "dense", "packed", "padded", "packed-pages", "pages", "cache", "cache-places"),
    *("append", "append-pages", "append-halves"),
)


def draw_case(seed: int, longest: int, head_dims: range = range(1, 257)) -> tuple[Config, Case]:
    """Draws head dim, dtype and a case; the same arguments draw the same."""
    rng = random.Random(seed)
    form = rng.choice(_FORMS)
    # Dropout has no cache; a residual shows where rows see many keys.
    features = [n for n in FEATURES if n != "residual" and (form == "dense" or "dropout" not in n)]
    edges = [edge for edge in EDGES if edge < longest]
    seqlen_q, seqlen_k = (max(1, rng.choice(edges) + rng.randint(-1, 1)) for _ in "qk")
    nheads_k = rng.choice((1, 2, 3))
    feature = rng.choice(features)
    if "dropout" in feature:
        # Of few keys dq is next to nothing, and the rounding of out all that there is.
        seqlen_k = max(seqlen_k, 32)
    least = 1
    if form.startswith("append"):
        seqlen_k = max(seqlen_k, 14)  # room for new keys in the shortest sequence
        least = 32  # columns are rotated
    case = Case(
        name=f"drawn {seed}",
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        feature=feature,
        form=form,
        batch=3,
        nheads=nheads_k * rng.choice((1, 2, 4)),
        nheads_k=nheads_k,
        backward=form in ("dense", "packed"),
        shrink=rng.choice((1, 4, 16)),
    )
    head_dim = rng.choice([head_dim for head_dim in head_dims if head_dim >= least])
    return (head_dim, rng.choice(("bf16", "fp16"))), case
