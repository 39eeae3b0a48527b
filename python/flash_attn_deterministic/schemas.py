"""The ops: their schemas, and the functions that lay out the arguments of a call.

The schemas are defined in Python, so that a torch without CUDA needs no binary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .types import Call, Inputs, Lengths, Options, Tensor

NAMESPACE = "flash_attn_deterministic"

# Scores and mask, and the tree that reduces the keys. causal is window_right 0; a negative window
# has no limit. Without deterministic, split_size has no effect. torch.compile takes an int (not a
# SymInt) as a constant, and compiles again for another value.
_SCORES = "float softmax_scale, int window_left, int window_right, float softcap"
_TREE = "int split_size, bool deterministic"
# rng_state is (2,), int64: seed and offset of the dropout mask. They are drawn on the device
# before the op, so that a replayed CUDA graph draws new ones. Or it is (batch, 1): the seed of each
# sequence, whose mask then does not depend on its index in the batch.
_SLOPES_AND_RNG = "Tensor? alibi_slopes, Tensor? rng_state"
# (nheads,), float32: one more score of each row, without a value.
_SINK = "Tensor? learnable_sink=None"
# For packed sequences.
_STARTS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k"
_LENGTHS = "SymInt max_seqlen_q, SymInt max_seqlen_k"
_OUTPUTS = "(Tensor out, Tensor softmax_lse)"
# Forward ops with this suffix have one more output: each row's largest score, as it enters the
# softmax, like softmax_lse; without keys -inf.
WITH_ROW_MAX = "_with_row_max"
# With this one, which comes last, a last one: the rounding error of out, like it, in bfloat16. With
# it, a backward computes rowsum(dout * (out + residual)).
WITH_RESIDUAL = "_with_residual"
# dlse is the gradient of softmax_lse.
_BACKWARD_MODE = "bool deterministic, Tensor? residual=None, Tensor? dlse=None"
_GRADIENTS = "(Tensor dq, Tensor dk, Tensor dv)"
# q, k and v in one tensor and no q, or k and v in one tensor beside q. The gradient is one tensor
# too; without q, dq has shape (0).
_QKV_PACKED = "Tensor? q, Tensor qkv"
_PACKED_GRADIENTS = "(Tensor dq, Tensor dqkv)"

# deterministic_bwd does not affect the forward; autograd passes it to the backward.
FORWARD = {
    "fwd": f"(Tensor q, Tensor k, Tensor v, {_SLOPES_AND_RNG}, float dropout_p, {_SCORES}, "
    f"{_TREE}, bool deterministic_bwd, {_SINK}) -> {_OUTPUTS}",
    "varlen_fwd": f"(Tensor q, Tensor k, Tensor v, {_STARTS}, Tensor? seqused_k, "
    f"Tensor? leftpad_k, Tensor? block_table, {_SLOPES_AND_RNG}, {_LENGTHS}, float dropout_p, "
    f"{_SCORES}, {_TREE}, bool deterministic_bwd, {_SINK}) -> {_OUTPUTS}",
    "qkvpacked_fwd": f"({_QKV_PACKED}, {_SLOPES_AND_RNG}, float dropout_p, {_SCORES}, {_TREE}, "
    f"bool deterministic_bwd) -> {_OUTPUTS}",
    "varlen_qkvpacked_fwd": f"({_QKV_PACKED}, {_STARTS}, {_SLOPES_AND_RNG}, {_LENGTHS}, "
    f"float dropout_p, {_SCORES}, {_TREE}, bool deterministic_bwd) -> {_OUTPUTS}",
    "kvcache_fwd": "(Tensor q, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor? k, Tensor? v, "
    "Tensor? cache_seqlens, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? cache_batch_idx, "
    "Tensor? cache_leftpad, Tensor? block_table, Tensor? alibi_slopes, "
    f"{_SCORES}, bool rotary_interleaved, {_TREE}, {_SINK}) -> {_OUTPUTS}",
}
FORWARD |= {
    name + WITH_ROW_MAX: f"{FORWARD[name][:-1]}, Tensor row_max)" for name in ("fwd", "varlen_fwd")
}
FORWARD |= {
    name + WITH_RESIDUAL: f"{schema[:-1]}, Tensor residual)"
    for name, schema in FORWARD.items()
    if "deterministic_bwd" in schema
}
BACKWARD = {
    "bwd": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    f"{_SLOPES_AND_RNG}, float dropout_p, {_SCORES}, {_BACKWARD_MODE}) -> {_GRADIENTS}",
    "varlen_bwd": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    f"{_STARTS}, {_SLOPES_AND_RNG}, {_LENGTHS}, float dropout_p, {_SCORES}, {_BACKWARD_MODE}) "
    f"-> {_GRADIENTS}",
    "qkvpacked_bwd": f"(Tensor dout, {_QKV_PACKED}, Tensor out, Tensor softmax_lse, "
    f"{_SLOPES_AND_RNG}, float dropout_p, {_SCORES}, {_BACKWARD_MODE}) -> {_PACKED_GRADIENTS}",
    "varlen_qkvpacked_bwd": f"(Tensor dout, {_QKV_PACKED}, Tensor out, Tensor softmax_lse, "
    f"{_STARTS}, {_SLOPES_AND_RNG}, {_LENGTHS}, float dropout_p, {_SCORES}, {_BACKWARD_MODE}) "
    f"-> {_PACKED_GRADIENTS}",
}
# Sums over rows. sink_bwd: the gradient of learnable_sink; cu_seqlens_q and max_seqlen_q are for
# packed sequences. For ranks that share the rows of a sequence: dq, and sums of dk and dv over
# these rows, float32, unscaled, (total_k, nheads_k, head_dim). finish_key_sums makes dk and dv of
# the sums of all rows.
SUMS = {
    "sink_bwd": "(Tensor dout, Tensor out, Tensor softmax_lse, Tensor learnable_sink, "
    "Tensor? cu_seqlens_q, SymInt max_seqlen_q, Tensor? residual=None, Tensor? dlse=None) "
    "-> (Tensor dsink)",
    "varlen_bwd_sums": BACKWARD["varlen_bwd"].replace(
        _GRADIENTS, "(Tensor dq, Tensor dk_sums, Tensor dv_sums)"
    ),
    "finish_key_sums": "(Tensor dk_sums, Tensor dv_sums, Tensor k, float softmax_scale, "
    "float softcap, float dropout_p) -> (Tensor dk, Tensor dv)",
}
# For explain; (family, path, block_m, num_splits, tokens per split, launches, scratch bytes,
# head_dim_v) of a forward, and (family, block_m, block_n, parts, in_turns, heads_in_flight,
# head_dim_v) of a backward.
_SHAPES = (
    "Tensor like, int batch, int seqlen_q, int seqlen_k, int nheads, int nheads_k, int head_dim, "
    "int head_dim_v, int window_left, int window_right, bool has_alibi, bool has_softcap, "
    "bool has_dropout, bool packed"
)
PLAN = {
    "plan": f"({_SHAPES}, int page_size, bool cache_index, bool kv_fp8, bool keep_residual, "
    f"{_TREE}) -> (int, int, int, int, int, int, int, int)",
    "bwd_plan": f"({_SHAPES}, bool deterministic) -> (int, int, int, int, bool, int, int)",
}
# Arguments of varlen_fwd with which a call has no backward.
WITHOUT_BACKWARD = ("seqused_k", "leftpad_k", "block_table")
# Names of the plan's numbers, in the order of cpp/kernels/fwd.h.
FAMILIES = ("sm80", "sm90")
PATHS = ("one-cta", "parts", "few-rows", "scores-first")


def define(library: Any) -> None:
    """Defines all ops in a torch.library.Library."""
    for name, schema in {**FORWARD, **BACKWARD, **SUMS, **PLAN}.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))


def parts_of(q: Tensor | None, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v as views of the arguments of an op on packed tensors.

    qkv is (..., seqlen_k, 2, nheads_k, head_dim), or without q (..., seqlen, 3, nheads, head_dim).
    """
    if q is None:
        q, k, v = qkv.unbind(-3)
    else:
        k, v = qkv.unbind(-3)
    return q, k, v


