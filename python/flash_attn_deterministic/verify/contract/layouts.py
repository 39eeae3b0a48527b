"""A call in other layouts: packed, padded, over a cache or pages, with keys that it appends.

Each function returns the sequences as dense calls of their own, beside their parts of the results.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...checks.tensors import FP8, LATENT
from .. import exact
from .call import Call, Tensors, cumulative, garbage, int32, named_gradients, part

Parts = list[tuple[Call, Tensors]]


class Packed(NamedTuple):
    """Results of a packed call."""

    parts: Parts
    rest: Tensors  # out and softmax_lse of rows that belong to no sequence


class Rotary(NamedTuple):
    """Rotary embedding of a call that appends."""

    cos: torch.Tensor  # (seqlen_ro, rotary_dim / 2)
    sin: torch.Tensor  # like cos
    interleaved: bool


def alone(call: Call, lengths_q: Sequence[int], lengths_k: Sequence[int]) -> list[Call]:
    """Returns each sequence, cut to its lengths."""
    return [
        call.sequences([index]).queries(0, length_q).keys(length_k)
        for index, (length_q, length_k) in enumerate(zip(lengths_q, lengths_k, strict=True))
    ]


def packed(
    call: Call,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    *,
    spare: int = 0,
    room: int = 0,
    leftpad: int = 0,
    page_size: int = 0,
    seed: int = 0,
    gradients: bool = False,
) -> Packed:
    """Runs the first queries and keys of each sequence by flash_attn_varlen_func.

    There are `spare` rows of q behind the last sequence. With `room`, each sequence has that many
    keys in k and v, garbage behind its own (seqused_k), and the last one begins at `leftpad`.
    `page_size` puts keys into pages in random order. `gradients`: dq, dk and dv, not out and lse.
    """
    call = call.sequences(slice(0, len(lengths_q)))
    ones, device = alone(call, lengths_q, lengths_k), call.q.device

    def joined(name: str) -> torch.Tensor:
        return torch.cat([*(getattr(one, name)[0] for one in ones), getattr(call, name)[0, :spare]])

    q, dout = joined("q"), joined("dout")
    arguments: dict[str, Any] = {}
    sizes_k = list(lengths_k)
    if page_size:
        k, v, arguments["block_table"] = pages(ones, page_size, seed)
    elif room:
        pads = [*[0] * (len(ones) - 1), leftpad]
        k, v = (
            buffer([getattr(one, n)[0] for one in ones], room, pads=pads).flatten(0, 1)
            for n in "kv"
        )
        used = [length + pad for length, pad in zip(lengths_k, pads, strict=True)]
        arguments["seqused_k"], sizes_k = int32(used, device), [room] * len(ones)
        arguments["leftpad_k"] = int32(pads, device) if leftpad else None
    else:
        k, v = (torch.cat([getattr(one, n)[0] for one in ones]) for n in "kv")
    rows, keys = (cumulative(one, device) for one in (lengths_q, sizes_k))
    longest = (max(lengths_q), max(sizes_k))
    with torch.set_grad_enabled(gradients):
        leaves = [t.detach().requires_grad_(gradients) for t in (q, k, v)]
        out, softmax_lse, probs = call.attention.varlen(
            *leaves, rows, keys, *longest, return_attn_probs=True, **arguments, **call.keywords
        )
        results = {"out": out, "softmax_lse": softmax_lse}
        if gradients:
            dlse = None if call.dlse is None else joined("dlse").mT
            results = named_gradients(out, leaves, dout, softmax_lse, dlse)
    spans = [itertools.pairwise(t.tolist()) for t in (rows, keys)]
    parts: Parts = []
    for index, (one, (a, b), (c, d)) in enumerate(zip(ones, *spans, strict=True)):
        own = {name: t[None, a:b] for name, t in results.items()}
        if gradients:
            own |= {name: results[name][None, c:d] for name in ("dk", "dv")}
        else:
            own["softmax_lse"] = softmax_lse[None, :, a:b]
        if probs.numel():
            own["probs"] = probs[index : index + 1, :, : b - a, : d - c]
        parts.append((one, own))
    end = int(rows[-1])
    return Packed(parts, {"out": out[end:], "softmax_lse": softmax_lse[:, end:]})


def cached(
    call: Call,
    lengths: Sequence[int],
    *,
    room: int = 0,
    page_size: int = 0,
    seed: int = 0,
    leftpad: int = 0,
    reordered: bool = False,
    new: int = 0,
    rotary: Rotary | None = None,
    fp8: bool = False,
    latent: bool = False,
) -> Parts:
    """Runs the first keys of each sequence by flash_attn_with_kvcache.

    `room`: keys that the cache has room for; `leftpad`: where the last sequence begins in it;
    `reordered`: sequences lie in another order, in more places; `new`: how many of the keys the
    call appends. Parts then have `k_cache` and `v_cache`, the keys and values of the sequence as
    the call leaves them, and calls whose new keys and queries are rotated. `fp8`: the cache is in
    8 bits, with a scale of each head, and calls have keys and values that it holds. `latent`:
    values are the first columns of keys, in the same memory.
    """
    device, batch = call.q.device, len(lengths)
    if fp8:
        k_scale, v_scale = _scales(call)
        k = (call.k / k_scale).to(FP8).to(call.q) * k_scale
        v = (call.v / v_scale).to(FP8).to(call.q) * v_scale
        call = replace(call, k=k, v=v)
    if latent:
        call = replace(call, v=call.k[..., : LATENT[1]])
    ones = alone(call, [call.q.shape[1]] * batch, lengths)
    used = [length - new for length in lengths]
    arguments: dict[str, Any] = {}
    places, pads = list(range(batch)), [0] * batch
    old = [one.keys(n) for one, n in zip(ones, used, strict=True)]
    table: torch.Tensor | None = None
    if page_size:
        k_cache, v_cache, table = pages(old, page_size, seed, room)
        arguments["block_table"] = table
    else:
        if reordered:
            places = [2 * place + 1 for place in reversed(places)]
            arguments["cache_batch_idx"] = int32(places, device)
        if leftpad:
            pads[-1] = leftpad
            arguments["cache_leftpad"] = int32(pads, device)
        k_cache, v_cache = (
            buffer([getattr(one, n)[0] for one in old], room, places, pads) for n in "kv"
        )
    # Lengths count from the cache's first row.
    arguments["cache_seqlens"] = int32([n + pad for n, pad in zip(used, pads, strict=True)], device)
    if new:
        arguments |= {n: torch.cat([getattr(o, n)[:, -new:] for o in ones]) for n in "kv"}
        if rotary is not None:
            names = ("rotary_cos", "rotary_sin", "rotary_interleaved")
            arguments |= dict(zip(names, rotary, strict=True))
            ones = [_rotated(one, rotary, new) for one in ones]
    if fp8:
        k_cache, v_cache = (k_cache / k_scale).to(FP8), (v_cache / v_scale).to(FP8)
        arguments["k_descale"] = k_scale.flatten().float()
        arguments["v_descale"] = v_scale.flatten().float()
    with torch.no_grad():
        values = None if latent else v_cache
        out, softmax_lse = call.attention.kvcache(
            call.q, k_cache, values, return_softmax_lse=True, **arguments, **call.keywords
        )
    results, parts = {"out": out, "softmax_lse": softmax_lse}, []
    for index, (one, length) in enumerate(zip(ones, lengths, strict=True)):
        own = part(results, b=[index])
        if new:
            for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
                if table is None:
                    whole = cache[places[index], pads[index] :]
                else:
                    whole = cache[table[index].long()].flatten(0, 1)
                own[name] = whole[None, :length]
        parts.append((one, own))
    return parts


def _scales(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales of keys and of values, by head; products with powers of two are exact."""
    head = torch.arange(call.k.shape[2], device=call.k.device)[:, None]
    return (2.0 ** (head % 3 - 1)).to(call.k), (2.0 ** (1 - head % 4)).to(call.v)


