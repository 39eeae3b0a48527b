"""A whole model whose logits do not depend on batch, chunks, decode or training.

Attention of flash_attn_deterministic has the same bits in every batch. Activations and rotary
embeddings of a Llama treat each token alone. Matrix products and norms of the libraries do not:
their order of additions depends on the number of rows. invariant_layers.py beside this file has
layers that do.

    python -m pip install transformers
    python examples/whole_model.py            # on the GPU if there is one
    python examples/whole_model.py --device cpu

It prints whether the logits of one sequence have the same bits alone, in a batch, in chunks, token
by token and with gradients, with this attention and with torch's, and the time of a batch and of a
decode step. It exits with 1 if ours differ.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from invariant_layers import make_invariant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OURS = "flash_attn_deterministic"


def make_model(device: str, attention: str, invariant: bool) -> Any:
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
    if attention == OURS:
        import flash_attn_deterministic.integrations.transformers  # noqa: F401  (registers it)
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(
        config, attn_implementation=attention, dtype=torch.bfloat16
    ).to(device)
    if invariant:
        make_invariant(model, device)
    return model.eval()


def with_cache(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Computes the logits of ids (batch, new tokens) behind the tokens in a cache."""
    # transformers renamed the argument in 5.24.
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    logits: torch.Tensor = model(ids, **{name: cache}).logits
    return logits


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


def with_gradients(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Computes all sequences as a trainer does; returns the logits of the first."""
    with torch.enable_grad():
        logits: torch.Tensor = model(ids).logits
        logits.float().logsumexp(-1).mean().backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    return logits.detach()[0]


def _in_steps(model: Any, ids: torch.Tensor, starts: list[int]) -> torch.Tensor:
    from transformers import DynamicCache

    cache = DynamicCache()
    parts = [ids[:1, begin:end] for begin, end in itertools.pairwise(starts)]
    return torch.cat([with_cache(model, part, cache)[0] for part in parts])


WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "in a batch": in_a_batch,
    "in chunks": in_chunks,
    "token by token": token_by_token,
    "with gradients": with_gradients,
}


def compare(model: Any, ids: torch.Tensor) -> dict[str, bool]:
    """Returns, for each way to compute it, whether the first sequence has the bits it has alone."""
    expected = alone(model, ids).view(torch.int16)
    return {
        name: torch.equal(way(model, ids).view(torch.int16), expected) for name, way in WAYS.items()
    }


def in_turns(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Returns the median time of each call, in ms; they take turns, after two rounds to warm up."""
    rounds = []
    for _ in range(repeats + 2):
        row = []
        for call in calls:
            begin = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            row.append(1e3 * (time.perf_counter() - begin))
        rounds.append(row)
    return [statistics.median(times) for times in zip(*rounds[2:], strict=True)]


def times(models: Sequence[Any], ids: torch.Tensor, repeats: int) -> list[dict[str, float]]:
    """Returns the time of a batch without cache, and of one decode step of all its sequences."""
    from transformers import DynamicCache

    caches = [DynamicCache() for _ in models]
    for model, cache in zip(models, caches, strict=True):
        with_cache(model, ids, cache)
    each = list(zip(models, caches, strict=True))
    batch = in_turns([partial(model, ids) for model in models], repeats)
    step = in_turns([partial(with_cache, model, ids[:, -1:], c) for model, c in each], repeats)
    return [
        {"ms, batch": round(b, 1), "ms, decode step": round(s, 1)}
        for b, s in zip(batch, step, strict=True)
    ]


@torch.no_grad()
def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default=DEVICE)
    parser.add_argument("--json", type=Path, help="write the results here, too")
    given = parser.parse_args()
    batch, seqlen = (8, 1000) if given.device == "cuda" else (3, 150)
    ids = torch.randint(0, 1000, (batch, seqlen), generator=torch.Generator().manual_seed(1))
    ids = ids.to(given.device)
    kinds = list(itertools.product(("sdpa", OURS), (False, True)))
    models = [make_model(given.device, *kind) for kind in kinds]
    rows: list[dict[str, Any]] = []
    measured = times(models, ids, 30 if given.device == "cuda" else 3)
    for (attention, invariant), model, ms in zip(kinds, models, measured, strict=True):
        cells = {name: "same" if same else "other" for name, same in compare(model, ids).items()}
        layers = "invariant" if invariant else "torch's"
        row = {"attention": attention, "other layers": layers, **cells, **ms}
        if not rows:
            print("".join(f"{name:>16}" for name in row).lstrip())
        print("".join(f"{row[name]!s:>{max(16, len(name))}}" for name in row).lstrip())
        rows.append(row)
    if given.json:
        given.json.write_text(
            json.dumps({"batch": batch, "seqlen": seqlen, "rows": rows}, indent=1)
        )
    return int(not all(rows[-1][name] == "same" for name in WAYS))


if __name__ == "__main__":
    sys.exit(main())
