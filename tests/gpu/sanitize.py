"""A few small calls over every path, to run under compute-sanitizer (CONTRIBUTING.md)."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from flash_attn_deterministic import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def backward(head_dim: int) -> None:
    """Turns and atomics, groups of heads, every mask, dropout; dense and packed."""
    features: tuple[dict[str, Any], ...] = (
        {},
        {"causal": True},
        {"causal": True, "deterministic": False},
        {"window_size": (40, 7), "softcap": 3.0, "alibi_slopes": torch.rand(4, device="cuda")},
        {"window_size": (3, -1)},
        {"dropout_p": 0.2, "causal": True},
    )
    heads = torch.cuda.get_device_properties("cuda").multi_processor_count
    for options in features[:2]:  # a thread block to each head, up to head dim 64
        q, k, v = (draw(heads, 150, 1, head_dim).requires_grad_() for _ in "qkv")
        flash_attn_func(q, k, v, **options).backward(draw(*q.shape))
    starts = torch.tensor([0, 0, 1, 2, 67, 200], device="cuda", dtype=torch.int32)
    for nheads_k in (4, 2, 1):
        for options in features:
            for seqlen_q, seqlen_k in ((150, 270), (270, 150), (1, 1)):
                q = draw(2, seqlen_q, 4, head_dim).requires_grad_()
                k, v = (draw(2, seqlen_k, nheads_k, head_dim).requires_grad_() for _ in "kv")
                flash_attn_func(q, k, v, **options).backward(draw(*q.shape))
            # The last 10 tokens belong to no sequence.
            q = draw(210, 4, head_dim).requires_grad_()
            k, v = (draw(210, nheads_k, head_dim).requires_grad_() for _ in "kv")
            out = flash_attn_varlen_func(q, k, v, starts, starts, 133, 133, **options)
            out.backward(draw(*q.shape))


def forward(head_dim: int) -> None:
    """Every path of the forward; dense, packed, paged, with new keys."""
    # Many row blocks: one CTA walks three splits. Few: a CTA per split, and the merge kernel; few
    # rows besides: the kernel for them.
    for batch, nheads, seqlen_q in ((9, 32, 130), (1, 2, 130), (1, 2, 5), (3, 8, 1)):
        q = draw(batch, seqlen_q, nheads, head_dim)
        k, v = draw(batch, 150, 2, head_dim), draw(batch, 150, 2, head_dim)
        slopes = torch.rand(nheads, device="cuda")
        flash_attn_func(q, k, v, split_size=64)
        flash_attn_func(q, k, v, causal=True, split_size=64)
        flash_attn_func(
            q, k, v, window_size=(40, 7), softcap=3.0, alibi_slopes=slopes, split_size=64
        )
    lengths = torch.tensor([0, 1, 1, 66, 200], device="cuda", dtype=torch.int32)
    q, k = draw(200, 4, head_dim), draw(200, 2, head_dim)
    flash_attn_varlen_func(q, k, k, lengths, lengths, 134, 134, causal=True, split_size=64)
    pages = torch.randperm(40).to("cuda", torch.int32).view(4, 10)
    cache = draw(40, 16, 2, head_dim)
    angles = draw(160, min(head_dim, 64) // 2)
    flash_attn_with_kvcache(
        draw(4, 3, 4, head_dim),
        cache,
        cache.clone(),
        draw(4, 3, 2, head_dim),
        draw(4, 3, 2, head_dim),
        rotary_cos=angles,
        rotary_sin=angles,
        cache_seqlens=torch.tensor([0, 13, 64, 157], device="cuda", dtype=torch.int32),
        block_table=pages,
        causal=True,
        split_size=64,
    )
    flash_attn_with_kvcache(  # more rows than the kernel for a few takes
        draw(4, 20, 4, head_dim),
        cache,
        cache.clone(),
        cache_seqlens=torch.tensor([20, 33, 64, 157], device="cuda", dtype=torch.int32),
        block_table=pages,
        causal=True,
        split_size=64,
    )


def main() -> None:
    """Makes the calls; what they compute is the tests' business."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "head_dims",
        type=int,
        nargs="*",
        default=[32, 64, 72, 96, 128, 192, 256],
        help="default: one for each kernel, and 72",
    )
    torch.manual_seed(0)
    for head_dim in parser.parse_args().head_dims:
        forward(head_dim)
        backward(head_dim)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
