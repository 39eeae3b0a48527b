"""The ops `sequence_fwd` and `sequence_bwd`, for torch.compile and autograd.

The compiler does not trace into them: they read lengths from the device, and send messages.
"""

from __future__ import annotations

import functools
import json
import math
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch

from .. import tree
from ..build_info import build_info, installed_version
from ..checks.kernels import check_kernels
from ..environment import FAMILY
from ..errors import BuildInfoError, UnsupportedError
from ..ops.autograd import alert_atomics, autograd_kernel, function_of, no_double_backward
from ..private import C, is_observed
from ..types import Gradients, Options, Outputs
from . import agreement, passes
from .plan import KEY_BLOCK, Plan, Shape, plan_of
from .ranks import Ranks

NAMESPACE = "flash_attn_deterministic"
Kept = TypeVar("Kept")


class CallSpec(NamedTuple):
    """The numbers of a call, checked, with all defaults filled in: the last arguments of the ops.

    Args:
        group: name of the process group.
        order: of the tokens; in ORDERS.
        ulysses_degree: ranks over which heads are divided; 0: the planner chooses.
        heads_k: KV heads computed at a time; 0: the planner chooses.
        backward: whether an input requires a gradient.
        has_sink: whether there is an attention sink.
        softmax_scale: as of `Options`, and so are the others.
    """

    group: str
    order: str
    ulysses_degree: int
    heads_k: int
    backward: bool
    has_sink: bool
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    split_size: int
    deterministic: bool
    deterministic_bwd: bool

    @property
    def options(self) -> Options:
        """Returns those of attention on one device."""
        return Options(0.0, *self[6:])


# q, k, v: (batch, seqlen, nheads, head_dim), or (total, nheads, head_dim) with cu_seqlens of all
# ranks' tokens; then a CallSpec.
_NUMBERS = ", ".join(f"{one.__name__} {name}" for name, one in get_type_hints(CallSpec).items())
_CALL = f"Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, {_NUMBERS}"
_SCHEMAS = {
    "sequence_fwd": f"(Tensor q, Tensor k, Tensor v, Tensor? learnable_sink, {_CALL}) "
    "-> (Tensor out, Tensor softmax_lse)",
    # `forward` is the number of the forward in its group; -1: unknown.
    "sequence_bwd": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    f"{_CALL}, int forward) -> (Tensor dq, Tensor dk, Tensor dv)",
}


def run(name: str, *arguments: Any) -> Any:
    """Runs an op, past torch's dispatcher where only autograd observes the call."""
    if torch.compiler.is_compiling() or is_observed(arguments[:3]):
        return getattr(torch.ops.flash_attn_deterministic, name)(*arguments)
    body, apply, count = _bodies[name]
    wanted = arguments[:count]
    if torch.is_grad_enabled() and C._any_requires_grad(*wanted):
        return apply(*wanted, None, arguments)
    with C._AutoDispatchBelowAutograd():
        return body(*arguments)


def _sequence_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    learnable_sink: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    *numbers: Any,
) -> Outputs:
    spec = CallSpec(*numbers)
    ranks = Ranks.named(spec.group)
    with ranks.agreement.taking_part():
        plan = _agreed("forward", ranks, q, k, (cu_seqlens_q, cu_seqlens_k), spec, None)
        out, softmax_lse = passes.forward(
            ranks, plan, _packed(q), _packed(k), _packed(v), spec.options, learnable_sink
        )
    if q.dim() == 3:
        return out, softmax_lse.contiguous()
    by_sequence = softmax_lse.view(q.shape[2], q.shape[0], q.shape[1])
    return out.view(q.shape), by_sequence.transpose(0, 1).contiguous()


