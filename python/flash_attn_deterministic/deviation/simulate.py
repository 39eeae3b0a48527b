"""Baseline, tiled and golden attention with a number format per step.

Tensors are (..., seqlen, head_dim), in float32 or float64; the leading dimensions are a batch.
Products are summed in the container (float32 or float64), as tensor cores sum them in float32, and
a step's result is then rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from .. import reference
from ..errors import ArgumentError
from .blocks import Blocks
from .formats import NumberFormat
from .steps import Preset, Steps, rounder

_CHUNK = 1 << 20  # elements of the largest tensor of a step: about what caches hold
Products = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks shapes, and that every value is finite.

    Raises:
        ArgumentError: shapes don't fit, or a value is NaN or infinite.
    """
    fits = q.ndim >= 2 and q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1]
    if not fits or k.shape[:-1] != v.shape[:-1]:
        raise ArgumentError(
            "q, k, v: expected (..., seqlen_q, head_dim), (..., seqlen_k, head_dim) and (..., "
            f"seqlen_k, head_dim), got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        bad = int(tensor.numel() - tensor.isfinite().sum())
        if bad:
            raise ArgumentError(f"{name}: expected finite values, got {bad} NaN or infinite ones")


def golden_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes softmax(q k^T * scale + bias) v in float64."""
    q, k, v = q.double(), k.double(), v.double()
    return _by_rows(lambda rows, b: _plain(rows, k, v, scale, b, None, None), q, k, bias)


def baseline_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    number_format: NumberFormat,
    generator: torch.Generator | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes matmul, scaling, softmax and matmul, each with its result in the format.

    This is what explicit torch code does with tensors of the format: softmax works in float32
    inside, and rounds its result.
    """
    return _by_rows(
        lambda rows, b: _plain(rows, k, v, scale, b, number_format, generator), q, k, bias
    )


def _plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None,
    number_format: NumberFormat | None,
    generator: torch.Generator | None,
) -> torch.Tensor:
    rounded = rounder(number_format, generator)
    scores = rounded(rounded(q @ k.mT) * scale)
    if bias is not None:
        scores = rounded(scores + bias.to(scores.dtype))
    row_max = scores.amax(-1, keepdim=True)
    probs = (scores - torch.where(row_max == -math.inf, 0.0, row_max)).exp_()
    total = probs.sum(-1, keepdim=True)
    probs = rounded(probs.div_(torch.where(total == 0, 1.0, total)))
    return rounded(probs @ v)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    preset: Preset,
    steps: Steps,
    blocks: Blocks,
    generator: torch.Generator | None = None,
    bias: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Computes tiled attention by a preset's algorithm.

    Args:
        q: (..., seqlen_q, head_dim), float32 or float64.
        k: (..., seqlen_k, head_dim).
        v: like k.
        scale: factor of q k^T.
        preset: gives the algorithm and the split size.
        steps: number format of each step.
        blocks: keys per block; a power of two where the algorithm is the kernels'.
        generator: random bits of stochastic formats.
        bias: added to the scores, broadcast to (..., seqlen_q, seqlen_k); -inf hides a key. Only
            with the renormalised algorithm.
        causal: whether keys after a query's position are hidden, aligned bottom right. Only with
            the kernels' algorithm.

    Raises:
        ArgumentError: block sizes or options that the algorithm does not have.
    """
    if preset.algorithm == "renormalised":
        if causal:
            raise ArgumentError("causal: expected False here; give the mask as bias")
        return renormalised_attention(q, k, v, scale, steps, blocks, generator, bias)
    if bias is not None:
        raise ArgumentError(f"bias: expected None with the preset {preset.name}")
    lead = q.shape[:-2]
    out, _ = reference.attention(
        _heads(q), _heads(k), _heads(v), scale, causal,
        split_size=preset.split_size,
        block_n=blocks.keys,
        formats=steps.reference_formats(generator),
    )  # fmt: skip
    return out.transpose(1, 2).reshape(*lead, *out.shape[1:2], out.shape[3])


def _heads(tensor: torch.Tensor) -> torch.Tensor:
    """(..., seqlen, head_dim) as (1, seqlen, nheads, head_dim)."""
    return tensor.reshape(-1, *tensor.shape[-2:]).transpose(0, 1)[None]


def renormalised_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    steps: Steps,
    blocks: Blocks,
    generator: torch.Generator | None = None,
    bias: torch.Tensor | None = None,
    products: Products = torch.matmul,
    fused: bool = False,
) -> torch.Tensor:
    """FlashAttention's algorithm 1: O is divided by l after every block of keys, first to last.

    Rows do not touch each other, so B_r decides only which rows share a tile. With a `products`
    that sums in one order whatever the shape (`ordered_products`), it can't change a bit.

    Args:
        fused: whether a line of the algorithm is rounded once; otherwise after each elementwise
            operation, as a tensor library does.
    """
    rounded = {name: rounder(value, generator) for name, value in _every_step(steps)}
    # One tile at a time where it could matter; otherwise as many rows as the caches hold.
    lead = math.prod(q.shape[:-2]) * max(blocks.keys, q.shape[-1])
    size = blocks.rows if products is not torch.matmul else max(blocks.rows, _CHUNK // lead)
    tiles = _split_rows(q, size)
    out, start = [], 0
    for tile in tiles:
        part = None if bias is None else _rows_of(bias, start, start + tile.shape[-2])
        out.append(_renormalised_rows(tile, k, v, scale, rounded, blocks, part, products, fused))
        start += tile.shape[-2]
    return rounded["out"](torch.cat(out, -2))


def _every_step(steps: Steps) -> Iterator[tuple[str, NumberFormat | None]]:
    for name in steps.__dataclass_fields__:
        yield name, getattr(steps, name)


def _renormalised_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    rounded: dict[str, Callable[[torch.Tensor], torch.Tensor]],
    blocks: Blocks,
    bias: torch.Tensor | None,
    products: Products,
    fused: bool,
) -> torch.Tensor:
    row_max = q.new_full((*q.shape[:-1], 1), -math.inf)
    row_sum = torch.zeros_like(row_max)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    state = rounded["state"]
    each = _unrounded if fused else state
    for start in range(0, k.shape[-2], blocks.keys):
        keys = slice(start, start + blocks.keys)
        scores = rounded["scores"](products(q, k[..., keys, :].mT) * scale)
        if bias is not None:
            scores = rounded["scores"](scores + bias[..., keys].to(scores.dtype))
        block_max = rounded["row_max"](scores.amax(-1, keepdim=True))
        hidden = block_max == -math.inf
        probs = rounded["probs"]((scores - torch.where(hidden, 0.0, block_max)).exp_())
        block_sum = rounded["row_sum"](probs.sum(-1, keepdim=True))
        after = rounded["row_max"](torch.maximum(row_max, block_max))
        shift = torch.where(after == -math.inf, 0.0, after)
        old = rounded["rescale"]((row_max - shift).exp_())
        new = rounded["rescale"]((block_max - shift).exp_())
        total = _sum(rounded["row_sum"], fused, old * row_sum, new * block_sum)
        product = rounded["acc"](products(probs, v[..., keys, :]))
        weight = each(row_sum * old)
        mixed = each(each(weight * out) + each(new * product))
        out = state(mixed / torch.where(total == 0, 1.0, total))
        row_max, row_sum = after, total
    return out


def _unrounded(values: torch.Tensor) -> torch.Tensor:
    return values


def _sum(
    rounded: Callable[[torch.Tensor], torch.Tensor],
    fused: bool,
    left: torch.Tensor,
    right: torch.Tensor,
) -> torch.Tensor:
    return rounded(left + right if fused else rounded(left) + rounded(right))


def ordered_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right, summed one product at a time in rising order: bits are a matter of the row."""
    total = left.new_zeros((*left.shape[:-1], right.shape[-1]))
    for index in range(left.shape[-1]):
        total += left[..., index, None] * right[..., index, None, :]
    return total


def _split_rows(q: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [q[..., start : start + size, :] for start in range(0, q.shape[-2], size)]


def _by_rows(
    attend: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Runs rows in chunks, to keep the scores small."""
    size = max(1, 4 * _CHUNK // max(1, math.prod(q.shape[:-2]) * k.shape[-2]))
    parts, start = [], 0
    for rows in _split_rows(q, size):
        stop = start + rows.shape[-2]
        parts.append(attend(rows, None if bias is None else _rows_of(bias, start, stop)))
        start = stop
    return torch.cat(parts, -2)


def _rows_of(bias: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return bias if bias.shape[-2] == 1 else bias[..., start:stop, :]
