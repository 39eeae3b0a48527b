"""Training repeats: the same losses, weights and gradients each time."""

from __future__ import annotations

import pytest
import torch
from bits import bits_equal
from flash_attn_deterministic import flash_attn_qkvpacked_func, flash_attn_varlen_qkvpacked_func

NHEADS, HEAD_DIM, VOCABULARY, LENGTH, STEPS = 2, 16, 23, 33, 6
WIDTH = NHEADS * HEAD_DIM


class Model(torch.nn.Module):
    """One layer of a transformer that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def project(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps (length,) tokens to q, k and v (length, 3, nheads, head_dim)."""
        qkv: torch.Tensor = self.qkv(self.embedding(tokens))
        return qkv.reshape(-1, 3, NHEADS, HEAD_DIM)

    def loss(self, attended: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Maps the attention of (length,) tokens, (length, nheads, head_dim), to a loss."""
        scores = self.head(self.embedding(tokens) + attended.reshape(-1, WIDTH))
        return torch.nn.functional.cross_entropy(scores[:-1].float(), tokens[1:])


def _model() -> Model:
    torch.manual_seed(0)
    return Model().to(torch.bfloat16)


def _tokens(number: int, length: int = LENGTH) -> torch.Tensor:
    """Sequences in which a token follows from the one before it, most of the time."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(1, 3, (number, length), generator=generator)
    return steps.cumsum(1) % VOCABULARY


def _train(dropout_p: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model, tokens = _model(), _tokens(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    torch.manual_seed(7)
    for _ in range(STEPS):
        optimizer.zero_grad()
        qkv = torch.stack([model.project(sequence) for sequence in tokens])
        attended = flash_attn_qkvpacked_func(qkv, dropout_p, causal=True)
        loss = torch.stack(list(map(model.loss, attended, tokens))).mean()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("dropout_p", [0.0, 0.2], ids=["plain", "dropout"])
def test_training_repeats(dropout_p: float) -> None:
    losses, weights = _train(dropout_p)
    again, weights_again = _train(dropout_p)
    assert bits_equal(losses, again)
    assert all(bits_equal(a, b) for a, b in zip(weights, weights_again, strict=True))
    assert losses[-1] < losses[0] - 0.1


def _gradients(micro_batch: int, packed: bool) -> list[torch.Tensor]:
    """The gradient of each sequence's q, k and v, where micro_batch sequences go together."""
    model, tokens = _model(), _tokens(4)
    found: list[torch.Tensor] = []
    for some in torch.split(tokens, micro_batch):
        # Layer by layer and sequence by sequence: the order of sums in torch's own matrix products
        # follows from their shape.
        leaves = [model.project(sequence).detach().requires_grad_() for sequence in some]
        if packed:
            starts = torch.arange(0, micro_batch + 1, dtype=torch.int32) * LENGTH
            flat = flash_attn_varlen_qkvpacked_func(torch.cat(leaves), starts, LENGTH, causal=True)
            attended = flat.unflatten(0, (micro_batch, LENGTH))  # type: ignore[no-untyped-call]
        else:
            attended = flash_attn_qkvpacked_func(torch.stack(leaves), causal=True)
        total = torch.stack(list(map(model.loss, attended, some))).sum()
        found += torch.autograd.grad(total, leaves)
    return found


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_gradients_of_a_sequence_do_not_depend_on_the_micro_batch(
    micro_batch: int, packed: bool
) -> None:
    alone = _gradients(1, packed=False)
    together = _gradients(micro_batch, packed)
    assert len(alone) == len(together) == 4
    assert all(bits_equal(a, b) for a, b in zip(alone, together, strict=True))
    assert all(x.abs().max() > 0 for x in alone)