def without_suffixes(name: str) -> str:
    """Returns the name of the forward op that makes the same call, with two outputs."""
    return name.removesuffix(WITH_RESIDUAL).removesuffix(WITH_ROW_MAX)


def unpacked(name: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns name, without suffixes, and arguments of the op on q, k and v for the same call."""
    plain = without_suffixes(name.replace("qkvpacked_", ""))
    if "qkv" not in arguments:
        return plain, dict(arguments)
    parts = zip("qkv", parts_of(arguments["q"], arguments["qkv"]), strict=True)
    given = {**arguments, **dict(parts)}
    return plain, {argument: given.get(argument) for argument in argument_names(plain)}


def _names(schema: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of arguments and of results."""
    arguments, results = (part.strip("()").split(", ") for part in schema.split(" -> "))
    return (
        tuple(argument.split()[-1].split("=")[0] for argument in arguments),
        tuple(result.split()[-1] for result in results),
    )


# Not a cache: torch.compile warns of functions that have one.
_NAMES = {name: _names(schema) for name, schema in {**FORWARD, **BACKWARD, **SUMS}.items()}


def argument_names(name: str) -> tuple[str, ...]:
    """Returns the names of an op's arguments, in order."""
    return _NAMES[name][0]


def result_names(name: str) -> tuple[str, ...]:
    """Returns the names of an op's results, in order."""
    return _NAMES[name][1]


# The layout of each op's arguments, which the callers of the ops share.


def forward_call(
    inputs: Inputs,
    lengths: Lengths | None,
    options: Options,
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None = None,
    with_residual: bool = False,
    learnable_sink: Tensor | None = None,
    with_row_max: bool = False,
) -> Call:
    """Lays out a forward; without lengths a dense one."""
    packed = len(inputs) == 2
    sink = () if packed else (learnable_sink,)
    if alibi_slopes is not None:
        alibi_slopes = _detached(alibi_slopes)
    arguments: tuple[Any, ...]
    if lengths is None:
        op = "qkvpacked_fwd" if packed else "fwd"
        arguments = *inputs, alibi_slopes, rng_state, *options[:-1], *sink
    else:
        op = "varlen_qkvpacked_fwd" if packed else "varlen_fwd"
        where = plain(lengths[:2] if packed else lengths[:2] + lengths[4:])
        random = alibi_slopes, rng_state
        arguments = *inputs, *where, *random, *lengths[2:4], *options[:-1], *sink
    if with_row_max:
        op += WITH_ROW_MAX
    return op + WITH_RESIDUAL if with_residual else op, arguments


def backward_call(
    dout: Tensor,
    inputs: Inputs,
    out: Tensor,
    softmax_lse: Tensor,
    lengths: Lengths | None,
    options: Options,
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None,
    sums: bool = False,
    dlse: Tensor | None = None,
) -> Call:
    """Lays out the backward of `forward_call`; with sums, one that returns those of dk and dv."""
    op = ("" if lengths is None else "varlen_") + ("qkvpacked_bwd" if len(inputs) == 2 else "bwd")
    starts = () if lengths is None else plain(lengths[:2])
    longest = () if lengths is None else lengths[2:4]
    random = *plain((alibi_slopes,)), rng_state
    numbers = *options[:5], options.deterministic_bwd
    arguments = dout, *inputs, out, softmax_lse, *starts, *random, *longest, *numbers, None, dlse
    return f"{op}_sums" if sums else op, arguments


def cache_call(
    tensors: tuple[Tensor | None, ...],
    options: Options,
    rotary_interleaved: bool,
    alibi_slopes: Tensor | None,
    learnable_sink: Tensor | None = None,
) -> Call:
    """Lays out a call on a cache; tensors are those from q to block_table."""
    if alibi_slopes is not None:
        alibi_slopes = _detached(alibi_slopes)
    # Its numbers have no dropout_p and no deterministic_bwd, and one more.
    numbers = *options[1:5], rotary_interleaved, *options[5:7]
    where = plain(tensors[5:])
    return "kvcache_fwd", (*tensors[:5], *where, alibi_slopes, *numbers, learnable_sink)


def _detached(alibi_slopes: Any) -> Any:
    if isinstance(alibi_slopes, Tensor):
        (alibi_slopes,) = plain((alibi_slopes.detach(),))
    return alibi_slopes


def plain(tensors: tuple[Any, ...]) -> list[Any]:
    """Returns small tensors as the ops take them, contiguous; what they refuse, as it is."""
    strided = torch.strided
    return [
        # None first: most are, and isinstance takes the host longer.
        x if x is None or not isinstance(x, Tensor) or x.layout is not strided else x.contiguous()
        for x in tensors
    ]