def _sequence_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    *numbers: Any,
) -> Gradients:
    spec, forward = CallSpec(*numbers[:-1]), numbers[-1]
    ranks = Ranks.named(spec.group)
    with ranks.agreement.taking_part():
        check_kernels(q.device, q.dtype, q.shape[-1], "bwd")
        if not spec.deterministic_bwd:
            alert_atomics(q.device)
        plan = _agreed("backward", ranks, q, k, (cu_seqlens_q, cu_seqlens_k), spec, forward)
        lse = softmax_lse if q.dim() == 3 else softmax_lse.transpose(0, 1).flatten(1)
        rows = passes.Rows(_packed(dout), _packed(q), _packed(out), lse)
        dq, dk, dv = passes.backward(ranks, plan, rows, _packed(k), _packed(v), spec.options)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns (batch, seqlen, ...) as (tokens, ...)."""
    return tensor if tensor.dim() == 3 else tensor.flatten(0, 1)


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
    found = known(ranks, q, k, cu_seqlens, spec)
    follows = spec.backward and forward is None
    ranks.agreement.agree(call, found.facts, found.kind, follows, forward)
    try:
        return found.plan
    except Exception as error:
        agreement.know(error)  # follows from what all ranks have agreed on
        raise


# What fields of a CallSpec are called in errors, if not by their names.
_WORDS = {
    "ulysses_degree": "ulysses_degree (0: None)",
    "heads_k": "heads_k_stride (0: None)",
    "backward": "whether an input requires a gradient",
    "has_sink": "whether there is a learnable_sink",
    "window_left": "the left window",
    "window_right": "the right window",
    "deterministic": "the deterministic mode",
    "deterministic_bwd": "deterministic",
}


class Starts(tuple[int, ...]):
    """The values of cu_seqlens; hashed once, as they are a part of keys in each call."""

    def __hash__(self) -> int:
        """Returns what is kept, or that of a tuple."""
        found: int | None = self.__dict__.get("hash")
        if found is None:
            found = self.__dict__["hash"] = super().__hash__()
        return found


@dataclass(frozen=True)
class Known:
    """What a call's arguments say."""

    rank: int  # of this process
    shape: Shape  # what the plan depends on
    facts: str  # JSON of what all ranks have to agree on
    kind: str  # the same without lengths of packed sequences
    has_sink: bool  # whether there is an attention sink

    @functools.cached_property
    def plan(self) -> Plan:
        """What this rank does; see `layout` for the errors of lengths that do not fit."""
        if self.has_sink and self.shape.has_blind_rows:
            raise UnsupportedError(
                "learnable_sink: expected None on several ranks where rows of q see no key: more "
                "queries than keys in a sequence, or no keys"
            )
        return plan_of(self.shape, self.rank)


def known(
    ranks: Ranks,
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None],
    spec: CallSpec,
) -> Known:
    """Returns what is known of a call. The host waits for new cu_seqlens."""
    starts = None
    if cu_seqlens[0] is not None and cu_seqlens[1] is not None:
        starts = _values(cu_seqlens[0]), _values(cu_seqlens[1])
    where = ranks.rank, ranks.size, ranks.in_one_machine
    return _known(
        q.dtype, q.device, q.shape, k.shape, starts, spec, *where, KEY_BLOCK, tree.CHUNK_ROWS
    )


