"""Trains a small model with its sequence split over ranks: the losses and weights of one device.

    torchrun --nproc-per-node 2 examples/train_over_ranks.py                 # GPUs, NCCL
    torchrun --nproc-per-node 2 examples/train_over_ranks.py --device cpu    # gloo

Each rank trains the same model alone as well, on the whole sequence, and compares: the loss of each
step, and all weights after the last, bit for bit. The exit status is 1 if they differ.

This package keeps the bits of attention equal. Three other things in a model have other bits when a
rank has fewer rows than one device. The example avoids them:

- The kernel of a matrix product depends on the number of rows. Every product and norm runs on
  blocks of a fixed number of rows, so that one kernel does all of them, as in whole_model.py.
- The gradient of a weight is a sum over all rows, and an all-reduce adds the ranks' parts in an
  order of its own. Here the parts of all blocks are gathered, and added in the order of the blocks.
  That needs memory for one gradient per block, too much for large models.
- The loss is a sum over rows as well, and is added in the same way.

Without this, attention is still equal, but weights differ more and more over many steps.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from typing import Any

import flash_attn_deterministic
import torch
import torch.distributed as dist
from flash_attn_deterministic import distributed as over_ranks

ROWS = 16  # of a block
VOCABULARY, NHEADS, NHEADS_K, HEAD_DIM, LAYERS = 64, 4, 2, 32, 2
WIDTH = NHEADS * HEAD_DIM


class Place:
    """Where a sequence is: whole on this process (group None), or split over a group of ranks."""

    def __init__(self, group: Any = None) -> None:
        self.options = {"group": group, "order": "zigzag"}
        self.is_cut = group is not None

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tokens, dimension 0, of this rank."""
        return over_ranks.shard(tensor, 0, **self.options) if self.is_cut else tensor

    def add_blocks(self, parts: torch.Tensor) -> torch.Tensor:
        """Adds the parts (blocks of this rank, ...) of all blocks, in their order."""
        if self.is_cut:
            # Blocks are in the order of their tokens, so that unshard treats a block as a token.
            parts = over_ranks.unshard(parts, 0, **self.options)
        total = torch.zeros_like(parts[0])
        for part in parts:
            total += part
        return total

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attends (rows, heads, head_dim), causally."""
        q, k, v = q[None], k[None], v[None]
        if self.is_cut:
            out = over_ranks.flash_attn_func(q, k, v, causal=True, **self.options)
        else:
            out = flash_attn_deterministic.flash_attn_func(q, k, v, causal=True)
        return out[0]  # type: ignore[no-any-return]


class BlockProduct(torch.autograd.Function):
    """rows @ weight.T, block by block; the weight's gradient is that of the whole sequence."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, place: Place) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.place = place
        return torch.cat([block.clone() @ weight.T for block in torch.split(rows, ROWS)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weight = ctx.saved_tensors
        blocks = [block.clone() for block in torch.split(gradient, ROWS)]
        of_rows = torch.cat([block @ weight for block in blocks])
        parts = [
            block.T.float() @ own.clone().float()
            for block, own in zip(blocks, torch.split(rows, ROWS), strict=True)
        ]
        return of_rows, ctx.place.add_blocks(torch.stack(parts)).to(weight.dtype), None


def norm(rows: torch.Tensor) -> torch.Tensor:
    """Scales each row to a root mean square of 1, block by block."""
    blocks = [block.clone().float() for block in torch.split(rows, ROWS)]
    scaled = [b * torch.rsqrt((b * b).mean(1, keepdim=True) + 1e-6) for b in blocks]
    return torch.cat(scaled).to(rows.dtype)


class Model(torch.nn.Module):
    """A transformer without position embeddings; the causal mask gives some order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(outputs: int, inputs: int) -> torch.nn.Parameter:
            drawn = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
            return torch.nn.Parameter(drawn.to(torch.bfloat16))

        self.embedding = weight(WIDTH, VOCABULARY)
        self.qkv = torch.nn.ParameterList(
            weight((NHEADS + 2 * NHEADS_K) * HEAD_DIM, WIDTH) for _ in range(LAYERS)
        )
        self.after = torch.nn.ParameterList(weight(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = weight(VOCABULARY, WIDTH)

    def loss(self, tokens: torch.Tensor, following: torch.Tensor, place: Place) -> torch.Tensor:
        """Returns the losses of this rank's tokens (rows,), each guessing the one after it."""

        def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = BlockProduct.apply(rows, weight, place)  # type: ignore[no-untyped-call]
            return result

        words = torch.nn.functional.one_hot(tokens, VOCABULARY).to(torch.bfloat16)
        hidden = product(words, self.embedding)
        for qkv, after in zip(self.qkv, self.after, strict=True):
            heads = product(norm(hidden), qkv).view(-1, NHEADS + 2 * NHEADS_K, HEAD_DIM)
            attended = place.attend(*torch.split(heads, [NHEADS, NHEADS_K, NHEADS_K], dim=1))
            hidden = hidden + product(attended.flatten(1), after)
        scores = product(norm(hidden), self.head).float()
        blocks = zip(torch.split(scores, ROWS), torch.split(following, ROWS), strict=True)
        return torch.cat(
            [torch.nn.functional.cross_entropy(s.clone(), t, reduction="none") for s, t in blocks]
        )


def train(place: Place, steps: int, length: int, device: str) -> tuple[list[str], str]:
    """Trains the model from its start.

    Returns:
        The loss of each step in hex, and a hash of all weights in the end.
    """
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.randint(0, VOCABULARY, (length + 1,), generator=torch.Generator().manual_seed(1))
    tokens, following = (place.own(part).to(device) for part in (text[:-1], text[1:]))
    losses = []
    for _ in range(steps):
        each = model.loss(tokens, following, place)
        optimizer.zero_grad()
        # The mean over the tokens of all ranks: a power of two, so that dividing rounds nothing.
        torch.autograd.backward([each / length], [torch.ones_like(each)])
        optimizer.step()
        total = place.add_blocks(torch.stack([b.sum() for b in torch.split(each.detach(), ROWS)]))
        losses.append(float(total / length).hex())
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().view(torch.int16).numpy().tobytes())
    return losses, digest.hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Trains twice, and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=256, help="tokens of the whole sequence")
    arguments = parser.parse_args(argv)
    device = arguments.device
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    try:
        if device == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank())
        over = train(Place(dist.group.WORLD), arguments.steps, arguments.length, device)
        alone = train(Place(), arguments.steps, arguments.length, device)
        if dist.get_rank() == 0:
            for step, losses in enumerate(zip(over[0], alone[0], strict=True)):
                cut, whole = map(float.fromhex, losses)
                print(f"step {step:>2}: {cut:.6f} over {dist.get_world_size()} ranks, {whole:.6f}")
            print(f"losses and weights have the same bits: {'yes' if over == alone else 'no'}")
        return int(over != alone)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
