"""A call of attention that a check can cut, widen and run in other layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ...checks.tensors import LATENT

if TYPE_CHECKING:
    from typing_extensions import Self

Tensors = dict[str, torch.Tensor]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> Any:
    import flash_attn_deterministic as package

    if (k.shape[-1], v.shape[-1]) == LATENT:
        return package.explain(package.flash_attn_with_kvcache, q, k, None, **kwargs)
    return package.explain(package.flash_attn_func, q, k, v, **kwargs)


@dataclass(frozen=True)
class Attention:
    """The functions under test; tests put broken ones here."""

    dense: Callable[..., Any]  # flash_attn_func
    varlen: Callable[..., Any]  # flash_attn_varlen_func
    kvcache: Callable[..., Any]  # flash_attn_with_kvcache
    # of the arguments of `dense`: what has `path`, "one-cta" or "parts", and `family`, "sm80" or
    # "sm90"
    plan: Callable[..., Any] = _plan

    @staticmethod
    def installed() -> Attention:
        """Returns those of this package."""
        import flash_attn_deterministic as package

        return Attention(
            package.flash_attn_func,
            package.flash_attn_varlen_func,
            package.flash_attn_with_kvcache,
        )


@dataclass(frozen=True)
class Call:
    """A call of flash_attn_func."""

    attention: Attention  # the functions under test
    q: torch.Tensor  # (batch, seqlen_q, nheads, head_dim)
    k: torch.Tensor  # (batch, seqlen_k, nheads_k, head_dim)
    v: torch.Tensor  # like k
    dout: torch.Tensor  # like q, for the backward
    slopes: torch.Tensor | None = None  # (batch, nheads), or None
    # keyword arguments, split_size among them
    options: dict[str, Any] = field(default_factory=dict)
    # the gradient of softmax_lse, (batch, seqlen_q, nheads); None: it has none
    dlse: torch.Tensor | None = None

    @torch.no_grad()
    def __call__(self) -> Tensors:
        """Returns out and softmax_lse; with dropout also `probs`, signed where it drops."""
        out, softmax_lse, probs = self.attention.dense(
            self.q, self.k, self.v, return_attn_probs=True, **self.keywords
        )
        found = {"out": out, "softmax_lse": softmax_lse}
        return {**found, "probs": probs} if self.dropout else found

    @torch.enable_grad()
    def gradients(self) -> Tensors:
        """Returns dq, dk and dv for dout and dlse; with dropout also `probs`."""
        leaves = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]
        if not self.dropout and self.dlse is None:
            return named_gradients(
                self.attention.dense(*leaves, **self.keywords), leaves, self.dout
            )
        out, lse, probs = self.attention.dense(*leaves, return_attn_probs=True, **self.keywords)
        dlse = None if self.dlse is None else self.dlse.mT
        found = named_gradients(out, leaves, self.dout, lse, dlse)
        return {**found, "probs": probs} if self.dropout else found

    @torch.enable_grad()
    def sink_gradient(self) -> Tensors:
        """Returns dsink, (nheads,), for dout."""
        sinks = self.options["learnable_sink"].detach().requires_grad_()
        keywords = {**self.keywords, "learnable_sink": sinks}
        out = self.attention.dense(self.q.detach().requires_grad_(), self.k, self.v, **keywords)
        # Of a function that forgets its sinks: 0.
        found = torch.autograd.grad(out, sinks, self.dout, materialize_grads=True)
        return {"dsink": found[0]}

    @property
    def keywords(self) -> dict[str, Any]:
        """Returns the keyword arguments, slopes included."""
        return {**self.options, "alibi_slopes": self.slopes}

    @property
    def sinks(self) -> torch.Tensor | None:
        """Returns the sinks, (nheads,)."""
        return self.options.get("learnable_sink")

    @property
    def dropout(self) -> bool:
        """Returns whether weights are dropped."""
        return bool(self.options.get("dropout_p"))

    @property
    def plan(self) -> Any:
        """Returns what the kernels do: `path`, `family`."""
        return self.attention.plan(self.q, self.k, self.v, **self.keywords)

    def with_options(self, **options: Any) -> Self:
        return replace(self, options={**self.options, **options})

    def sequences(self, index: slice | list[int]) -> Self:
        seeds = self.options.get("dropout_seeds")
        own = {} if seeds is None else {"dropout_seeds": seeds[index]}
        return self.with_options(**own)._part(b=index)

    def queries(self, begin: int, end: int) -> Self:
        return self._part(q=slice(begin, end))

    def keys(self, end: int) -> Self:
        return self._part(k=slice(end))

    def kv_heads(self, begin: int, end: int) -> Self:
        """Returns the call on whole groups of heads alone."""
        group = self.q.shape[2] // self.k.shape[2]
        return self.heads(begin * group, end * group)._part(g=slice(begin, end))

    def heads(self, begin: int, end: int) -> Self:
        """Returns the call on query heads alone, with the keys of all."""
        heads = slice(begin, end)
        sinks = {} if self.sinks is None else {"learnable_sink": self.sinks[heads]}
        return self.with_options(**sinks)._part(h=heads)

    def _part(self, **places: slice | list[int]) -> Self:
        tensors = {name: getattr(self, name) for name in ("q", "k", "v", "dout", "slopes", "dlse")}
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        parts: dict[str, Any] = {**part(given, **places)}
        return replace(self, **parts)


# Axes of tensors, inputs and results: sequences b, queries q, keys k, heads h, KV heads g.
_AXES = {
    **dict.fromkeys(("q", "dout", "dlse", "out", "dq"), "bqh"),
    **dict.fromkeys(("k", "v", "dk", "dv"), "bkg"),
    "slopes": "bh",
    "softmax_lse": "bhq",
    "probs": "bhqk",
}


def part(tensors: Tensors, **places: slice | list[int]) -> Tensors:
    """Picks sequences, queries, keys or heads of tensors, by the letters of their axes."""
    everything = slice(None)
    return {
        name: tensor[tuple(places.get(axis, everything) for axis in _AXES.get(name, "b"))]
        for name, tensor in tensors.items()
    }


def named_gradients(
    out: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    dout: torch.Tensor,
    lse: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> Tensors:
    """Returns dq, dk and dv of an output and, with dlse, of softmax_lse."""
    outputs, given = [out], [dout]
    # One that autograd does not know of adds 0.
    if lse is not None and dlse is not None and lse.requires_grad:
        outputs, given = [out, lse], [dout, dlse]
    gradients = torch.autograd.grad(outputs, leaves, given)
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def draw(
    attention: Attention,
    shape: tuple[int, int, int, int],
    seqlen_k: int,
    nheads_k: int,
    *,
    dtype: str,
    device: str,
    seed: int,
    options: dict[str, Any],
) -> Call:
    """Draws a call whose q has a shape (batch, seqlen_q, nheads, head_dim).

    `alibi` in options draws slopes, `sink` sinks, `seeds` those of dropout; `residual` is of the
    mode. The same arguments give the same tensors.
    """
    generator = torch.Generator(device).manual_seed(seed)
    batch, seqlen_q, nheads, head_dim = shape

    def normal(seqlen: int, heads: int) -> torch.Tensor:
        size = (batch, seqlen, heads, head_dim)
        drawn = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
        return drawn.to(DTYPES[dtype])

    options = {name: value for name, value in options.items() if name != "residual"}
    slopes = None
    q, k, v = normal(seqlen_q, nheads), normal(seqlen_k, nheads_k), normal(seqlen_k, nheads_k)
    dout = normal(seqlen_q, nheads)
    if options.pop("alibi", False):
        slopes = 0.3 * torch.rand((batch, nheads), generator=generator, device=device)
    if options.pop("sink", False):
        drawn = torch.randn(nheads, generator=generator, device=device)
        options["learnable_sink"] = 2 * drawn + 3  # of the size of softmax_lse
    if options.pop("seeds", False):
        options["dropout_seeds"] = torch.randint(
            -(2**63), 2**63 - 1, (batch,), generator=generator, device=device
        )
    return Call(attention, q, k, v, dout, slopes, options)


def int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def cumulative(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns what cu_seqlens wants: a 0, then running totals."""
    return int32(list(itertools.accumulate(lengths, initial=0)), device)


def garbage(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Returns NaN, +Inf and -Inf in turns."""
    size = math.prod(shape)
    values = torch.tensor([math.nan, math.inf, -math.inf], device=like.device, dtype=like.dtype)
    return values.repeat(-(-size // 3))[:size].view(*shape)