@functools.lru_cache(maxsize=16)
def _known(
    dtype: torch.dtype,
    device: torch.device,
    shape_q: torch.Size,
    shape_k: torch.Size,
    starts: tuple[Starts, Starts] | None,
    spec: CallSpec,
    rank: int,
    size: int,
    one_machine: bool,
    block: int,
    chunk: int,
) -> Known:
    facts = {
        "q.dtype": str(dtype),
        **{f"q.shape[{index}]": length for index, length in enumerate(shape_q)},
        **{f"k.shape[{index}]": length for index, length in enumerate(shape_k)},
    }
    if starts is not None:
        starts_q, starts_k = starts
        facts |= {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
    else:
        starts_q, starts_k = (
            Starts(index * one[1] * size for index in range(one[0] + 1))
            for one in (shape_q, shape_k)
        )
    shape = Shape(
        starts_q,
        starts_k,
        starts is None,
        math.prod(shape_q[:-2]),
        math.prod(shape_k[:-2]),
        size,
        spec.order,
        spec.window_left,
        spec.window_right,
        math.lcm(block, spec.split_size or 1),
        chunk,
        *(shape_q[-2], shape_k[-2], shape_q[-1], dtype.itemsize),
        spec.ulysses_degree,
        spec.heads_k,
        one_machine,
    )
    for name, number in zip(spec._fields[1:], spec[1:], strict=True):  # but for the group
        facts[_WORDS.get(name, name)] = int(number) if isinstance(number, bool) else number
    facts |= {"whether all ranks are on one machine": int(one_machine), **_installed(device)}
    lengths = () if starts is None else ("cu_seqlens_q", "cu_seqlens_k", "q.shape[0]", "k.shape[0]")
    kind = {name: one for name, one in facts.items() if name not in lengths}
    return Known(rank, shape, json.dumps(facts), json.dumps(kind), spec.has_sink)


@functools.cache
def _installed(device: torch.device) -> dict[str, Any]:
    """Returns what of this rank's installation and GPU bits depend on."""
    try:
        bits = build_info().bits_version
    except BuildInfoError:  # a source tree on the CPU
        bits = 0
    version = installed_version() or "a source tree"
    found: dict[str, Any] = {"the package's version": version, "bits_version": bits}
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        found["compute capability"] = f"{capability[0]}.{capability[1]}"
        found[FAMILY] = os.environ.get(FAMILY, "")
    return found


def _values(cu_seqlens: torch.Tensor) -> Starts:
    """Returns the values of cu_seqlens: the host waits for those on a GPU once."""
    return kept(cu_seqlens, "values", lambda: Starts(cu_seqlens.tolist()))


# What belongs to tensors: by id, the tensor, its count of writes, and what is kept by key.
_kept: dict[int, tuple[weakref.ref[torch.Tensor], int, dict[Any, Any]]] = {}


def kept(tensor: torch.Tensor, key: Any, make: Callable[[], Kept]) -> Kept:
    """Returns what `make` returns, and does later, while the tensor lives and is not written to."""
    if torch.compiler.is_compiling() or tensor.is_inference():  # without a count of writes
        return make()
    at = id(tensor)
    found = _kept.get(at)
    if found is None or found[0]() is not tensor or found[1] != tensor._version:
        gone = weakref.ref(tensor, lambda _: _kept.pop(at, None))
        found = _kept[at] = gone, tensor._version, {}
    if key not in found[2]:
        found[2][key] = make()
    values: Kept = found[2][key]
    return values


# --- shapes, gradients --------------------------------------------------------------------------


def _fake_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *call: Any) -> Outputs:
    *tokens, nheads, _ = q.shape
    shape = (nheads, tokens[0]) if len(tokens) == 1 else (tokens[0], nheads, tokens[1])
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


def _fake_bwd(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *call: Any
) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    q, k, v, _, *starts = inputs[:6]
    ctx.spec = CallSpec(*inputs[6:])
    ctx.save_for_backward(q, k, v, *output, *starts)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.forward = -1
    if type(output[0]) is torch.Tensor:
        ctx.forward = Ranks.named(ctx.spec.group).agreement.last


def _backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors
    if dout is None:
        # The other ranks may have a gradient, and wait for this one.
        dout = torch.zeros_like(saved[3])
    gradients = run("sequence_bwd", dout.contiguous(), *saved, *ctx.spec, ctx.forward)
    return *gradients, None, None


_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call, unused-ignore]
# By op: what computes it, apply of its Function, leading arguments that get gradients.
_bodies: dict[str, tuple[Any, Any, int]] = {}
for _name, _body, _fake, _context, _formula, _count in (
    ("sequence_fwd", _sequence_fwd, _fake_fwd, _setup, _backward, 3),
    ("sequence_bwd", _sequence_bwd, _fake_bwd, None, no_double_backward, 6),
):
    _library.define(_name + _SCHEMAS[_name], tags=(torch.Tag.pt2_compliant_tag,))
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _body, _key)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
    _apply: Any = function_of(_name, _context, _formula, _body)
    _bodies[_name] = _body, _apply, _count
    _kernel = autograd_kernel(_name, _apply, _count)
    _library.impl(_name, _kernel, "Autograd", with_keyset=True)
