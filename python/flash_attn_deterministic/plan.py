"""The plan of a call: which kernels run, and how the work is divided; nothing is run."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import interface
from .build_info import build_info
from .checks.describe import shown
from .checks.kernels import instance_problem
from .checks.numbers import as_flag
from .checks.ops import validate
from .checks.tensors import cached_values, is_fp8
from .errors import ArgumentError, UnsupportedError
from .interface import call as steps
from .interface import kvcache
from .interface.descale import check_descales
from .mode import DECORATED, deterministic_mode
from .ops.autograd import check_no_tangent
from .schemas import (
    FAMILIES,
    PATHS,
    WITH_RESIDUAL,
    WITH_ROW_MAX,
    WITHOUT_BACKWARD,
    argument_names,
    unpacked,
)
from .types import Call, Lengths

_OPS = torch.ops.flash_attn_deterministic


@dataclass(frozen=True)
class BackwardPlan:
    """How the backward of a call is carried out. No bit of a deterministic one depends on it.

    Args:
        family: as in Plan.
        block_m: query rows to a tile.
        block_n: keys to a tile.
        parts: thread blocks that share a block of keys: of its rows, and its query heads.
        in_turns: whether thread blocks wait for each other, to add to dq in one order.
        heads_in_flight: KV heads, of all sequences, or parts of them, whose key blocks run at the
            same time.
        head_dim_v: as in Plan.
    """

    family: str
    block_m: int
    block_n: int
    parts: int
    in_turns: bool
    heads_in_flight: int
    head_dim_v: int


@dataclass(frozen=True)
class Plan:
    """How a call is carried out. Its bits depend on split_size and block_n, on nothing else here.

    Args:
        family: "sm80": the kernels for every supported GPU; "sm90": those for compute capability
            9.0 (Hopper), of calls that they cover; "reference": plain torch, on CPUs. The
            environment variable FLASH_ATTENTION_FAMILY, read in each call, overrides the choice:
            "sm80" runs those kernels on Hopper too, "sm90" runs Hopper's wherever they can run. The
            plan assumes contiguous tensors: others may run in the other family.
        path: "one-cta": one thread block walks over all splits of its rows; "parts": one thread
            block per split, then a kernel that merges the parts; "few-rows": the same for up to 16
            queries, or any number over a cache in e4m3 or of latent attention, where the heads of a
            group share a thread block; "scores-first": a kernel for all scores, then one for the
            rest, whose thread blocks take 32 columns of a split each.
        block_m: query rows per thread block.
        block_n: keys that a thread block processes at a time.
        split_size: tokens per split of the call or the mode; 0: one split.
        num_splits: splits of the longest sequence.
        tokens_per_split: tokens of a whole split; with one split, those of the longest sequence.
        launches: how often the kernels are launched; more launches need less scratch memory.
        scratch_bytes: memory besides inputs and outputs.
        backward: the plan of the backward; None on CPUs, for wheels without its kernels, and for
            calls without one.
        residual_bytes: memory for the rounding error of out, kept until the backward; 0 unless the
            mode has keep_residual and the call gets a backward.
        head_dim_v: the head dim that the kernels take v and out with. If it is larger than v's,
            they get a padded copy of v, and out comes from a wider one; scratch_bytes does not
            count them. If v's is larger than that of q and k, these are padded to it.
    """

    family: str
    path: str
    block_m: int
    block_n: int
    split_size: int
    num_splits: int
    tokens_per_split: int
    launches: int
    scratch_bytes: int
    backward: BackwardPlan | None = None
    residual_bytes: int = 0
    head_dim_v: int = 0


def explain(
    function: Callable[..., Any] | str | torch.Tensor | None = None, *args: Any, **kwargs: Any
) -> Plan:
    """Returns the plan of a call of one of this package's functions, without running it.

    The arguments are checked as in the call itself, and laid out for its op by the same function:
    nothing is computed, written, or drawn from a random generator.

    Args:
        function: one of this package's functions, or its name; also a functools.partial of one, one
            that torch.compile has compiled, or one that `deterministic_mode` decorates. If q or a
            keyword comes first: flash_attn_func.
        *args: arguments of the call.
        **kwargs: arguments of the call.

    Returns:
        The plan.

    Raises:
        ArgumentError: a ValueError; no such function.
        UnsupportedError: a NotImplementedError; the mode is not enabled, and the tensors are not on
            a CUDA device.
        All that the call itself raises before it runs.

    Example:
        >>> q = k = v = torch.ones(1, 4096, 2, 64, dtype=torch.bfloat16)
        >>> explain(flash_attn_func, q, k, v, split_size=1024).num_splits
        4
    """
    if isinstance(function, torch.Tensor):
        args = (function, *args)
    if function is None or isinstance(function, torch.Tensor):
        function = interface.flash_attn_func
    if isinstance(function, str):
        function = _FUNCTIONS.get(function, function)
    with contextlib.ExitStack() as modes:
        inner: Any = function
        while inner not in _FUNCTIONS.values():
            if isinstance(inner, functools.partial):
                args, kwargs = (*inner.args, *args), {**inner.keywords, **kwargs}
                inner = inner.func
            elif hasattr(inner, "_torchdynamo_orig_callable"):
                inner = inner._torchdynamo_orig_callable
            elif hasattr(inner, "__wrapped__"):
                if hasattr(inner, DECORATED):
                    modes.enter_context(deterministic_mode(*getattr(inner, DECORATED)))
                inner = inner.__wrapped__
            else:
                raise ArgumentError(
                    f"function: expected one of {', '.join(_FUNCTIONS)}, or its name, got "
                    f"{shown(function)}"
                )
        bound = inspect.signature(inner).bind(*args, **kwargs)
        bound.apply_defaults()
        call = _prepared(bound.arguments)
        check_descales(call, *(bound.arguments.get(f"{n}_descale") for n in "kv"))
    op, arguments = call
    q = arguments[1] if arguments[0] is None else arguments[0]
    check_no_tangent(arguments)
    validate(op, arguments, read_values=type(q) is torch.Tensor and q.device.type == "cpu")
    return _plan(op, arguments)


_FUNCTIONS = {name: getattr(interface, name) for name in interface.__all__}


def _prepared(given: dict[str, Any]) -> Call:
    """Returns the call of an op that a function makes of its arguments."""

    def values(*names: str) -> tuple[Any, ...]:
        return tuple(given[name] for name in names)

    numbers = values("softmax_scale", "causal", "window_size", "softcap", "split_size")
    slopes, sink = given["alibi_slopes"], given.get("learnable_sink")
    if "k_cache" in given:
        tensors = values(*argument_names("kvcache_fwd")[:11])
        return kvcache.prepare(tensors, numbers, given["rotary_interleaved"], slopes, sink)[1]
    inputs: Any = values("q", "k", "v") if "k" in given else None
    if inputs is None:
        inputs = values("q", "kv") if "kv" in given else (None, given["qkv"])
    lengths = None
    if "cu_seqlens" in given:
        lengths = Lengths(*values("cu_seqlens", "cu_seqlens", "max_seqlen", "max_seqlen"))
    elif "cu_seqlens_q" in given:
        lengths = Lengths(*(given.get(name) for name in Lengths._fields))  # type: ignore[arg-type]
    options = given["dropout_p"], *numbers, given["deterministic"]
    with_max = as_flag("return_max_logits", given.get("return_max_logits", False))
    seeds = given.get("dropout_seeds")
    rng_state = None if seeds is None else steps.as_rng_state(seeds)
    return steps.prepare(inputs, lengths, options, slopes, sink, with_max, rng_state)[-1]


def _plan(op: str, arguments: tuple[Any, ...]) -> Plan:
    """Returns the plan; lengths are those of the longest sequence, or an upper bound."""
    name, given = unpacked(op, dict(zip(argument_names(op), arguments, strict=False)))
    q, table = given["q"], given.get("block_table")
    keys, values = (given[f"{x}_cache" if name == "kvcache_fwd" else x] for x in "kv")
    values = cached_values(keys, values)
    # As the call pads them; kernels are made for the wider one.
    own, head_dim_v = (-(-x.shape[-1] // 8) * 8 for x in (q, values))
    head_dim = max(own, head_dim_v)
    page_size = 0 if table is None else keys.shape[1]
    seqlen_k = keys.shape[1] if table is None else table.shape[1] * page_size
    packed = name == "varlen_fwd"
    if packed:
        batch, seqlen_q = given["cu_seqlens_q"].shape[0] - 1, given["max_seqlen_q"]
        longest = given["max_seqlen_k"]
        seqlen_k = longest if table is None else min(longest, seqlen_k)
    else:
        batch, seqlen_q = q.shape[:2]
    split_size, deterministic = given["split_size"], given["deterministic"]
    with_residual = op.endswith(WITH_RESIDUAL)
    tile, several = build_info().tile(head_dim), 0 < split_size < seqlen_k
    plan = Plan(
        family="reference",
        path="one-cta",
        block_m=tile.block_m,
        block_n=tile.block_n,
        split_size=split_size,
        num_splits=-(-seqlen_k // split_size) if several else 1,
        tokens_per_split=split_size if several else seqlen_k,
        launches=1,
        scratch_bytes=0,
        residual_bytes=2 * q[..., 0].numel() * head_dim_v if with_residual else 0,
        head_dim_v=head_dim_v,
    )
    if q.device.type != "cuda":
        if deterministic:
            return plan
        raise UnsupportedError(
            "explain: without the deterministic mode, only calls on a CUDA device have a plan; "
            "call it inside deterministic_mode()"
        )
    shared = (
        torch.empty(0, dtype=q.dtype, device=q.device),
        *(batch, seqlen_q, seqlen_k, q.shape[-2], keys.shape[-2], own, head_dim_v),
        *(given["window_left"], given["window_right"], given["alibi_slopes"] is not None),
        *(given["softcap"] > 0.0, given.get("dropout_p", 0.0) > 0.0, packed),
    )
    family, path, block_m, num_splits, tokens, launches, scratch, head_dim_v = _OPS.plan(
        *shared,
        page_size,
        given.get("cache_batch_idx") is not None,
        is_fp8(keys),
        # which the same kernels compute
        with_residual or WITH_ROW_MAX in op or given.get("learnable_sink") is not None,
        split_size,
        deterministic,
    )
    backward = given.get("deterministic_bwd")
    if any(given.get(name) is not None for name in WITHOUT_BACKWARD):
        backward = None
    if backward is not None and not instance_problem(q.dtype, head_dim, "bwd"):
        bwd_family, *numbers = _OPS.bwd_plan(*shared, backward)
        if bwd_family >= 0:  # otherwise the GPU has too little shared memory for the backward
            plan = replace(plan, backward=BackwardPlan(FAMILIES[bwd_family], *numbers))
    return replace(
        plan,
        family=FAMILIES[family],
        path=PATHS[path],
        block_m=block_m,
        num_splits=num_splits,
        tokens_per_split=tokens if num_splits > 1 else seqlen_k,
        launches=launches,
        scratch_bytes=scratch,
        head_dim_v=head_dim_v,
    )
