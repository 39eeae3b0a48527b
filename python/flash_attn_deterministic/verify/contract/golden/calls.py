"""The calls whose results have golden hashes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ... import exact
from ...features import FEATURES
from ..attention import Attention
from ..call import DTYPES, Call, Tensors, cumulative, int32, named_gradients
from ..sizes import Config
from .inputs import draw

_CAPACITY = 1104  # of a cache: a multiple of both page sizes
_ROTARY_DIM = 32


@dataclass(frozen=True)
class GoldenCall:
    """A call, whatever the head dim and dtype."""

    name: str  # unique among the calls
    # makes it; takes the drawn inputs and the call itself
    run: Callable[[GoldenCall, Call], Tensors] = field(repr=False)
    lengths: tuple[tuple[int, int], ...]  # (seqlen_q, seqlen_k) of each sequence
    feature: str = "full"  # a name in features.FEATURES
    heads: tuple[int, int] = (4, 2)  # (nheads, nheads_k)
    split_size: int = 256  # of the call
    page_size: int = 0  # tokens to a page; 0: none
    new: int = 0  # keys of a cache that the call appends, rotated

    def inputs(self, config: Config, attention: Attention, device: str) -> Call:
        """Draws the tensors on the CPU, and moves them.

        Returns:
            q and dout: (batch, seqlen_q, nheads, head_dim), k and v with seqlen_k and nheads_k;
            packed: (tokens, heads, head_dim). Keys of a cache fill its whole capacity.
        """
        head_dim, dtype = config
        nheads, nheads_k = self.heads
        seqlens_q, seqlens_k = zip(*self.lengths, strict=True)
        rows: tuple[int, ...]
        keys: tuple[int, ...]
        if self.run in (_packed, _packed_backward):
            rows, keys = (sum(seqlens_q),), (sum(seqlens_k),)
        else:
            longest = _CAPACITY if self.run is _cache else max(seqlens_k)
            rows, keys = (len(self.lengths), max(seqlens_q)), (len(self.lengths), longest)
        options = dict(FEATURES[self.feature])
        slopes = None
        if options.pop("alibi", False):
            steps = torch.arange(1, len(self.lengths) * nheads + 1, dtype=torch.float32)
            slopes = (steps / 32).view(len(self.lengths), nheads).to(device)

        def tensor(name: str, shape: tuple[int, ...], heads: int) -> torch.Tensor:
            return draw(name, (*shape, heads, head_dim), DTYPES[dtype]).to(device)

        q, dout = (tensor(name, rows, nheads) for name in ("q", "dout"))
        k, v = (tensor(name, keys, nheads_k) for name in ("k", "v"))
        options["split_size"] = self.split_size
        return Call(attention, q, k, v, dout, slopes, options)

    def results(self, call: Call) -> Tensors:
        """Runs the call on what `inputs` returned."""
        return self.run(self, call)

    def sequences(self, call: Call, results: Tensors) -> Iterator[tuple[Call, Tensors]]:
        """Yields each sequence as a dense call of its own, beside its part of the results."""
        starts = [[0, *itertools.accumulate(side)] for side in zip(*self.lengths, strict=True)]
        for index, (length_q, length_k) in enumerate(self.lengths):
            slopes = None if call.slopes is None else call.slopes[index : index + 1]
            if self.run in (_packed, _packed_backward):
                rows, keys = (slice(one[index], one[index + 1]) for one in starts)
                q, dout, k, v = (
                    t[None, part]
                    for t, part in (
                        (call.q, rows), (call.dout, rows), (call.k, keys), (call.v, keys)
                    )
                )  # fmt: skip
                own = {
                    name: t[None, :, rows] if name == "softmax_lse"
                    else t[None, keys if name in ("dk", "dv") else rows]
                    for name, t in results.items()
                }  # fmt: skip
                yield replace(call, q=q, k=k, v=v, dout=dout, slopes=slopes), own
                continue
            one = call.sequences([index]).queries(0, length_q)
            own = {name: t[index : index + 1] for name, t in results.items()}
            if self.new:
                one = self._appended(one, length_k)
            yield one.keys(length_k), own

    def _appended(self, call: Call, length: int) -> Call:
        """Returns a call of one sequence, its new keys in place, rotated as its queries are."""
        first, angles = length - self.new, _rotary(call.q)
        positions = torch.arange(first, length, device=call.q.device)
        k, v = call.k.clone(), call.v.clone()
        k[0, first:length] = exact.rotated(call.k[0, -self.new :], *angles, positions, True)
        v[0, first:length] = call.v[0, -self.new :]
        q = exact.rotated(call.q[0], *angles, positions, True)[None]
        return replace(call, q=q, k=k, v=v)


def _dense(golden: GoldenCall, call: Call) -> Tensors:
    return call()


def _backward(golden: GoldenCall, call: Call) -> Tensors:
    return call.gradients()


def _packed(golden: GoldenCall, call: Call) -> Tensors:
    out, softmax_lse, _ = _varlen(golden, call, (call.q, call.k, call.v), return_attn_probs=True)
    return {"out": out, "softmax_lse": softmax_lse}


def _packed_backward(golden: GoldenCall, call: Call) -> Tensors:
    leaves = [t.detach().requires_grad_() for t in (call.q, call.k, call.v)]
    out = _varlen(golden, call, leaves)
    return named_gradients(out, leaves, call.dout)


def _varlen(golden: GoldenCall, call: Call, qkv: Sequence[torch.Tensor], **options: bool) -> Any:
    sides = list(zip(*golden.lengths, strict=True))
    starts = [cumulative(lengths, call.q.device) for lengths in sides]
    return call.attention.varlen(*qkv, *starts, *map(max, sides), **options, **call.keywords)


def _cache(golden: GoldenCall, call: Call) -> Tensors:
    device, batch = call.q.device, len(golden.lengths)
    used = [seqlen_k - golden.new for _, seqlen_k in golden.lengths]
    k_cache, v_cache = call.k.clone(), call.v.clone()
    arguments: dict[str, Any] = {"cache_seqlens": int32(used, device)}
    if golden.page_size:
        table = _block_table(batch, golden.page_size)
        k_cache, v_cache = (_paged(t, table, golden.page_size) for t in (k_cache, v_cache))
        arguments["block_table"] = table.to(device, torch.int32)
    if golden.new:
        # The new keys take their numbers from the end of the capacity.
        arguments |= {"k": call.k[:, -golden.new :], "v": call.v[:, -golden.new :]}
        arguments |= dict(zip(("rotary_cos", "rotary_sin"), _rotary(call.q), strict=True))
    results = call.cached(k_cache, v_cache, **arguments)
    return {**results, "k_cache": k_cache, "v_cache": v_cache} if golden.new else results


def _rotary(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rotary_cos and rotary_sin; that they are no cosines matters to no hash."""
    cos, sin = (
        draw(name, (_CAPACITY, _ROTARY_DIM // 2), torch.float32).clamp(-1, 1).to(like)
        for name in ("rotary_cos", "rotary_sin")
    )
    return cos, sin


def _block_table(batch: int, page_size: int) -> torch.Tensor:
    """Returns pages in a mixed order: (batch, pages of a sequence), int64."""
    count = batch * _CAPACITY // page_size
    return (torch.arange(count) * 7 + 3).remainder(count).view(batch, -1)


def _paged(tensor: torch.Tensor, table: torch.Tensor, page_size: int) -> torch.Tensor:
    pages = tensor.reshape(-1, page_size, *tensor.shape[2:])
    placed = torch.empty_like(pages)
    placed[table.flatten().to(tensor.device)] = pages
    return placed


_LONG = ((130, 1100),) * 2
_SELF = ((333, 333),) * 2
_RAGGED = ((1, 1), (65, 65), (0, 30), (200, 300), (257, 513))
_LENGTHS = (64, 511, 512, 513, 1100)


def _decode(name: str, seqlen_q: int, **changes: Any) -> GoldenCall:
    lengths = tuple((seqlen_q, seqlen_k) for seqlen_k in _LENGTHS)
    call = GoldenCall(name, _cache, lengths, "causal", heads=(8, 2))
    return replace(call, **changes)


CALLS: tuple[GoldenCall, ...] = (
    GoldenCall("full", _dense, _LONG, split_size=512),
    GoldenCall("one-query", _dense, ((1, 513),)),
    GoldenCall("default-split", _dense, ((70, 2100),), split_size=2048),
    GoldenCall("no-split", _dense, ((200, 700),), split_size=0),
    GoldenCall("causal", _dense, ((577, 577),) * 2, "causal"),
    GoldenCall("causal-at-a-boundary", _dense, ((129, 129),) * 2, "causal", split_size=64),
    GoldenCall("causal-mha", _dense, _SELF, "causal", heads=(2, 2)),
    GoldenCall("causal-mqa", _dense, _SELF, "causal", heads=(4, 1)),
    *(
        GoldenCall(feature, _dense, _LONG, feature)
        for feature in ("window", "window-right-0", "softcap", "alibi", "everything")
    ),
    GoldenCall("packed", _packed, _RAGGED, "causal"),
    GoldenCall("packed-everything", _packed, _RAGGED, "everything"),
    _decode("decode", 1),
    _decode("decode-alibi", 1, feature="alibi"),
    _decode("decode-mha", 1, heads=(2, 2)),
    _decode("decode-paged", 1, page_size=16),
    _decode("few-queries-paged", 5, page_size=48),
    _decode("chunk-paged", 40, page_size=48),
    _decode("append", 3, new=3),
    *(
        GoldenCall(f"backward-{feature}", _backward, ((200, 333),) * 2, feature)
        for feature in ("full", "causal", "window", "softcap", "alibi", "everything")
    ),
    GoldenCall("backward-causal-mha", _backward, _SELF, "causal", heads=(2, 2)),
    GoldenCall("backward-packed", _packed_backward, _RAGGED, "causal"),
)
