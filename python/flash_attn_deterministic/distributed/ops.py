"""The ops `sequence_fwd` and `sequence_bwd`, for torch.compile and autograd.

The compiler does not trace into them: they read lengths from the device, and send messages.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import weakref
from typing import Any

import torch

from .. import tree
from ..build_info import build_info
from ..checks.kernels import check_kernels
from ..errors import BuildInfoError
from ..ops.autograd import alert_atomics, autograd_kernel, function_of, no_double_backward
from ..types import Gradients, Outputs
from . import agreement, passes
from .plan import KEY_BLOCK, Plan, Shape, plan_of
from .ranks import Ranks
from .spec import CallSpec

NAMESPACE = "flash_attn_deterministic"

# q, k, v: (batch, seqlen, nheads, head_dim), or (total, nheads, head_dim) with cu_seqlens of all
# ranks' tokens. `spec` is that of `CallSpec.text`.
_CALL = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, str spec"
_SCHEMAS = {
    "sequence_fwd": f"(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor out, Tensor softmax_lse)",
    # `forward` is the number of the forward in its group; -1: unknown.
    "sequence_bwd": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    f"{_CALL}, int forward) -> (Tensor dq, Tensor dk, Tensor dv)",
}


def _sequence_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    spec_text: str,
) -> Outputs:
    spec = CallSpec.read(spec_text)
    ranks = Ranks.named(spec.group)
    with agreement.taking_part(ranks.group):
        plan = _agreed("forward", ranks, q, k, (cu_seqlens_q, cu_seqlens_k), spec, None)
        out, softmax_lse = passes.forward(
            ranks, plan, _packed(q), _packed(k), _packed(v), spec.numbers
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
    spec_text: str,
    forward: int,
) -> Gradients:
    spec = CallSpec.read(spec_text)
    ranks = Ranks.named(spec.group)
    with agreement.taking_part(ranks.group):
        check_kernels(q.device, q.dtype, q.shape[-1], "bwd")
        if not spec.deterministic_bwd:
            alert_atomics(q.device)
        plan = _agreed("backward", ranks, q, k, (cu_seqlens_q, cu_seqlens_k), spec, forward)
        lse = softmax_lse.transpose(-1, -2).reshape(-1, softmax_lse.shape[-2])
        rows = passes.Rows(_packed(dout), _packed(q), _packed(out), lse)
        dq, dk, dv = passes.backward(ranks, plan, rows, _packed(k), _packed(v), spec.numbers)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns (batch, seqlen, ...) as (tokens, ...)."""
    return tensor if tensor.dim() == 3 else tensor.reshape(-1, *tensor.shape[2:])


def _agreed(
    call: str,
    ranks: Ranks,
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None],
    spec: CallSpec,
    forward: int | None,
) -> Plan:
    """Checks that all ranks make the same call, and returns the plan of it."""
    shape = shape_of(ranks, q, k, cu_seqlens, spec)
    agreed = ranks.agreement
    if agreed is not None:
        facts = _facts(q.dtype, tuple(q.shape), tuple(k.shape), shape, spec, q.device)
        follows = spec.backward and forward is None
        agreed.agree(call, facts, follows, forward)
    try:
        return plan_of(shape, ranks.rank)
    except Exception as error:
        agreement.know(error)  # follows from what all ranks have agreed on
        raise


def shape_of(
    ranks: Ranks,
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None],
    spec: CallSpec,
) -> Shape:
    """Returns all that the plan of a call depends on; the host waits for new cu_seqlens."""
    starts_q, starts_k = (None if one is None else _values(one) for one in cu_seqlens)
    dense = starts_q is None or starts_k is None
    if starts_q is None or starts_k is None:
        steps = (range(0, one.shape[0] + 1) for one in (q, k))
        starts_q, starts_k = (
            tuple(index * one.shape[1] * ranks.size for index in indices)
            for indices, one in zip(steps, (q, k), strict=True)
        )
    return Shape(
        starts_q,
        starts_k,
        dense,
        math.prod(q.shape[:-2]),
        math.prod(k.shape[:-2]),
        ranks.size,
        spec.order,
        spec.window_left,
        spec.window_right,
        math.lcm(KEY_BLOCK, spec.split_size or 1),
        tree.CHUNK_ROWS,
        q.shape[-2],
        k.shape[-2],
        q.shape[-1],
        q.element_size(),
        spec.ulysses_degree,
        spec.heads_k,
        ranks.in_one_machine,
    )


