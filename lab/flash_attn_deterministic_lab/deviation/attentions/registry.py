"""Attentions by name: those of the machine, emulated ones, and one's own.

Each takes the arguments of torch's scaled_dot_product_attention, without dropout, and tensors
(batch, nheads, seqlen, head_dim).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ...attentions import ATTENTIONS
from ...attentions import Attention as Kernel
from ...attentions.attention import FLOAT32
from ...attentions.named import find_callable
from ...errors import ArgumentError
from ..emulate.explicit import explicit_attention, softmax
from ..emulate.gradients import DELTAS, emulated_attention
from ..emulate.steps import PRESETS
from ..numbers.formats import parse_format
from .masks import Call
from .torch_lines import torch_lines

DECODE = "-decode"  # behind the name of an attention

# Takes what torch's scaled_dot_product_attention takes.
Attention = Callable[..., torch.Tensor]


def _attention(of: Callable[[Call], torch.Tensor]) -> Attention:
    """Gives what takes a Call torch's signature; it computes in its inputs' dtype always."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if dropout_p:
            raise ArgumentError(f"dropout_p: expected 0 in a study of rounding, got {dropout_p}")
        # Autocast would move the softmax of explicit attention to float32.
        with torch.autocast(query.device.type, enabled=False):
            return of(Call(query, key, value, attn_mask, is_causal, scale))

    return attend


def _explicit(call: Call) -> torch.Tensor:
    """Matmul, softmax, matmul, each with its result in the tensors' dtype."""
    call = call.plain()
    scores = call.q @ call.k.mT * call.factor
    if call.mask is not None:
        scores = scores + call.mask.to(scores.dtype)
    return softmax(scores) @ call.v


def _explicit_in(call: Call, name: str) -> torch.Tensor:
    """Explicit attention whose results and their gradients have a format."""
    return explicit_attention(call, parse_format(name)).to(call.q.dtype)


def _kernel(call: Call, attention: Kernel) -> torch.Tensor:
    """One of the attentions of the machine; float32 goes through bfloat16 where it takes no other.

    Those without masks align a causal mask at the sequences' ends, torch at their beginnings.
    """
    options: dict[str, Any] = {} if call.scale is None else {"scale": call.scale}
    if call.mask is not None:
        options["mask"] = call.mask
    if call.causal and call.q.shape[-2] != call.k.shape[-2]:
        raise ArgumentError(
            f"is_causal: expected as many queries as keys, got {call.q.shape[-2]} and "
            f"{call.k.shape[-2]}"
        )
    dtype = call.q.dtype
    if dtype == torch.float32 and FLOAT32 not in attention.takes:
        dtype = torch.bfloat16
    q, k, v = (tensor.transpose(1, 2).to(dtype) for tensor in (call.q, call.k, call.v))
    with attention.inside():
        out = attention(q, k, v, causal=call.causal, **options)
    return out.transpose(1, 2).to(call.q.dtype)


def _decode(call: Call, attention: Attention) -> torch.Tensor:
    """An attention as a sampler calls it, one query at a time."""
    outs = [
        attention(step.q, step.k, step.v, attn_mask=step.mask, scale=step.scale,
                  enable_gqa=step.q.shape[-3] != step.k.shape[-3])
        for step in call.steps()
    ]  # fmt: skip
    return torch.cat(outs, -2)


# How each is computed, and what reports call it.
_NAMED: dict[str, tuple[Callable[[Call], torch.Tensor], str]] = {
    "explicit": (_explicit, "explicit"),
    "exact": (functools.partial(_explicit_in, name="fp64"), "exact (FP64)"),
    "torch-lines": (functools.partial(torch_lines, shifted=False), "16 bits after each line"),
    "torch-lines-shifted": (functools.partial(torch_lines, shifted=True), "16 bits, maximum moved"),
}  # fmt: skip
LABELS = {
    **{name: attention.title for name, attention in ATTENTIONS.items()},
    **{name: label for name, (_, label) in _NAMED.items()},
}


def find_attention(name: str) -> Attention:
    """Returns the attention of a name.

    Names are those of `LABELS`; explicit:FORMAT, every result rounded to a format; PRESET,
    PRESET:FORMAT and PRESET+DELTA of emulated ones; and MODULE:FUNCTION or FILE.py:FUNCTION, with
    the signature of torch's scaled_dot_product_attention. NAME-decode is that of NAME, called once
    for each query over the keys up to it.

    Raises:
        ArgumentError: there is none of this name.
    """
    if name in _NAMED:
        return _attention(_NAMED[name][0])
    if name in ATTENTIONS:
        return _attention(functools.partial(_kernel, attention=ATTENTIONS[name]))
    if name.endswith(DECODE):
        stepped = find_attention(name.removesuffix(DECODE))
        return _attention(functools.partial(_decode, attention=stepped))
    plain, _, delta = name.partition("+")
    base, _, rest = plain.partition(":")
    if rest and base in ("explicit", *PRESETS):
        parse_format(rest)
    if base == "explicit" and not delta:
        return _attention(functools.partial(_explicit_in, name=rest))
    if base in PRESETS and delta in ("", *DELTAS):
        return _attention(lambda call: emulated_attention(call, base, rest, delta or "rounded"))
    if not rest or not (base.endswith(".py") or base.replace(".", "").isidentifier()):
        known = ", ".join((*LABELS, "explicit:FORMAT", *PRESETS, f"NAME{DECODE}"))
        raise ArgumentError(f"attention: expected one of {known} or MODULE:FUNCTION, got {name!r}")
    found: Attention = find_callable(name, "attention")
    return found


def gradients_of(attention: Attention, call: Call, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns dq, dk and dv."""
    leaves = [tensor.detach().requires_grad_() for tensor in (call.q, call.k, call.v)]
    out = attention(*leaves, attn_mask=call.mask, is_causal=call.causal, scale=call.scale)
    return torch.autograd.grad(out, leaves, dout)


def made_by(name: str, argument: str) -> Any:
    """Calls what `find_callable` finds.

    Raises:
        ArgumentError: there is none, or it needs arguments.
    """
    factory = find_callable(name, argument)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ArgumentError(
            f"{argument}: expected {name} to be a callable without arguments: {error}"
        ) from error
    except ValueError:  # builtins have no signature
        pass
    return factory()
