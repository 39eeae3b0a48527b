"""Attention by its definition: the one oracle of all checks, in plain torch on any device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

_SCORES = 2**26  # float64 scores in flight: 512 MiB a matrix

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Exact(NamedTuple):
    """What attention should return."""

    out: torch.Tensor  # (batch, seqlen_q, nheads, head_dim); 0 where no key is visible
    # (batch, nheads, seqlen_q); where no key is visible +inf, or the sink
    softmax_lse: torch.Tensor
    size: torch.Tensor  # like out: the sum of weights times |values|, which roundings scale with


@dataclass(frozen=True)
class Definition:
    """The options of a call, by the names that the package's functions have for them."""

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    alibi_slopes: torch.Tensor | None = None  # (batch, nheads)
    dropout_p: float = 0.0
    keep: torch.Tensor | None = None  # (batch, nheads, seqlen_q, seqlen_k), bool: not dropped
    dtype: torch.dtype = torch.float64  # of every step
    split_size: int | None = None  # changes no number
    learnable_sink: torch.Tensor | None = None  # (nheads,)
    dropout_seeds: torch.Tensor | None = None  # (batch,); `keep` says what they drop

    @torch.no_grad()
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Exact:
        """Computes out and softmax_lse of (batch, seqlen, heads, head_dim), a few rows at a
        time.
        """
        batch, seqlen_q, nheads, _ = q.shape
        keys, values = k.to(self.dtype), v.to(self.dtype)
        out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=self.dtype)
        size = torch.zeros_like(out)
        softmax_lse = out.new_full((batch, nheads, seqlen_q), math.inf)
        step = max(1, _SCORES // max(1, batch * nheads * k.shape[1]))
        for begin in range(0, seqlen_q, step):
            part = slice(begin, min(begin + step, seqlen_q))
            probs, softmax_lse[..., part] = self._weights(
                q[:, part].to(self.dtype), keys, slice(None), begin, seqlen_q
            )
            out[:, part] = _summed(probs, values)
            size[:, part] = _summed(probs, values.abs())
        return Exact(out, softmax_lse, size)

    @torch.no_grad()
    def max_logits(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Computes the largest score that a row of each head sees, (nheads,), without sinks."""
        batch, seqlen_q, nheads, _ = q.shape
        found = q.new_full((nheads,), -math.inf, dtype=self.dtype)
        step = max(1, _SCORES // max(1, batch * nheads * k.shape[1]))
        for begin in range(0, seqlen_q if k.shape[1] else 0, step):
            rows = q[:, begin : begin + step].to(self.dtype)
            scores, _ = self._scores(rows, k.to(self.dtype), slice(None), begin, seqlen_q)
            found = torch.maximum(found, scores.amax((0, 2, 3)))
        return found

    @torch.enable_grad()
    def gradients(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None = None,
    ) -> Triple:
        """Computes dq, dk and dv by autograd; all scores of a sequence must fit in memory.

        dlse is the gradient of softmax_lse, (batch, seqlen_q, nheads).
        """
        batch = q.shape[0]
        step = max(1, _SCORES // max(1, q.shape[1] * q.shape[2] * k.shape[1]))
        parts = []
        for begin in range(0, batch, step):
            part = slice(begin, begin + step)
            leaves = [t[part].detach().to(self.dtype).requires_grad_() for t in (q, k, v)]
            probs, lse = self._weights(leaves[0], leaves[1], part, 0, q.shape[1])
            outputs, given = [_summed(probs, leaves[2])], [dout[part].to(self.dtype)]
            if dlse is not None:
                outputs, given = [*outputs, lse], [*given, dlse[part].mT.to(self.dtype)]
            parts.append(torch.autograd.grad(outputs, leaves, given))
        dq, dk, dv = (torch.cat(own) for own in zip(*parts, strict=True))
        return dq, dk, dv

    def _weights(
        self, q: torch.Tensor, k: torch.Tensor, sequences: slice, first: int, seqlen_q: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights of rows from `first` on, after dropout, and softmax_lse.

        They are (batch, nheads, rows, seqlen_k) and (batch, nheads, rows); `sequences` says which
        of the call's, of `seqlen_q` rows each, q and k are.
        """
        (batch, rows, _, _), seqlen_k = q.shape, k.shape[1]
        scores, hidden = self._scores(q, k, sequences, first, seqlen_q)
        empty = hidden.all(-1)
        if self.learnable_sink is not None:
            sink = self.learnable_sink[:, None, None].to(self.dtype)
            scores = torch.cat([scores, sink.expand(batch, -1, rows, 1)], -1)
            empty = torch.zeros_like(empty)
        lse = scores.logsumexp(-1).masked_fill(empty, math.inf)
        # Of a row without keys every score is masked, so that none of its NaNs flows back.
        probs = torch.where(empty[:, None], 0.0, scores.softmax(-1)[..., :seqlen_k])
        if self.keep is not None:
            # The kernels divide by 1 - dropout_p as a float32.
            kept = float(torch.tensor(1.0 - self.dropout_p, dtype=torch.float32))
            part = self.keep[sequences, :, first : first + rows]
            probs = torch.where(part, probs / kept, 0.0)
        return probs, lse

    def _scores(
        self, q: torch.Tensor, k: torch.Tensor, sequences: slice, first: int, seqlen_q: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns scores, -inf where a key is hidden, and where that is; see `_weights`."""
        (batch, rows, nheads, head_dim), seqlen_k = q.shape, k.shape[1]
        scale = head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale
        # Query heads of a KV head are rows of one product.
        grouped = q.transpose(1, 2).reshape(batch, k.shape[2], -1, head_dim)
        scores = (grouped @ k.permute(0, 2, 3, 1) * scale).view(batch, nheads, rows, seqlen_k)
        if self.softcap > 0:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        row = torch.arange(first, first + rows, device=q.device) + seqlen_k - seqlen_q
        # Positive: the key comes after the query.
        distance = torch.arange(seqlen_k, device=q.device) - row[:, None]
        if self.alibi_slopes is not None:
            bias = self.alibi_slopes[sequences, :, None, None].double() * distance.abs()
            scores = scores - bias.to(self.dtype)
        left, right = self.window_size
        right = 0 if self.causal else right
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        return scores.masked_fill(hidden, -math.inf), hidden


def _summed(probs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Adds up values by their weights: (batch, rows, nheads, head_dim)."""
    (batch, nheads, rows, seqlen_k), nheads_k = probs.shape, v.shape[2]
    grouped = probs.reshape(batch, nheads_k, nheads // nheads_k * rows, seqlen_k)
    return (grouped @ v.transpose(1, 2)).view(batch, nheads, rows, v.shape[3]).transpose(1, 2)


def rotated(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """Rotates pairs of elements (RoFormer, Su et al., 2021), rounded once to x's dtype.

    x is (seqlen, nheads, head_dim), cos and sin (seqlen_ro, rotary_dim / 2), positions (seqlen,)
    their rows. Elements after rotary_dim stay. A pair is two neighbours (interleaved), or halves
    apart.
    """
    half = cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[positions, None]
    shape = (*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    pairs = x[..., : 2 * half].double().reshape(shape)
    axis = -1 if interleaved else -2
    turned = turn * torch.complex(*(part.contiguous() for part in pairs.unbind(axis)))
    both = torch.stack([turned.real, turned.imag], axis).flatten(-2)
    return torch.cat([both.to(x.dtype), x[..., 2 * half :]], -1)
