"""FlashAttention-2's algorithm as torch code with a tensor of the inputs' dtype after every line.

This is what failed in the published training (Qiu and Yao, arXiv 2510.04212): scores, P, the
running maximum and sum, O after every block of keys, lse and D are all tensors of 16 bits. Kernels
differ: their scores, sums and O are float32 until O has been divided by l. Equal maxima are rare
there; here scores of 8 bits are equal often, and P is then exactly 1 more than once.
"""

from __future__ import annotations

from typing import Any

import torch

from .masks import Call

_KEYS = 64  # of a block
_NEAR = 1e-3  # scores this close to a block's maximum count as equal to it


class _Lines(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, shifted: bool
    ) -> torch.Tensor:
        lowest = torch.finfo(q.dtype).min
        row_max = q.new_full((*q.shape[:-1], 1), lowest)
        row_sum = torch.zeros_like(row_max)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        for start in range(0, k.shape[-2], _KEYS):
            keys = slice(start, start + _KEYS)
            scores = _scores(call, keys)
            hidden = scores == -torch.inf
            block_max = scores.amax(-1, keepdim=True).clamp(min=lowest)
            if shifted:
                tied = (scores >= block_max - _NEAR).sum(-1, keepdim=True) > 1
                moved = torch.where(block_max > 0, 2 * block_max, 0.0)
                block_max = torch.where(tied & (block_max > lowest), moved, block_max)
            after = torch.maximum(row_max, block_max)
            probs = (scores - after).exp().masked_fill(hidden, 0.0)
            old = (row_max - after).exp()
            row_sum = old * row_sum + probs.sum(-1, keepdim=True)
            out = out * old + probs @ v[..., keys, :]
            row_max = after
        total = torch.where(row_sum == 0, 1.0, row_sum)
        out = out / total
        ctx.save_for_backward(q, k, v, call.mask, out, total.log() + row_max)
        ctx.scale = call.scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        call = Call(q, k, v, mask, scale=ctx.scale)
        dout = grads[0]
        delta = (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, k, v))
        for start in range(0, k.shape[-2], _KEYS):
            keys = slice(start, start + _KEYS)
            probs = (_scores(call, keys) - lse).exp()
            dprobs = dout @ v[..., keys, :].mT
            dscores = probs * ctx.scale * (dprobs - delta)
            dq += dscores @ k[..., keys, :]
            dk[..., keys, :] = dscores.mT @ q
            dv[..., keys, :] = probs.mT @ dout
        return dq, dk, dv, None, None


def _scores(call: Call, keys: slice) -> torch.Tensor:
    scores = call.q @ call.k[..., keys, :].mT * call.factor
    return scores if call.mask is None else scores + call.bias_of(keys)


def torch_lines(call: Call, shifted: bool) -> torch.Tensor:
    """Attention line by line in the dtype of its tensors.

    `shifted` is the published remedy: where a row has several scores at a block's maximum, it is
    doubled if it is positive, and 0 if it is negative, so that no P is 1.
    """
    call = call.plain()
    out: torch.Tensor = _Lines.apply(call.q, call.k, call.v, call, shifted)  # type: ignore[no-untyped-call]
    return out
