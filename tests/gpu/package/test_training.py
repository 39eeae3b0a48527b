"""Training a small transformer: the same losses, weights and gradients each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from flash_attn_deterministic import flash_attn_qkvpacked_func, flash_attn_varlen_qkvpacked_func

from tests.gpu.attention import same_bits, skip_unless_built
from tests.gpu.gradients import int32

pytestmark = pytest.mark.gpu

LAYERS, NHEADS, HEAD_DIM, VOCABULARY = 2, 4, 64, 97
WIDTH = NHEADS * HEAD_DIM
LENGTHS = (333, 200, 129, 64)
STEPS = 50


@pytest.fixture(autouse=True)
def deterministic_torch() -> Iterator[None]:
    """torch's own part must repeat too, and ours must be accepted without a warning."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Layer(torch.nn.Module):
    """Attention and a feed-forward network; all but attention goes token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., WIDTH) to q, k and v (..., 3, nheads, head_dim)."""
        qkv: torch.Tensor = self.qkv(self.norms[0](x))
        return qkv.reshape(*x.shape[:-1], 3, NHEADS, HEAD_DIM)

    def combine(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Adds what was attended to, (..., nheads, head_dim), and the network's own part to x."""
        x = x + self.out(attended.reshape(x.shape))
        result: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))
        return result


class Model(torch.nn.Module):
    """Guesses the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def loss(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of one sequence; x is (length, WIDTH), what the last layer gives."""
        scores = self.head(x[:-1]).float()
        return torch.nn.functional.cross_entropy(scores, tokens[1:])


def make_model() -> Model:
    torch.manual_seed(0)
    return Model().to("cuda", torch.bfloat16)


def make_tokens(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Sequences in which a token follows from the one before it, most of the time."""
    generator = torch.Generator().manual_seed(1)
    steps = (torch.randint(1, 3, (length,), generator=generator) for length in lengths)
    return [(step.cumsum(0) % VOCABULARY).to("cuda") for step in steps]


def attend_together(qkv: list[torch.Tensor], packed: bool, dropout_p: float) -> list[torch.Tensor]:
    """Attention of some sequences, each (length, 3, nheads, head_dim), in one call."""
    lengths = [one.shape[0] for one in qkv]
    if packed:
        starts = int32([sum(lengths[:i]) for i in range(len(qkv) + 1)])
        out = flash_attn_varlen_qkvpacked_func(
            torch.cat(qkv), starts, max(lengths), dropout_p, causal=True
        )
        return list(torch.split(out, lengths))
    return list(flash_attn_qkvpacked_func(torch.stack(qkv), dropout_p, causal=True))


def losses_of(
    model: Model, tokens: list[torch.Tensor], packed: bool, dropout_p: float = 0.0
) -> list[torch.Tensor]:
    """The loss of each sequence.

    Attention takes them together. All else goes sequence by sequence: the order of sums in torch's
    matrix products follows from their shapes.
    """
    states = [model.embedding(one) for one in tokens]
    for layer in model.layers:
        assert isinstance(layer, Layer)
        attended = attend_together([layer.project(x) for x in states], packed, dropout_p)
        states = [layer.combine(x, own) for x, own in zip(states, attended, strict=True)]
    return [model.loss(x, one) for x, one in zip(states, tokens, strict=True)]


def train(packed: bool, dropout_p: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = make_model()
    tokens = make_tokens(LENGTHS if packed else (333,) * 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(7)
    history = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack(losses_of(model, tokens, packed, dropout_p)).mean()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        history.append(loss.detach())
    return torch.stack(history), [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("dropout_p", [0.0, 0.2], ids=["plain", "dropout"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_training_repeats(packed: bool, dropout_p: float) -> None:
    skip_unless_built(HEAD_DIM, "bf16", "bwd")
    losses, weights = train(packed, dropout_p)
    other = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    busy = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(200):
            other = (other @ other).clamp(-1, 1)
    again, weights_again = train(packed, dropout_p)
    torch.cuda.synchronize()
    assert same_bits(losses, again)
    assert all(map(same_bits, weights, weights_again))
    assert losses[-1] < losses[0] - 0.5  # it learns something


def gradients_of_each(
    micro_batch: int, packed: bool, lengths: tuple[int, ...]
) -> list[list[torch.Tensor]]:
    """For each sequence: the loss, and the gradients of all weights that come from it."""
    model, tokens = make_model(), make_tokens(lengths)
    found = []
    for begin in range(0, len(tokens), micro_batch):
        losses = losses_of(model, tokens[begin : begin + micro_batch], packed)
        for loss in losses:
            gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            # The other sequences add zeros, which turn -0 into 0.
            found.append([loss.detach(), *(gradient + 0.0 for gradient in gradients)])
    return found


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_gradients_of_a_sequence_do_not_know_the_micro_batch(
    micro_batch: int, packed: bool
) -> None:
    skip_unless_built(HEAD_DIM, "bf16", "bwd")
    lengths = LENGTHS if packed else (333,) * 4
    alone = gradients_of_each(1, False, lengths)
    together = gradients_of_each(micro_batch, packed, lengths)
    assert len(alone) == len(together) == 4
    for one, other in zip(alone, together, strict=True):
        assert all(map(same_bits, one, other))
        assert all(gradient.abs().max() > 0 for gradient in one)