def pages(
    calls: Sequence[Call], page_size: int, seed: int, room: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Puts the keys of calls of one sequence into pages, garbage everywhere else.

    Returns:
        k and v (num_pages, page_size, nheads_k, head_dim), and block_table.
    """
    per_sequence = -(-max(room, *(call.k.shape[1] for call in calls)) // page_size) + 1
    count = len(calls) * per_sequence + 2
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    table = order[: len(calls) * per_sequence].view(len(calls), -1)
    k, v = (garbage((count, page_size, *like.shape[2:]), like) for like in (calls[0].k, calls[0].v))
    for own, call in zip(table.tolist(), calls, strict=True):
        for page, begin in zip(own, range(0, call.k.shape[1], page_size), strict=False):
            for cache, tensor in ((k, call.k), (v, call.v)):
                part = tensor[0, begin : begin + page_size]
                cache[page, : len(part)] = part
    return k, v, table.to(k.device, torch.int32)


def buffer(
    tensors: Sequence[torch.Tensor],
    room: int,
    places: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Returns (places, room, heads, head_dim): sequences, and garbage around them."""
    places = range(len(tensors)) if places is None else places
    pads = [0] * len(tensors) if pads is None else pads
    room = max(room, *(len(t) + pad for t, pad in zip(tensors, pads, strict=True)))
    buffer = garbage((max(places) + 1, room, *tensors[0].shape[1:]), tensors[0])
    for place, pad, tensor in zip(places, pads, tensors, strict=True):
        buffer[place, pad : pad + len(tensor)] = tensor
    return buffer


def _rotated(call: Call, rotary: Rotary, new: int) -> Call:
    """Rotates the new keys of a sequence, and its queries, as flash_attn_with_kvcache does."""
    seqlen_q, seqlen_k = call.q.shape[1], call.k.shape[1]
    first = torch.tensor(seqlen_k - new, device=call.q.device)
    # Without a mask all queries are at the position of the first new key.
    masked = call.options.get("causal") or call.options.get("window_size", (-1, -1)) != (-1, -1)
    rows = first + torch.arange(seqlen_q, device=first.device) * int(bool(masked))
    k = call.k.clone()
    positions = first + torch.arange(new, device=first.device)
    k[0, -new:] = exact.rotated(k[0, -new:], *rotary[:2], positions, rotary.interleaved)
    q = exact.rotated(call.q[0], *rotary[:2], rows, rotary.interleaved)
    return replace(call, q=q[None], k=k)
