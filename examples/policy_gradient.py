"""Reinforcement learning whose trainer computes the probabilities that the rollout sampled from.

A small Llama learns by a policy gradient with groups (GRPO) to write even tokens. The rollout
decodes token by token with a cache; the trainer computes whole sequences with gradients. With
invariant layers (invariant_layers.py) and this attention both have the same bits: the KL divergence
between them is exactly 0 in every step, and the method is on-policy as its formula says. With
torch's attention and products it is not.

    python -m pip install transformers
    python examples/policy_gradient.py            # on the GPU if there is one

It exits with 1 if the divergence of ours is not exactly 0, or nothing was learned.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from whole_model import DEVICE, OURS, make_model, with_cache

STEPS = 10
GROUP = 8  # completions of a prompt


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns log p of tokens (batch, seqlen) under logits (batch, seqlen, vocabulary), in fp32."""
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


@torch.no_grad()
def rollout(model: Any, prompts: torch.Tensor, count: int, seed: int) -> tuple[Any, Any]:
    """Samples completions, a token at a time.

    Returns:
        Tokens and their log p, each (batch, count).
    """
    from transformers import DynamicCache

    generator = torch.Generator(prompts.device).manual_seed(seed)
    cache, ids = DynamicCache(), prompts
    tokens, logs = [], []
    for _ in range(count):
        logits = with_cache(model, ids, cache)[:, -1:]
        ids = torch.multinomial(logits[:, 0].float().softmax(-1), 1, generator=generator)
        tokens.append(ids)
        logs.append(log_probabilities(logits, ids))
    return torch.cat(tokens, 1), torch.cat(logs, 1)


def train(model: Any, device: str, count: int) -> list[dict[str, float]]:
    """Runs `STEPS` steps; returns reward and divergence of each."""
    rate = 2e-3 if device == "cuda" else 1e-2  # the model on the CPU is smaller
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(2)
    results: list[dict[str, float]] = []
    for step in range(STEPS):
        prompts = torch.randint(0, 1000, (4, 16), generator=generator).to(device)
        prompts = prompts.repeat_interleave(GROUP, 0)
        halves = prompts.chunk(2)  # the rollout's batch is not the trainer's
        made = [rollout(model, half, count, 2 * step + i) for i, half in enumerate(halves)]
        tokens, sampled = (torch.cat([pair[i] for pair in made]) for i in range(2))
        rewards = (tokens % 2 == 0).float().mean(1).view(-1, GROUP)
        spread = rewards.std(1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1, 1)
        whole = torch.cat([prompts, tokens], 1)
        # Logits of a token stand at the token before it.
        logits = model(whole[:, :-1]).logits[:, prompts.shape[1] - 1 :]
        trained = log_probabilities(logits, tokens)
        loss = -((trained - sampled).exp() * advantages).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        ratio = (trained.detach() - sampled).double()
        results.append(
            {
                "reward": float(rewards.mean()),
                # An estimate of KL(rollout, trainer) from samples that is never negative.
                "kl": float((ratio.expm1() - ratio).mean()),
                "unequal": float((ratio != 0).double().mean()),
            }
        )
    return results


def main() -> int:
    """Trains with torch's attention and layers, then with ours."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default=DEVICE)
    parser.add_argument("--json", type=Path, help="write the results here, too")
    given = parser.parse_args()
    count = 64 if given.device == "cuda" else 12
    runs = {}
    print("step    torch: reward, KL, unequal tokens    ours: reward, KL, unequal tokens")
    for attention in ("sdpa", OURS):
        model = make_model(given.device, attention, attention == OURS)
        runs[attention] = train(model, given.device, count)
    for step, pair in enumerate(zip(*runs.values(), strict=True)):
        cells = (f"{r['reward']:.3f} {r['kl']:9.2e} {r['unequal']:7.1%}" for r in pair)
        print(f"{step:>4}    " + "             ".join(cells))
    if given.json:
        given.json.write_text(json.dumps(runs, indent=1))
    ours = runs[OURS]
    learned = ours[-1]["reward"] > ours[0]["reward"]
    return int(not learned or any(result["kl"] or result["unequal"] for result in ours))


if __name__ == "__main__":
    sys.exit(main())
