"""Attention by its definition, in float64 and with explicit roundings, on any device."""

from __future__ import annotations

import math

import torch

_SCORES = 2**26  # float64 scores in flight: 512 MiB a matrix

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def hidden_keys(rows: torch.Tensor, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """Returns which keys the causal mask, aligned to the bottom right, hides from some rows."""
    key = torch.arange(seqlen_k, device=rows.device)
    return key > rows[:, None] + seqlen_k - seqlen_q


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, round_to: torch.dtype | None
) -> torch.Tensor:
    """Computes softmax(q k^T / sqrt(head_dim)) v in float64.

    Args:
        q: (batch, seqlen_q, nheads, head_dim).
        k: (batch, seqlen_k, nheads_k, head_dim).
        v: like k.
        causal: aligned to the bottom right.
        round_to: None: exact. Otherwise exponentials and result are rounded to it, as the kernels
            do with their inputs' dtype.

    Returns:
        (batch, seqlen_q, nheads, head_dim), float64; rows without a visible key are 0.
    """
    batch, seqlen_q, nheads, head_dim = q.shape
    seqlen_k, nheads_k = k.shape[1:3]
    group = nheads // nheads_k
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    step = max(1, _SCORES // (group * seqlen_k))
    for b in range(batch):
        for h in range(nheads_k):
            shared = slice(h * group, (h + 1) * group)
            keys, values = k[b, :, h].double(), v[b, :, h].double()
            for begin in range(0, seqlen_q, step):
                part = slice(begin, min(begin + step, seqlen_q))
                scores = q[b, part, shared].double().transpose(0, 1) @ keys.T * head_dim**-0.5
                if causal:
                    row = torch.arange(part.start, part.stop, device=q.device)
                    scores.masked_fill_(hidden_keys(row, seqlen_q, seqlen_k), -math.inf)
                largest = scores.amax(-1, keepdim=True).clamp_min(-1e300)
                weights = torch.exp(scores - largest)
                total = weights.sum(-1, keepdim=True)
                weights = _rounded(weights, round_to)
                result = weights @ values / total.masked_fill(total == 0, 1.0)
                out[b, part, shared] = _rounded(result, round_to).transpose(0, 1)
    return out


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    causal: bool,
    round_to: torch.dtype | None,
) -> Triple:
    """Computes dq, dk and dv of `forward` in float64, like q, k and v.

    With round_to, out, weights, their gradients and the results are rounded. Tensors of all scores
    must fit in memory.
    """
    seqlen_q, nheads, head_dim = q.shape[1:]
    seqlen_k, nheads_k = k.shape[1:3]
    group, scale = nheads // nheads_k, head_dim**-0.5
    q64, dout64 = (t.double().transpose(1, 2) for t in (q, dout))
    k64, v64 = (t.double().repeat_interleave(group, dim=2).transpose(1, 2) for t in (k, v))
    scores = q64 @ k64.mT * scale
    if causal:
        row = torch.arange(seqlen_q, device=q.device)
        scores.masked_fill_(hidden_keys(row, seqlen_q, seqlen_k), -math.inf)
    probs = torch.softmax(scores, -1).nan_to_num(0.0)
    del scores
    out = _rounded(_rounded(probs, round_to) @ v64, round_to)
    delta = (dout64 * out).sum(-1, keepdim=True)
    dscores = _rounded(probs * (dout64 @ v64.mT - delta), round_to)
    dq = dscores @ k64 * scale
    dk = dscores.mT @ q64 * scale
    dv = _rounded(probs, round_to).mT @ dout64
    dk, dv = (t.transpose(1, 2).unflatten(2, (nheads_k, group)).sum(3) for t in (dk, dv))
    return _rounded(dq.transpose(1, 2), round_to), _rounded(dk, round_to), _rounded(dv, round_to)


def _rounded(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None else tensor.to(dtype).double()
