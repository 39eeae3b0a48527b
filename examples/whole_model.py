"""A whole model whose logits do not depend on batch, chunks or decode.

Attention of flash_attn_deterministic has the same bits in every batch. Activations and rotary
embeddings of a Llama treat each token alone. Matrix products and norms do not: their kernel depends
on the number of rows. Here they run over blocks of a fixed number of rows, padded with zeros, so
that one kernel does all of them. That is simple, but slow: the time is printed.

    python -m pip install transformers
    python examples/whole_model.py            # on the GPU if there is one
    python examples/whole_model.py --device cpu

It prints whether the logits of one sequence have the same bits alone, in a batch, in chunks and
token by token, with this attention and with torch's, and exits with 1 if ours do not.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

ROWS = 64  # of a block


class InBlocks(torch.nn.Module):
    """Runs a module that treats rows alike on blocks of `ROWS` rows, always of this size."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Takes and returns (..., features)."""
        rows = hidden.flatten(0, -2)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % ROWS))
        # Copies: every block is contiguous and aligned alike.
        blocks = [self.module(block.clone()) for block in torch.split(padded, ROWS)]
        return torch.cat(blocks)[: rows.shape[0]].view(*hidden.shape[:-1], -1)


def put_into_blocks(model: torch.nn.Module) -> None:
    """Wraps every linear layer and every norm of a model."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear) or type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, InBlocks(child))


def make_model(device: str, attention: str) -> Any:
    """Returns a small Llama with random weights, the same ones each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    large = device == "cuda"
    config = LlamaConfig(
        hidden_size=1024 if large else 128,
        intermediate_size=2816 if large else 256,
        num_hidden_layers=8 if large else 2,
        num_attention_heads=16 if large else 4,
        num_key_value_heads=4 if large else 2,
        head_dim=64 if large else 32,
        vocab_size=1000,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(
        config, attn_implementation=attention, dtype=torch.bfloat16
    )
    return model.to(device).eval()


def alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Computes the logits of the first sequence."""
    logits: torch.Tensor = model(ids[:1]).logits[0]
    return logits


def in_a_batch(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Computes all sequences; returns the logits of the first."""
    logits: torch.Tensor = model(ids).logits[0]
    return logits


def in_chunks(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Computes the first sequence in chunks of 100 tokens, with a cache."""
    return _in_steps(model, ids, [*range(0, ids.shape[1], 100), ids.shape[1]])


def token_by_token(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Computes all but the last 20 tokens, then those one at a time."""
    first = ids.shape[1] - 20
    return _in_steps(model, ids, [0, *range(first, first + 21)])


def _in_steps(model: Any, ids: torch.Tensor, starts: list[int]) -> torch.Tensor:
    from transformers import DynamicCache

    cache = DynamicCache()
    parts = [ids[:1, begin:end] for begin, end in itertools.pairwise(starts)]
    # By position: the cache's name changed in transformers 5.24. Before it: mask and position_ids.
    return torch.cat([model(part, None, None, cache).logits[0] for part in parts])


WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "in a batch": in_a_batch,
    "in chunks of 100": in_chunks,
    "token by token": token_by_token,
}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns whether two tensors in bfloat16 are equal bit for bit."""
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


def compare(model: Any, ids: torch.Tensor) -> dict[str, bool]:
    """Returns, for each way to compute it, whether the first sequence has the bits it has alone."""
    expected = alone(model, ids)
    return {name: same_bits(way(model, ids), expected) for name, way in WAYS.items()}


def seconds(model: Any, ids: torch.Tensor) -> float:
    """Returns the least time of 5 forward passes."""
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        model(ids)
        if ids.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


@torch.no_grad()
def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=best)
    device = parser.parse_args().device
    import flash_attn_deterministic.integrations.transformers as ours

    batch, seqlen = (8, 1000) if device == "cuda" else (3, 250)
    ids = torch.randint(0, 1000, (batch, seqlen), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)
    kept = {}
    print(f"{'':<56}" + "".join(f"{name:>20}" for name in WAYS) + f"{'ms, batch':>12}")
    for attention in ("sdpa", ours.NAME):
        for blocks in (False, True):
            model = make_model(device, attention)
            if blocks:
                put_into_blocks(model)
            kept = compare(model, ids)
            words = ["same bits" if equal else "other bits" for equal in kept.values()]
            title = attention + (", products and norms in blocks" if blocks else "")
            cost = 1e3 * seconds(model, ids)
            print(f"{title:<56}" + "".join(f"{word:>20}" for word in words) + f"{cost:>12.1f}")
    return int(not all(kept.values()))


if __name__ == "__main__":
    sys.exit(main())
