"""The ops `sequence_fwd`, `sequence_bwd` and `swap`, for torch.compile and autograd.

As in torch's functional collectives, a process group is passed by its name. The compiler does not
trace into the ops, which read lengths from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import tree
from ..checks.kernels import check_kernels
from ..ops.autograd import alert_atomics, autograd_kernel, function_of, no_double_backward
from ..types import Gradients, Outputs
from .messages.agreement import check
from .messages.ranks import Ranks
from .passes import forward, gathered_backward, summed_backward
from .passes.op_calls import Numbers, Rows
from .planning.layout import ORDERS, Tokens, dense_tokens, packed_tokens
from .planning.plan import Mask
from .planning.runs import suits

NAMESPACE = "flash_attn_deterministic"

# q, k, v: (batch, seqlen, nheads, head_dim), or (total, nheads, head_dim) with cu_seqlens of all
# ranks' tokens. `order` is an index in ORDERS. `gather` selects the gathered backward. `backward`:
# whether a gradient is wanted, which has to be the same on all ranks.
_CALL = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, str group, str heads_group, int order, "
    "int heads_k, bool gather, bool backward, float softmax_scale, int window_left, "
    "int window_right, float softcap, int split_size, bool deterministic, bool deterministic_bwd"
)
_SCHEMAS = {
    "sequence_fwd": f"(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor out, Tensor softmax_lse)",
    "sequence_bwd": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    f"{_CALL}) -> (Tensor dq, Tensor dk, Tensor dv)",
    # An all-to-all: cuts dimension `scatter`, and joins the received parts along `gather`. `agreed`
    # (the shapes of q and k, whether softmax_lse is returned, and which of q, k and v get a
    # gradient) has to be the same on all ranks; empty: not checked. An error is reported to the
    # ranks of `then`.
    "swap": "(Tensor tensor, int scatter, int gather, str group, SymInt[] agreed, str then) "
    "-> Tensor",
}
# Makes every backward the gathered one, for tests and comparisons.
GATHER = False


def _sequence_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    group: str,
    heads_group: str,
    order: int,
    heads_k: int,
    gather: bool,
    backward: bool,
    *numbers: Any,
) -> Outputs:
    ranks, scores = Ranks.named(group), _scores(numbers)
    tokens_q, tokens_k = _agreed(
        ranks,
        Ranks.named(heads_group),
        q,
        k,
        cu_seqlens_q,
        cu_seqlens_k,
        order,
        (heads_k, gather, backward),
        scores,
    )
    out, softmax_lse = forward.forward(
        ranks, _packed(q), _packed(k), _packed(v), tokens_q, tokens_k, scores, heads_k
    )
    if q.dim() == 3:
        return out, softmax_lse.transpose(0, 1).contiguous()
    by_sequence = softmax_lse.view(q.shape[:3])
    return out.view(q.shape), by_sequence.transpose(1, 2).contiguous()


def _sequence_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    group: str,
    heads_group: str,
    order: int,
    heads_k: int,
    gather: bool,
    backward: bool,
    *numbers: Any,
) -> Gradients:
    ranks, scores = Ranks.named(group), _scores(numbers)
    check_kernels(q.device, q.dtype, q.shape[-1], "bwd")
    if not scores.deterministic_bwd:
        alert_atomics(q.device)
    # The ranks of the heads agreed in the forward.
    settings = (heads_k, gather, backward)
    tokens_q, tokens_k = _agreed(
        ranks, Ranks(None), q, k, cu_seqlens_q, cu_seqlens_k, order, settings, scores
    )
    # The gathered backward doubles the work; the other one needs whole chunks of rows on a rank.
    # Both have the same bits.
    lse = softmax_lse.transpose(-1, -2).reshape(-1, softmax_lse.shape[-2])
    rows = Rows(_packed(dout), _packed(q), _packed(out), lse)
    summed = not gather and suits(tokens_q, tokens_k, scores.mask, tree.CHUNK_ROWS)
    module = summed_backward if summed else gathered_backward
    dq, dk, dv = module.backward(
        ranks, rows, _packed(k), _packed(v), tokens_q, tokens_k, scores, heads_k or 1
    )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _swap(
    tensor: torch.Tensor,
    scatter: int,
    gather: int,
    group: str,
    agreed: Sequence[int],
    then: str,
) -> torch.Tensor:
    ranks = Ranks.named(group)
    if agreed:
        names = [f"{name}.shape[{index}]" for name in "qk" for index in range(tensor.dim())]
        # A gradient has an all-to-all of its own, which would meet that of another tensor.
        names += ["return_attn_probs", *(f"whether {name} requires a gradient" for name in "qkv")]
        facts = dict(zip(names, agreed, strict=True))
        check(ranks, {"q.dtype": tensor.dtype, **facts}, tensor.device, Ranks.named(then))
    # (ranks, part of the scattered dimension, ...), a row of bytes for each rank.
    parts = torch.stack(tensor.chunk(ranks.size, scatter))
    rows = parts.flatten(1).view(torch.uint8)
    ones = [1] * ranks.size
    arrived = ranks.all_to_all(rows, ones, ones, "heads").wait()
    return torch.cat(list(arrived.flatten().view(tensor.dtype).view(parts.shape)), dim=gather)


def _scores(numbers: Sequence[Any]) -> Numbers:
    scale, left, right, *others = numbers
    return Numbers(scale, Mask(left, right), *others)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 3 else tensor.flatten(0, 1)


def _agreed(
    ranks: Ranks,
    heads: Ranks,
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    order: int,
    numbers: tuple[int, bool, bool],
    scores: Numbers,
) -> tuple[Tokens, Tokens]:
    """Checks that all ranks make the same call, and returns where the tokens of q and k are."""
    starts_q, starts_k = (
        None if starts is None else tuple(starts.tolist())
        for starts in (cu_seqlens_q, cu_seqlens_k)
    )
    facts = {
        "the number of dimensions of q": q.dim(),
        "q.dtype": q.dtype,
        **{f"q.shape[{index}]": size for index, size in enumerate(q.shape)},
        **{f"k.shape[{index}]": size for index, size in enumerate(k.shape)},
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": starts_k,
        "order": ORDERS[order],
        "heads_k_stride (0: None)": numbers[0],
        "gather": int(numbers[1]),
        "whether an input requires a gradient": int(numbers[2]),
        "softmax_scale": scores.softmax_scale,
        "the left window": scores.mask.left,
        "the right window": scores.mask.right,
        "softcap": scores.softcap,
        "split_size": scores.split_size,
        "the deterministic mode": int(scores.deterministic),
        "deterministic": int(scores.deterministic_bwd),
    }
    if heads.size > 1:
        check(heads, facts, q.device, ranks)
    if ranks.size > 1:
        check(ranks, facts, q.device)
    if starts_q is None or starts_k is None:
        batch, seqlen_q = q.shape[:2]
        return (
            dense_tokens(batch, seqlen_q, ranks.size, ORDERS[order]),
            dense_tokens(batch, k.shape[1], ranks.size, ORDERS[order]),
        )
    return (
        packed_tokens(starts_q, q.shape[0], ranks.size, ORDERS[order], "cu_seqlens_q"),
        packed_tokens(starts_k, k.shape[0], ranks.size, ORDERS[order], "cu_seqlens_k"),
    )


# --- shapes, gradients --------------------------------------------------------------------------


def _fake_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *call: Any) -> Outputs:
    *tokens, nheads, _ = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    shape = (nheads, tokens[0]) if len(tokens) == 1 else (tokens[0], nheads, tokens[1])
    return q.new_empty(q.shape), q.new_empty(shape, dtype=dtype)


def _fake_bwd(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *call: Any
) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _fake_swap(
    tensor: torch.Tensor,
    scatter: int,
    gather: int,
    group: str,
    agreed: Sequence[int],
    then: str,
) -> torch.Tensor:
    size = Ranks.named(group).size
    shape = list(tensor.shape)
    shape[scatter] //= size
    shape[gather] *= size
    return tensor.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.call = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Gradients:
    saved = ctx.saved_tensors
    if dout is None:
        # The other ranks may have a gradient, and wait for this one.
        dout = torch.zeros_like(saved[3])
    gradients = torch.ops.flash_attn_deterministic.sequence_bwd(
        dout.contiguous(), *saved, *ctx.call
    )
    return gradients  # type: ignore[no-any-return]


def _setup_swap(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.scatter, ctx.gather, ctx.group, _, _ = inputs


def _backward_swap(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor]:
    back = torch.ops.flash_attn_deterministic.swap(
        gradient.contiguous(), ctx.gather, ctx.scatter, ctx.group, [], ""
    )
    return (back,)


_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call, unused-ignore]
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
for _name, _body, _fake in (
    ("sequence_fwd", _sequence_fwd, _fake_fwd),
    ("sequence_bwd", _sequence_bwd, _fake_bwd),
    ("swap", _swap, _fake_swap),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _body, _key)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
for _name, _context, _formula, _count in (
    ("sequence_fwd", _setup, _backward, 3),
    ("sequence_bwd", None, no_double_backward, 6),
    ("swap", _setup_swap, _backward_swap, 1),
):
    _kernel = autograd_kernel(_name, function_of(_name, _context, _formula), _count)
    _library.impl(_name, _kernel, "Autograd", with_keyset=True)