@functools.lru_cache(maxsize=256)
def _facts(
    dtype: torch.dtype,
    shape_q: tuple[int, ...],
    shape_k: tuple[int, ...],
    shape: Shape,
    spec: CallSpec,
    device: torch.device,
) -> str:
    """Returns what has to be the same on all ranks, by the name of the argument, as JSON."""
    starts = {} if shape.dense else {"cu_seqlens_q": shape.starts_q, "cu_seqlens_k": shape.starts_k}
    facts = {
        "q.dtype": str(dtype),
        **{f"q.shape[{index}]": size for index, size in enumerate(shape_q)},
        **{f"k.shape[{index}]": size for index, size in enumerate(shape_k)},
        **starts,
        "order": spec.order,
        "ulysses_degree (0: None)": spec.ulysses_degree,
        "heads_k_stride (0: None)": spec.heads_k,
        "whether an input requires a gradient": int(spec.backward),
        "softmax_scale": spec.softmax_scale,
        "the left window": spec.window_left,
        "the right window": spec.window_right,
        "softcap": spec.softcap,
        "split_size": spec.split_size,
        "the deterministic mode": int(spec.deterministic),
        "deterministic": int(spec.deterministic_bwd),
        "whether all ranks are on one machine": int(shape.one_machine),
        **_installed(device),
    }
    return json.dumps(facts)


@functools.cache
def _installed(device: torch.device) -> dict[str, Any]:
    """Returns what of this rank's installation and GPU bits depend on."""
    try:
        bits = build_info().bits_version
    except BuildInfoError:  # a source tree on the CPU
        bits = 0
    try:
        version = importlib.metadata.version("flash-attn-deterministic")
    except importlib.metadata.PackageNotFoundError:
        version = "a source tree"
    found: dict[str, Any] = {"the package's version": version, "bits_version": bits}
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        found["compute capability"] = f"{capability[0]}.{capability[1]}"
        found["FLASH_ATTENTION_FAMILY"] = os.environ.get("FLASH_ATTENTION_FAMILY", "")
    return found


# The values of tensors that have been read, while these live and are not written to.
_read: dict[int, tuple[weakref.ref[torch.Tensor], int, tuple[int, ...]]] = {}


def _values(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """Returns the values of cu_seqlens: the host waits for those on a GPU once."""
    if cu_seqlens.is_inference():  # without a count of writes
        return tuple(cu_seqlens.tolist())
    key = id(cu_seqlens)
    known = _read.get(key)
    if known is not None and known[0]() is cu_seqlens and known[1] == cu_seqlens._version:
        return known[2]
    values = tuple(cu_seqlens.tolist())
    gone = weakref.ref(cu_seqlens, lambda _: _read.pop(key, None))
    _read[key] = gone, cu_seqlens._version, values
    return values


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


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, ctx.spec = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.forward = -1
    if type(output[0]) is torch.Tensor:
        agreed = Ranks.named(CallSpec.read(ctx.spec).group).agreement
        ctx.forward = -1 if agreed is None else agreed.last


def _backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors
    if dout is None:
        # The other ranks may have a gradient, and wait for this one.
        dout = torch.zeros_like(saved[3])
    gradients = torch.ops.flash_attn_deterministic.sequence_bwd(
        dout.contiguous(), *saved, ctx.spec, ctx.forward
    )
    return *gradients, None, None


_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call, unused-ignore]
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
for _name, _body, _fake in (
    ("sequence_fwd", _sequence_fwd, _fake_fwd),
    ("sequence_bwd", _sequence_bwd, _fake_bwd),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _body, _key)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
for _name, _context, _formula, _count in (
    ("sequence_fwd", _setup, _backward, 3),
    ("sequence_bwd", None, no_double_backward, 6),
):
    _kernel = autograd_kernel(_name, function_of(_name, _context, _formula), _count)
    _library.impl(_name, _kernel, "Autograd", with_keyset=True)
