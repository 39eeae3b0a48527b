"""Token log-probabilities of two attentions on one model: the train-inference mismatch of RL."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...errors import ArgumentError
from ...shared.bits import difference
from ..attentions.registry import Attention, find_attention
from ..attentions.substitute import replaced_attention
from ..numbers.intervals import bootstrap
from ..study.environment import autocast
from ..study.files import new_result, write_result
from .target import ModelPlan, Target

QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)


def run_tokens(
    plan: ModelPlan, target: Target, folder: Path, seconds: float | None = None
) -> dict[str, Any]:
    """Compares next-token distributions with the attentions that sample and that train.

    Batches after the second are not started if they would end later than `seconds`.

    Returns:
        tokens.json: "kl": mean over tokens of KL(first || second) in nats, with its interval over
        batches; "difference": quantiles of |log p - log p'| of the token that the first one would
        sample (from a fixed seed), its mean with sign, and the largest importance ratio; "same":
        share of tokens with equal bits; "batch_invariant": for each attention whether every call
        gives each sequence of the batch the bits that it gives it alone. Tokens that a batch's
        `attention_mask` hides do not count.

    Raises:
        ArgumentError: not two attentions, a model without logits or attention, or logits that are
            NaN.
    """
    if len(plan.attentions) != 2:
        raise ArgumentError(f"attention: expected two names, got {len(plan.attentions)}")
    found = {name: find_attention(name) for name in plan.attentions}
    kls, differences = [], []
    invariant: dict[str, bool] = {}
    for number, batch in target.batches_within(seconds, "tokens"):
        logs = []
        for name in plan.attentions:
            logits, kept = _logits(plan, target, batch, found[name])
            if not logits.isfinite().all():
                raise ArgumentError(
                    f"model: expected finite logits with {name}, got NaN or infinite ones in batch "
                    f"{number}"
                )
            invariant[name] = invariant.get(name, True) and kept
            logs.append(logits[_shown(batch, logits)].double().log_softmax(-1))
        first, second = logs
        probs = first.exp()
        kls.append(float((probs * (first - second)).sum()))
        generator = torch.Generator(device=probs.device).manual_seed(number)
        chosen = torch.multinomial(probs, 1, generator=generator)
        change = (second.gather(-1, chosen) - first.gather(-1, chosen)).flatten().cpu()
        differences.append(change)
    changes = torch.cat(differences)
    sums = torch.tensor([kls, [float(len(change)) for change in differences]], dtype=torch.float64)
    ordered = changes.abs().sort().values
    configuration = {**asdict(plan), "batches": len(target.batches)}
    value = {
        **new_result("tokens", configuration, plan.device),
        "tokens": len(changes),
        "kl": bootstrap(len(kls), lambda i: sums[0][i].sum(-1) / sums[1][i].sum(-1)).listed(),
        "difference": {
            **{f"q{q:g}": float(ordered[round(q * (len(ordered) - 1))]) for q in QUANTILES},
            "mean": float(changes.mean()),
            "largest_ratio": float(ordered[-1].exp()),
        },
        "same": float((changes == 0).double().mean()),
        "batch_invariant": invariant,
    }
    write_result(folder, value)
    return value


def _shown(batch: Any, logits: torch.Tensor) -> torch.Tensor:
    """Returns which tokens (batch, tokens) are no padding."""
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    if mask is None or mask.shape != logits.shape[:2]:
        return torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
    shown: torch.Tensor = mask.to(logits.device, torch.bool)
    return shown


@torch.no_grad()
def _logits(
    plan: ModelPlan, target: Target, batch: Any, attention: Attention
) -> tuple[torch.Tensor, bool]:
    """Returns logits, and whether each sequence's attention has the same bits alone."""
    invariant = True

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        attn_mask: torch.Tensor | None = None, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        nonlocal invariant
        out = attention(q, k, v, attn_mask, *args, **kwargs)
        for row in range(len(q)):
            one = slice(row, row + 1)
            mask = attn_mask
            if mask is not None and mask.ndim == q.ndim and len(mask) == len(q):
                mask = mask[one]
            alone = attention(q[one], k[one], v[one], mask, *args, **kwargs)
            invariant = invariant and difference(alone, out[one]) is None
        return out

    with autocast(plan.device, plan.precision), replaced_attention(attend):
        logits = target.logits(batch)
    return logits, invariant
