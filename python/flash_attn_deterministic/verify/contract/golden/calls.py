"""The calls whose results have golden hashes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ....checks.tensors import LATENT
from ...features import FEATURES
from .. import layouts
from ..call import DTYPES, Attention, Call, Tensors, part
from ..sizes import Config
from .inputs import digest, draw

_CAPACITY = 1104  # of a cache: a multiple of both page sizes
_ROTARY_DIM = 32


@dataclass(frozen=True)
class GoldenCall:
    """A call, whatever the head dim and dtype; `latent`, for its head dim alone."""

    name: str  # unique among the calls
    form: str  # "dense", "packed" or "cache"
    lengths: tuple[tuple[int, int], ...]  # (seqlen_q, seqlen_k) of each sequence
    feature: str = "full"  # a name in features.FEATURES
    heads: tuple[int, int] = (4, 2)  # (nheads, nheads_k)
    split_size: int = 256  # of the call
    page_size: int = 0  # tokens to a page; 0: none
    new: int = 0  # keys of a cache that the call appends, rotated
    backward: bool = False  # whether the results are gradients
    latent: bool = False  # whether values are the first columns of keys, in one cache
    fp8: bool = False  # whether a cache is in 8 bits
    narrow: bool = False  # whether v has fewer columns: 128 for 192

    def inputs(self, config: Config, attention: Attention, device: str) -> tuple[Call, str]:
        """Draws tensors on the CPU, and moves them: a dense call of all sequences, and their hash.

        Keys of a cache fill its whole capacity.
        """
        head_dim, dtype = config
        nheads, nheads_k = self.heads
        columns = head_dim * 2 // 3 // 8 * 8 if self.narrow else head_dim
        seqlens = list(zip(*self.lengths, strict=True))
        sizes: list[tuple[int, ...]] = [(len(self.lengths), max(side)) for side in seqlens]
        if self.form == "packed":
            sizes = [(sum(side),) for side in seqlens]
        elif self.form == "cache":
            sizes[1] = (len(self.lengths), _CAPACITY)
        drawn = {
            name: draw(name, (*sizes[of_keys], heads, width), DTYPES[dtype])
            for name, of_keys, heads, width in (
                ("q", 0, nheads, head_dim), ("k", 1, nheads_k, head_dim),
                ("v", 1, nheads_k, columns), ("dout", 0, nheads, columns),
            )
            if name != "v" or not self.latent
        }  # fmt: skip
        options = dict(FEATURES[self.feature])
        slopes = None
        if options.pop("alibi", False):
            steps = torch.arange(1, len(self.lengths) * nheads + 1, dtype=torch.float32)
            slopes = (steps / 32).view(len(self.lengths), nheads)
        own = list(drawn.values()) + ([] if slopes is None else [slopes])
        if options.pop("sink", False):
            sinks = 2 * draw("sink", (nheads,), torch.float32) + 3  # of the size of softmax_lse
            options["learnable_sink"] = sinks.to(device)
            own.append(sinks)
        found = digest(own)
        if self.form == "packed":
            drawn = {
                name: pad_sequence([*torch.split(t, list(seqlens[name in "kv"]))], batch_first=True)
                for name, t in drawn.items()
            }
        for name in ("k", "v") if self.new else ():
            # The new keys take their numbers from the end of the capacity.
            for own, (_, length) in zip(drawn[name], self.lengths, strict=True):
                own[length - self.new : length] = own[-self.new :].clone()
        tensors = {name: t.to(device) for name, t in drawn.items()}
        if self.latent:
            tensors["v"] = tensors["k"][..., : LATENT[1]]
        slopes = None if slopes is None else slopes.to(device)
        options["split_size"] = self.split_size
        return Call(attention, **tensors, slopes=slopes, options=options), found

    def run(self, call: Call) -> tuple[layouts.Parts, Tensors]:
        """Runs the call; returns its parts as `layouts` has them, and what is hashed.

        That is the results of all sequences, and a cache that was written to.
        """
        parts = self._parts(call)
        axes = {"softmax_lse": 2} if self.form == "packed" else {}
        axis = 1 if self.form == "packed" else 0
        names = [name for name in parts[0][1] if name not in ("k_cache", "v_cache")]
        joined = {
            name: torch.cat([own[name] for _, own in parts], axes.get(name, axis)) for name in names
        }
        if self.form == "packed":
            joined = {name: t[0] for name, t in joined.items()}
        for name in ("k", "v") if self.new else ():
            cache = joined[f"{name}_cache"] = getattr(call, name).clone()
            for place, ((_, own), (_, length)) in enumerate(zip(parts, self.lengths, strict=True)):
                cache[place, :length] = own[f"{name}_cache"][0]
        return parts, joined

    def _parts(self, call: Call) -> layouts.Parts:
        lengths_q, lengths_k = zip(*self.lengths, strict=True)
        if self.form == "packed":
            return layouts.packed(call, lengths_q, lengths_k, gradients=self.backward).parts
        if self.form == "cache":
            rotary = _rotary(call.q) if self.new else None
            return layouts.cached(
                call, lengths_k,
                room=_CAPACITY, page_size=self.page_size, new=self.new, rotary=rotary,
                fp8=self.fp8, latent=self.latent,
            )  # fmt: skip
        results = call.gradients() if self.backward else call()
        ones = layouts.alone(call, lengths_q, lengths_k)
        return [(one, part(results, b=[index])) for index, one in enumerate(ones)]


def _rotary(like: torch.Tensor) -> layouts.Rotary:
    """Returns numbers for cos and sin; that they are none matters to no hash."""
    cos, sin = (
        draw(name, (_CAPACITY, _ROTARY_DIM // 2), torch.float32).clamp(-1, 1).to(like)
        for name in ("rotary_cos", "rotary_sin")
    )
    return layouts.Rotary(cos, sin, True)


_LONG = ((130, 1100),) * 2
_SELF = ((333, 333),) * 2
_RAGGED = ((1, 1), (65, 65), (0, 30), (200, 300), (257, 513))
_LENGTHS = (64, 511, 512, 513, 1100)


def _decode(name: str, seqlen_q: int, **changes: Any) -> GoldenCall:
    lengths = tuple((seqlen_q, seqlen_k) for seqlen_k in _LENGTHS)
    call = GoldenCall(name, "cache", lengths, "causal", heads=(8, 2))
    return replace(call, **changes)


CALLS: tuple[GoldenCall, ...] = (
    GoldenCall("full", "dense", _LONG, split_size=512),
    GoldenCall("one-query", "dense", ((1, 513),)),
    GoldenCall("default-split", "dense", ((70, 2100),), split_size=2048),
    GoldenCall("no-split", "dense", ((200, 700),), split_size=0),
    GoldenCall("causal", "dense", ((577, 577),) * 2, "causal"),
    GoldenCall("causal-at-a-boundary", "dense", ((129, 129),) * 2, "causal", split_size=64),
    GoldenCall("causal-mha", "dense", _SELF, "causal", heads=(2, 2)),
    GoldenCall("causal-mqa", "dense", _SELF, "causal", heads=(4, 1)),
    *(
        GoldenCall(feature, "dense", _LONG, feature)
        for feature in ("window", "window-right-0", "softcap", "alibi", "everything", "sink")
    ),
    GoldenCall("narrow-values", "dense", _SELF, "causal", narrow=True),
    GoldenCall("packed", "packed", _RAGGED, "causal"),
    GoldenCall("packed-everything", "packed", _RAGGED, "everything"),
    _decode("decode", 1),
    _decode("decode-alibi", 1, feature="alibi"),
    _decode("decode-mha", 1, heads=(2, 2)),
    _decode("decode-sink", 1, feature="sink"),
    _decode("decode-fp8", 1, page_size=48, fp8=True),
    _decode("few-queries-fp8", 5, fp8=True),
    _decode("decode-paged", 1, page_size=16),
    _decode("few-queries-paged", 5, page_size=48),
    _decode("chunk-paged", 40, page_size=48),
    _decode("append", 3, new=3),
    *(
        GoldenCall(f"backward-{feature}", "dense", ((200, 333),) * 2, feature, backward=True)
        for feature in ("full", "causal", "window", "softcap", "alibi", "everything", "sink")
    ),
    GoldenCall("backward-causal-mha", "dense", _SELF, "causal", heads=(2, 2), backward=True),
    GoldenCall("backward-narrow-values", "dense", _SELF, "causal", narrow=True, backward=True),
    GoldenCall("backward-packed", "packed", _RAGGED, "causal", backward=True),
    _decode("latent", 1, heads=(16, 1), latent=True),
    _decode("latent-paged", 3, heads=(40, 1), page_size=48, latent=True),
    _decode("latent-alibi", 1, heads=(4, 2), feature="alibi", latent=True),
)
