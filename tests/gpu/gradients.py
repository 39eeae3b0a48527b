"""What the tests of the backward share: calls and parts of them, definitions, comparison."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from flash_attn_deterministic import flash_attn_varlen_func
from flash_attn_deterministic.reference.dropout import keep_mask
from flash_attn_deterministic.verify.contract.call import Attention, Call
from flash_attn_deterministic.verify.features import FEATURES as ALL
from flash_attn_deterministic.verify.features import options_of

from tests.gpu.attention import DTYPES, assert_same, make_qkv, skip_unless_built

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Sinks have a file of their own.
_HERE = [name for name, options in ALL.items() if "sink" not in options]
DROPOUT_FEATURES = [name for name in _HERE if "dropout" in name]
FEATURES = [name for name in _HERE if name not in (*DROPOUT_FEATURES, "residual")]
ALL_FEATURES = [*FEATURES, *DROPOUT_FEATURES]


@dataclass(frozen=True)
class GradientCall(Call):
    """A call of the contract's kind whose results are dq, dk and dv.

    With dropout its mask is drawn from `seed`, so that it has the same one each time.
    """

    seed: int = 5

    def forward(self) -> tuple[Gradients, torch.Tensor]:
        """Runs the forward.

        Returns:
            What its gradients belong to, and out.
        """
        q, k, v = (t.detach().requires_grad_() for t in (self.q, self.k, self.v))
        torch.manual_seed(self.seed)
        out = self.attention.dense(q, k, v, **self.keywords)
        return (q, k, v), out

    def __call__(self) -> Gradients:  # type: ignore[override]
        leaves, out = self.forward()
        dq, dk, dv = torch.autograd.grad(out, leaves, self.dout)
        return dq, dk, dv

    def repeated(self) -> Callable[[], Gradients]:
        """Runs the forward once, and returns what runs the backward alone."""
        leaves, out = self.forward()

        def backward() -> Gradients:
            dq, dk, dv = torch.autograd.grad(out, leaves, self.dout, retain_graph=True)
            return dq, dk, dv

        return backward

    def lengths(self, seqlen_q: int, seqlen_k: int) -> GradientCall:
        """The first queries and keys alone."""
        return self.queries(0, seqlen_q).keys(seqlen_k)


def draw_call(
    head_dim: int,
    dtype: str,
    feature: str = "full",
    *,
    batch: int = 2,
    seqlen_q: int = 333,
    seqlen_k: int | None = None,
    nheads: int = 4,
    nheads_k: int = 2,
    seed: int = 0,
) -> GradientCall:
    """Draws a call with a feature of ALL_FEATURES; skips the test if the wheel can't run it."""
    skip_unless_built(head_dim, dtype)
    skip_unless_built(head_dim, dtype, "bwd")
    shape = (batch, seqlen_q, nheads, head_dim)
    q, k, v = make_qkv(shape, seqlen_k, nheads_k, dtype=DTYPES[dtype], seed=seed)
    dout = make_qkv(shape, dtype=DTYPES[dtype], seed=seed + 1000)[0]
    options = options_of(feature)
    slopes = None
    if options.pop("alibi", False):
        generator = torch.Generator("cuda").manual_seed(seed)
        slopes = 0.3 * torch.rand((batch, nheads), generator=generator, device="cuda")
    return GradientCall(Attention.installed(), q, k, v, dout, slopes, options)


def run_packed(calls: Sequence[GradientCall], spare: int = 0) -> list[Gradients]:
    """Runs calls of one sequence each as one packed call.

    Args:
        calls: of one sequence each, with the same options.
        spare: rows of NaN behind the last sequence, in every tensor. Their gradients must be 0.

    Returns:
        The gradients of each sequence, as the call alone gives them.
    """

    def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        shape = (spare, *tensors[0].shape[2:])
        garbage = torch.full(shape, math.nan, dtype=tensors[0].dtype, device=tensors[0].device)
        return torch.cat([*(t[0] for t in tensors), garbage]).requires_grad_()

    q, k, v, dout = (
        packed([getattr(call, name) for call in calls]) for name in ("q", "k", "v", "dout")
    )
    starts_q = [0, *itertools.accumulate(call.q.shape[1] for call in calls)]
    starts_k = [0, *itertools.accumulate(call.k.shape[1] for call in calls)]
    slopes = [call.slopes for call in calls if call.slopes is not None]
    torch.manual_seed(calls[0].seed)
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        int32(starts_q),
        int32(starts_k),
        max(call.q.shape[1] for call in calls),
        max(call.k.shape[1] for call in calls),
        alibi_slopes=torch.cat(slopes) if slopes else None,
        **calls[0].options,
    )
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.detach())
    for gradient, starts in ((dq, starts_q), (dk, starts_k), (dv, starts_k)):
        assert not gradient[starts[-1] :].count_nonzero(), "rows that no sequence owns are not 0"
    return [
        (dq[None, a:b], dk[None, c:d], dv[None, c:d])
        for (a, b), (c, d) in zip(
            itertools.pairwise(starts_q), itertools.pairwise(starts_k), strict=True
        )
    ]


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def assert_same_gradients(left: Gradients, right: Gradients) -> None:
    """Asserts that dq, dk and dv are equal bit for bit."""
    assert_same(left, right, ("dq", "dk", "dv"))


def rng_state(seed: int) -> torch.Tensor:
    """The seed and offset that a call with dropout draws first after torch.manual_seed(seed)."""
    from flash_attn_deterministic.interface.call import draw_rng_state

    torch.manual_seed(seed)
    return draw_rng_state(torch.device("cuda"))


def visible_keys(
    seqlen_q: int, seqlen_k: int, causal: bool, window_size: tuple[int, int]
) -> torch.Tensor:
    """Which keys a query sees: (seqlen_q, seqlen_k), bool."""
    row = torch.arange(seqlen_q, device="cuda")[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device="cuda")
    left, right = window_size
    right = 0 if causal else right
    visible = torch.ones((seqlen_q, seqlen_k), dtype=torch.bool, device="cuda")
    if left >= 0:
        visible &= key >= row - left
    if right >= 0:
        visible &= key <= row + right
    return visible


def kept(call: GradientCall) -> torch.Tensor:
    """The dropout mask of a call: (batch, nheads, seqlen_q, seqlen_k), bool."""
    batch, seqlen_q, nheads, _ = call.q.shape
    return keep_mask(
        rng_state(call.seed),
        call.options["dropout_p"],
        torch.arange(batch, device="cuda"),
        torch.arange(nheads, device="cuda"),
        (0, seqlen_q),
        (0, call.k.shape[1]),
    )
