"""The calls of attention ops on one rank."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from ... import schemas, types
from ...ops.autograd import run
from ...types import Gradients, Lengths, Options, Scores

# Defines the ops.
from ...ops import library as library  # isort: skip
from ..planning.plan import KEY_BLOCK, Call, Mask

# Sums of dk, without softmax_scale, and of dv over some rows: (keys, nheads_k, head_dim), float32.
KeySums = tuple[torch.Tensor, torch.Tensor]


class Numbers(NamedTuple):
    """The numbers of a distributed call.

    Args:
        softmax_scale: factor of q k^T.
        mask: of the whole sequences.
        softcap: 0.0: none.
        split_size: tokens per split; 0: one split.
        deterministic: whether the forward is.
        deterministic_bwd: whether the backward is.
    """

    softmax_scale: float
    mask: Mask
    softcap: float
    split_size: int
    deterministic: bool
    deterministic_bwd: bool

    def options(self, call: Call) -> Options:
        """Returns what the op of a call takes."""
        scores = Scores(self.softmax_scale, *call.mask, self.softcap)
        return Options(0.0, scores, self.split_size, self.deterministic, self.deterministic_bwd)

    @property
    def key_align(self) -> int:
        """Returns where the keys of a call may begin without a change of bits."""
        return math.lcm(KEY_BLOCK, self.split_size or 1)


class Rows(NamedTuple):
    """Rows with their results: (rows, nheads, head_dim), and softmax_lse (rows, nheads)."""

    dout: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    softmax_lse: torch.Tensor

    def of(self, call: Call) -> Rows:
        """Returns the rows of a call."""
        return Rows(*(tensor[call.rows] for tensor in self))

    def of_heads(self, heads: slice) -> Rows:
        """Returns some query heads."""
        return Rows(*(tensor[:, heads] for tensor in self))


def forward_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scores: Numbers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes out (rows, nheads, head_dim) and softmax_lse (rows, nheads) of a call.

    Args:
        q: (rows, nheads, head_dim) of the call.
        k: (keys, nheads_k, head_dim) of the call.
        v: like k.
        call: lengths and mask.
        scores: of the whole.
    """
    lengths = _lengths(call, q.device)
    out, softmax_lse = run(schemas.forward_call((q, k, v), lengths, scores.options(call), None))
    return out, softmax_lse.transpose(0, 1)


def backward_call(
    rows: Rows, k: torch.Tensor, v: torch.Tensor, call: Call, scores: Numbers
) -> Gradients:
    """Computes dq, dk and dv of a call, rounded to the dtype of q.

    Args:
        rows: of the call.
        k: as in `forward_call`.
        v: like k.
        call: lengths and mask.
        scores: of the whole.
    """
    gradients: Gradients = run(_backward(rows, k, v, call, scores))
    return gradients


def backward_sums(
    rows: Rows, k: torch.Tensor, v: torch.Tensor, call: Call, scores: Numbers
) -> Gradients:
    """Computes dq of a call, rounded, and the sums of dk and dv over its rows.

    Args:
        rows: as in `backward_call`.
        k: as in `backward_call`.
        v: like k.
        call: lengths and mask.
        scores: of the whole.
    """
    results: Gradients = run(_backward(rows, k, v, call, scores, sums=True))
    return results


def finish(sums: KeySums, k: torch.Tensor, scores: Numbers) -> KeySums:
    """Returns dk and dv, rounded, from the sums over all rows.

    Args:
        sums: (keys, nheads_k, head_dim) each.
        k: (any tokens, nheads_k, head_dim), of k's dtype.
        scores: of the whole.
    """
    dk, dv = torch.ops.flash_attn_deterministic.finish_key_sums(
        *(total.contiguous() for total in sums), k, scores.softmax_scale, scores.softcap, 0.0
    )
    return dk, dv


def _backward(
    rows: Rows,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    scores: Numbers,
    sums: bool = False,
) -> types.Call:
    dout, q, out, softmax_lse = rows
    lse = softmax_lse.transpose(0, 1).contiguous()
    lengths = _lengths(call, k.device)
    options = scores.options(call)
    return schemas.backward_call(dout, (q, k, v), out, lse, lengths, options, None, None, sums)


def _lengths(call: Call, device: torch.device) -> Lengths:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    starts_q = _on_device(call.starts_q, device, stream)
    return Lengths(starts_q, _on_device(call.starts_k, device, stream), *call.longest)


# Cached, as each copy to a GPU makes the host wait for earlier kernels. One tensor for each stream:
# the allocator reuses memory in the order of the stream that allocated it.
@functools.lru_cache(maxsize=256)
def _on_device(starts: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    return torch.tensor(starts, dtype=torch.int32, device=device)
