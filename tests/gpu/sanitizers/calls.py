"""Small calls over every path, which `python -m tests.gpu.sanitizers` runs under compute-sanitizer.

Tools such as racecheck slow a kernel down a hundredfold and more, so that shapes are the smallest
that still have several splits, blocks of rows and keys, heads of a group, and masked blocks. The
schedules of a large batch are had with few heads, by telling the library of a GPU with one SM.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from typing import Any

import torch
from flash_attn_deterministic import (
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn_deterministic.checks.tensors import LATENT
from flash_attn_deterministic.verify.contract.device_override import device_override

# One for each kernel, and 72, which is padded.
HEAD_DIMS = (32, 64, 72, 96, 128, 192, 256, LATENT[0])
SPLIT = 64
ONE_SM = "sms=1"  # which two row blocks or one head keep busy
Options = dict[str, Any]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def general(nheads: int) -> Options:
    """Returns a window of both sides with softcap and ALiBi: the instance for all of them."""
    slopes = torch.rand(nheads, device="cuda")
    return {"window_size": (40, 7), "softcap": 3.0, "alibi_slopes": slopes}


def over_pages(
    q: torch.Tensor, cache: torch.Tensor, pages: torch.Tensor, *lengths: int, **options: Any
) -> None:
    """Attends to a paged cache of equal keys and values."""
    options = {"causal": True, "split_size": SPLIT, **options}
    used = int32(*lengths)
    flash_attn_with_kvcache(
        q, cache, cache.clone(), cache_seqlens=used, block_table=pages, **options
    )


def forward(head_dim: int) -> None:
    """One CTA for all splits of a row block, a CTA for each, and the kernel for a few rows."""
    k, v = draw(1, 150, 1, head_dim), draw(1, 150, 1, head_dim)
    features: tuple[Options, ...] = ({}, {"causal": True}, general(2))
    for seqlen_q in (130, 5, 1):
        q = draw(1, seqlen_q, 2, head_dim)
        for options in features:
            flash_attn_func(q, k, v, split_size=SPLIT, **options)
    dropout: tuple[Options, ...] = tuple({**options, "dropout_p": 0.2} for options in features[1:])
    q = draw(1, 130, 2, head_dim)
    with device_override(ONE_SM):
        plan = explain(flash_attn_func, q, k, v, split_size=SPLIT)
        # Above head dim 96 a GPU with little shared memory has no such path.
        if plan.path != "one-cta" or plan.num_splits != 3:
            raise RuntimeError(f"expected one CTA for 3 splits, got {plan}")
        for options in (*features, *dropout):
            flash_attn_func(q, k, v, split_size=SPLIT, **options)
        flash_attn_func(q, k, v, split_size=0, causal=True)
    with device_override("path=parts"):
        plan = explain(flash_attn_func, q, k, v, split_size=SPLIT)
        if plan.path != "parts":
            raise RuntimeError(f"expected a CTA for each of 3 splits, got {plan}")
        for options in (*features, *dropout):
            flash_attn_func(q, k, v, split_size=SPLIT, **options)
        # Hopper's kernels at head dim 64 take no splits of 64.
        flash_attn_func(q, k, v, split_size=2 * SPLIT, causal=True)


def decode(head_dim: int) -> None:
    """Both paths of a few queries: tiles of 16 and of 64 rows, one split and several, pages."""
    pages = torch.randperm(30).to("cuda", torch.int32).view(3, 10)
    for path in ("few_rows", "scores_first"):
        for seqlen_q, nheads in ((1, 2), (1, 12), (5, 4)):
            q, k = draw(2, seqlen_q, nheads, head_dim), draw(2, 600, 2, head_dim)
            cache = draw(30, 16, 2, head_dim)
            with device_override(f"path={path}"):
                for split_size in (SPLIT, 0):
                    flash_attn_func(q, k, k, causal=True, split_size=split_size)
                flash_attn_func(q, k, k, split_size=SPLIT, **general(nheads))
                over_pages(draw(3, seqlen_q, nheads, head_dim), cache, pages, 0, 64, 157)


def layouts(head_dim: int) -> None:
    """Packed, with an empty sequence and rows of none; paged; with new keys."""
    starts = int32(0, 0, 1, 66, 200)  # the last 5 rows belong to no sequence
    q, k = draw(205, 2, head_dim), draw(205, 1, head_dim)
    flash_attn_varlen_func(q, k, k, starts, starts, 134, 134, causal=True, split_size=SPLIT)
    singles = int32(0, 1, 1, 2)
    keys = int32(0, 70, 70, 200)
    flash_attn_varlen_func(q[:2], k, k, singles, keys, 1, 130, causal=True, split_size=SPLIT)
    pages = torch.randperm(30).to("cuda", torch.int32).view(3, 10)
    cache = draw(30, 16, 1, head_dim)
    angles = draw(160, min(head_dim, 64) // 2)
    new = draw(3, 3, 1, head_dim)
    rotary = {"rotary_cos": angles, "rotary_sin": angles}
    q = draw(3, 3, 2, head_dim)
    over_pages(q, cache, pages, 0, 64, 157, k=new, v=new, **rotary)
    q = draw(3, 20, 2, head_dim)  # more rows than the kernel for a few takes
    for split_size in (SPLIT, 0):
        over_pages(q, cache, pages, 20, 64, 157, split_size=split_size)


def large_pages(head_dim: int) -> None:
    """Pages of 64 keys, which kernels for Hopper load at once."""
    cache = draw(9, 64, 1, head_dim)
    pages = torch.randperm(9).to("cuda", torch.int32).view(3, 3)
    with device_override(ONE_SM):
        for split_size in (SPLIT, 0):
            q = draw(3, 130, 2, head_dim)
            over_pages(q, cache, pages, 20, 64, 157, split_size=split_size)


def backward(head_dim: int) -> None:
    """In turns, alone and with atomics; groups of heads; every mask; dense and packed."""

    def run(
        seqlen_q: int, seqlen_k: int, heads: tuple[int, int], batch: int = 1, **options: Any
    ) -> None:
        q = draw(batch, seqlen_q, heads[0], head_dim).requires_grad_()
        k, v = (draw(batch, seqlen_k, heads[1], head_dim).requires_grad_() for _ in "kv")
        flash_attn_func(q, k, v, **options).backward(draw(*q.shape))

    features: tuple[Options, ...] = (
        {},
        {"causal": True},
        general(2),
        {"window_size": (3, -1)},
        {"causal": True, "dropout_p": 0.2},
        {**general(2), "dropout_p": 0.2},
    )
    for options in features:  # three blocks of keys, and at least two of rows
        run(150, 270, (2, 1), **options)
    for options in features[:3]:
        run(150, 150, (2, 2), **options)
    run(270, 150, (2, 1), causal=True)  # rows that see no key
    run(150, 270, (2, 1), causal=True, deterministic="never")
    run(1, 1, (2, 1))
    with device_override(ONE_SM):  # up to head dim 64 a CTA has a whole head
        for options in features[:2]:
            run(150, 150, (1, 1), batch=2, **options)
    starts = int32(0, 0, 1, 66, 200)
    for nheads_k, options in ((1, features[1]), (2, features[0]), (1, features[2])):
        q = draw(205, 2, head_dim).requires_grad_()
        k, v = (draw(205, nheads_k, head_dim).requires_grad_() for _ in "kv")
        if "alibi_slopes" in options:  # one for each head
            options = {**options, "alibi_slopes": torch.rand(2, device="cuda")}
        out = flash_attn_varlen_func(q, k, v, starts, starts, 134, 134, **options)
        torch.autograd.grad(out, (q, k, v), draw(*q.shape))


def sinks(head_dim: int) -> None:
    """Attention sinks on every path, with gradients of softmax_lse; two chunks of rows."""
    sink = draw(2).float().requires_grad_()
    k, v = (draw(1, 150, 1, head_dim).requires_grad_() for _ in "kv")
    starts = int32(0, 0, 66, 130)
    for seqlen_q, device in ((130, ONE_SM), (130, "path=parts"), (5, "path=few_rows"), (1, None)):
        q = draw(1, seqlen_q, 2, head_dim).requires_grad_()
        with device_override(device) if device else contextlib.nullcontext():
            out, softmax_lse, _ = flash_attn_func(
                q, k, v, causal=True, split_size=SPLIT, learnable_sink=sink, return_attn_probs=True
            )
        torch.autograd.backward((out, softmax_lse), (draw(*q.shape), torch.ones_like(softmax_lse)))
    q = draw(130, 2, head_dim).requires_grad_()
    packed = (q, k[0], v[0], starts, starts, 66, 66)
    out = flash_attn_varlen_func(*packed, causal=True, learnable_sink=sink)
    torch.autograd.backward(out, draw(*q.shape))
    q, k = (draw(1, rows, 1, head_dim).requires_grad_() for rows in (4100, 70))
    torch.autograd.backward(flash_attn_func(q, k, k), draw(*q.shape))


def latent() -> None:
    """Multi-head latent attention in each tile of both families: one split and several, pages."""
    pages = torch.randperm(30).to("cuda", torch.int32).view(3, 10)
    caches = ((draw(3, 160, 1, LATENT[0]), None), (draw(30, 16, 1, LATENT[0]), pages))
    lengths = int32(0, 64, 157)
    for seqlen_q, nheads in ((1, 1), (1, 20), (5, 14), (20, 2)):  # more rows than 1, 16 and 64
        q = draw(3, seqlen_q, nheads, LATENT[0])
        calls: tuple[Options, ...] = (
            {"causal": True, "split_size": SPLIT},
            {"causal": True, "split_size": 0},
            {**general(nheads), "split_size": SPLIT},
        )
        for family, (cache, table) in itertools.product(("sm80", "sm90"), caches):
            with device_override(f"family={family}"):
                for options in calls:
                    flash_attn_with_kvcache(
                        q, cache, None, cache_seqlens=lengths, block_table=table, **options
                    )


def main() -> None:
    """Makes the calls; what they compute is the tests' business."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head_dims", type=int, nargs="*", default=HEAD_DIMS)
    torch.manual_seed(0)
    for head_dim in parser.parse_args().head_dims:
        if head_dim == LATENT[0]:
            latent()
        else:
            forward(head_dim)
            decode(head_dim)
            layouts(head_dim)
            large_pages(head_dim)
            backward(head_dim)
            sinks(head_dim)
        torch.cuda.synchronize()
        print(f"head dim {head_dim}: all calls made", flush=True)


if __name__ == "__main__":
    main()
