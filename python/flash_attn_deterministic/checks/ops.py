"""One validator for each op, which raises what the caller did wrong.

The kernels for CPU and meta tensors call it first. The CUDA kernels check by themselves all that
their memory depends on, without these words: a call that they refused is validated afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import ArgumentError, DtypeError, UnsupportedError
from ..schemas import BACKWARD, FORWARD, argument_names, parts_of
from . import kernels, numbers, values
from .describe import shown
from .tensors import (
    DENSE,
    LATENT,
    NAMES,
    NAMES_CACHE,
    NAMES_KV,
    NAMES_QKV,
    PACKED,
    PAGED,
    VARLEN,
    Names,
    cached_values,
    capacity,
    check_alike,
    check_batch,
    check_cached,
    check_cu_seqlens,
    check_device,
    check_dtype,
    check_head_dim,
    check_heads,
    check_int32,
    check_is,
    check_like,
    check_packed,
    check_page_size,
    check_rank,
    check_shape,
    check_tensor,
    is_fp8,
)

Given = dict[str, Any]


def validate(op: str, arguments: Sequence[Any], read_values: bool = False) -> None:
    """Checks the arguments of an op, in the order of its schema; raises as `flash_attn_func`.

    Defaults at the end may be missing. cache_seqlens may be an int, of which the caller makes a
    tensor. With `read_values`, the values of lengths and indices are checked too, of CPU tensors.
    """
    given = dict(zip(argument_names(op), arguments, strict=False))
    _VALIDATORS[op](given)
    if read_values:
        values.check_values(given, names_of(given))


def names_of(given: Given) -> Names:
    """Returns what the caller of an op calls its arguments."""
    if "qkv" not in given:
        return NAMES_CACHE if "k_cache" in given else NAMES
    return NAMES_QKV if given["q"] is None else NAMES_KV


def _forward(given: Given) -> None:
    q, v = _inputs(given)
    _slopes(given, q)
    _sinks(given, q)
    _seeds(given, q)
    _numbers(given, q, v, "fwd")


def _backward(given: Given) -> None:
    q, v = _inputs(given)
    out = given["out"]
    like = "q" if v.shape[-1] == q.shape[-1] else "q with the head_dim of v"
    shape = (*q.shape[:-1], v.shape[-1])
    for name in ("dout", "out"):
        check_is(name, given[name], q.dtype, shape, q.device, f"a tensor like {like}, ")
    _rows(given, out)
    _slopes(given, q)
    _numbers(given, q, v, "bwd")
    if given["dropout_p"] > 0:
        if given["rng_state"] is None:
            raise ArgumentError(
                "rng_state: expected the tensor that the forward returned, since dropout_p is "
                f"{given['dropout_p']}, got None"
            )
        if not _seeds(given, q):
            check_is("rng_state", given["rng_state"], torch.int64, (2,), q.device)


def _sink(given: Given) -> None:
    out, starts = given["out"], given["cu_seqlens_q"]
    check_rank("out", out, DENSE if starts is None else VARLEN)
    check_alike(out, (), "out")
    check_like("dout", given["dout"], "out", out)
    if starts is not None:
        check_cu_seqlens("cu_seqlens_q", starts, None, out.device)
    _rows(given, out)
    check_tensor("learnable_sink", given["learnable_sink"])
    _sinks(given, out)


def _rows(given: Given, out: torch.Tensor) -> None:
    """Checks the numbers of rows that a backward takes."""
    *tokens, nheads, _ = out.shape
    lse_shape = (*tokens[:-1], nheads, tokens[-1])
    check_is("softmax_lse", given["softmax_lse"], torch.float32, lse_shape, out.device)
    if given.get("residual") is not None:
        check_is("residual", given["residual"], torch.bfloat16, out.shape, out.device)
    if given.get("dlse") is not None:
        check_is("dlse", given["dlse"], torch.float32, lse_shape, out.device)


def _sums(given: Given) -> None:
    _backward(given)
    k, v = given["k"], given["v"]
    if v.shape != k.shape:
        raise UnsupportedError(
            f"v: expected the head_dim of k, {k.shape[-1]}, where ranks share the rows of a "
            f"sequence, got {v.shape[-1]}; pad v with zeros"
        )


def _finish(given: Given) -> None:
    k = given["k"]
    check_tensor("k", k)
    check_alike(k, (), "k")
    check_tensor("dk_sums", given["dk_sums"])
    shape = (given["dk_sums"].shape[0], *k.shape[-2:])
    for name in ("dk_sums", "dv_sums"):
        check_is(name, given[name], torch.float32, shape, k.device)
    if given["dropout_p"] > 0 and k.device.type == "cpu":
        raise UnsupportedError(f"dropout_p: expected 0.0 for CPU tensors, got {given['dropout_p']}")


def _inputs(given: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks q, keys and values, and the lengths of packed sequences; returns q and values."""
    names, varlen = names_of(given), "cu_seqlens_q" in given
    if "qkv" in given:
        layout = PACKED[3 if given["q"] is None else 2, varlen]
        check_packed(names.k, given["qkv"], layout)
        q, k, v = parts_of(given["q"], given["qkv"])
    else:
        q, k, v = given["q"], given[names.k], given[names.v]
    latent = names is NAMES_CACHE and v is None
    if latent:
        _latent(q, k)
        v = cached_values(k, v)
    table = given.get("block_table")
    layout = VARLEN if varlen else DENSE
    keys_layout = layout if table is None else PAGED
    check_rank(names.q, q, layout)
    check_rank(names.k, k, keys_layout)
    check_rank(names.v, v, keys_layout)
    if table is not None or names is NAMES_CACHE:
        check_cached(q, (names.k, k), (names.v, v), names.q)
    else:
        check_alike(q, ((names.k, k), (names.v, v)), names.q)
    if not varlen:
        check_batch(names.q, q, q.shape[0])
    check_heads(q, k, names, latent)
    head_dim = q.shape[-1]
    if varlen or names is NAMES_CACHE:
        if k.shape[-1] != head_dim:
            raise ArgumentError(
                f"{names.k}: expected a head_dim of {head_dim}, that of {names.q}, got "
                f"{k.shape[-1]}"
            )
    elif k.shape[0] != q.shape[0] or k.shape[3] != head_dim:
        raise ArgumentError(
            f"{names.k}: expected shape ({q.shape[0]}, seqlen_k, nheads_k, {head_dim}), with the "
            f"batch and head_dim of {names.q}, got {tuple(k.shape)}"
        )
    if varlen and table is not None:
        check_page_size(names.k, k.shape[1])
    what = "" if v.shape[-1] == head_dim else " but for head_dim"
    check_shape(names.v, v, (*k.shape[:-1], v.shape[-1]), f"the shape of {names.k}{what}")
    if not latent:
        check_head_dim(names.v, v)
    if varlen:
        _lengths(given, q.device, names)
    return q, v


def _latent(q: Any, k: Any) -> None:
    """Checks q and k_cache of a call without v_cache."""
    check_tensor("q", q)
    check_tensor("k_cache", k)
    columns = LATENT[0]
    if q.dim() == 0 or k.dim() == 0 or (q.shape[-1], k.shape[-1]) != (columns, columns):
        check_tensor("v_cache", None)
    if is_fp8(k):
        raise DtypeError(
            f"k_cache: expected {q.dtype}, the dtype of q, with v_cache=None, got {k.dtype}; "
            "convert it with k_cache.to(q.dtype)"
        )


def _lengths(given: Given, device: torch.device, names: Names) -> None:
    check_cu_seqlens(names.cu_seqlens_q, given["cu_seqlens_q"], None, device)
    batch = given["cu_seqlens_q"].shape[0] - 1
    check_cu_seqlens(names.cu_seqlens_k, given["cu_seqlens_k"], batch, device)
    _index(given, "seqused_k", batch, device)
    _table(given, batch, device, "leftpad_k")
    _index(given, "leftpad_k", batch, device)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        called = getattr(names, name)
        tokens = given[name]
        if type(tokens) is not int:
            tokens = numbers.as_int(called, tokens)
        numbers.check_length(called, tokens)


def _index(given: Given, name: str, batch: int, device: torch.device) -> None:
    if given.get(name) is not None:
        check_int32(name, given[name], (batch,), "(batch,)", device)


def _table(given: Given, batch: int, device: torch.device, leftpad: str) -> None:
    """Checks the block table, and that there is no padding beside it."""
    table = given.get("block_table")
    if table is None:
        return
    layout = "(batch, max_num_blocks_per_seq)"
    check_int32("block_table", table, (batch, -1), layout, device)
    if given[leftpad] is not None:
        raise ArgumentError(
            f"{leftpad}: expected None together with block_table; leave the padding out of the "
            "pages"
        )


def _slopes(given: Given, q: torch.Tensor) -> None:
    slopes = given["alibi_slopes"]
    if slopes is None:
        return
    starts = given.get("cu_seqlens_q")
    batch, nheads = q.shape[0] if starts is None else starts.shape[0] - 1, q.shape[-2]
    check_tensor("alibi_slopes", slopes, "a torch.Tensor or None")
    check_dtype("alibi_slopes", slopes, torch.float32, "float()")
    # Not `not in`: torch.compile finds no equal shapes there if nheads is symbolic.
    if slopes.shape != (nheads,) and slopes.shape != (batch, nheads):
        raise ArgumentError(
            f"alibi_slopes: expected shape (nheads,) = ({nheads},) or (batch, nheads) = "
            f"({batch}, {nheads}), got {tuple(slopes.shape)}"
        )
    check_device("alibi_slopes", slopes, q.device)


def _sinks(given: Given, q: torch.Tensor) -> None:
    sinks = given.get("learnable_sink")
    if sinks is None:
        return
    check_tensor("learnable_sink", sinks, "a torch.Tensor or None")
    expected = "torch.float32, torch.float16 or torch.bfloat16"
    check_dtype("learnable_sink", sinks, torch.float32, "float()", expected)
    check_shape("learnable_sink", sinks, (q.shape[-2],), "one sink for each head of q")
    check_device("learnable_sink", sinks, q.device)


def _seeds(given: Given, q: torch.Tensor) -> bool:
    """Checks an rng_state that has a seed of each sequence; returns whether it is such a one."""
    state = given["rng_state"]
    if not isinstance(state, torch.Tensor) or state.dim() != 2:
        return False
    starts = given.get("cu_seqlens_q")
    batch = q.shape[0] if starts is None else starts.shape[0] - 1
    check_dtype("dropout_seeds", state, torch.int64, "long()")
    # Not `!=` of tuples; see _slopes.
    if state.shape != (batch, 1):
        raise ArgumentError(
            f"dropout_seeds: expected shape (batch,) = ({batch},), got {tuple(state.shape[:1])}"
        )
    check_device("dropout_seeds", state, q.device)
    return True


def _numbers(given: Given, q: torch.Tensor, v: torch.Tensor, direction: str) -> None:
    """Checks what the numbers of a call are, and that the wheel holds a kernel for it."""
    head_dim = max(q.shape[-1], v.shape[-1])
    numbers.check_factors(given["softmax_scale"], given["softcap"])
    dropout_p = numbers.as_dropout(given.get("dropout_p", 0.0))
    if "split_size" in given:
        numbers.check_multiple(given["split_size"], numbers.KEYS_PER_BLOCK)
    if dropout_p > 0 and is_fp8(v):
        raise UnsupportedError(
            f"dropout_p: expected 0.0 with keys and values in {v.dtype}, got {dropout_p}"
        )
    kernels.check_kernels(q.device, q.dtype, head_dim, direction)


def _cache(given: Given) -> None:
    q, v_cache = _inputs(given)
    batch, _, _, head_dim = q.shape
    for name in ("k_cache", "v_cache") if given["v_cache"] is not None else ("k_cache",):
        # No copy is made: the cache is written in place.
        if given[name].stride(3) != 1:
            raise ArgumentError(
                f"{name}: expected a contiguous last dimension, got strides {given[name].stride()}"
            )
    capacity = _capacity(given, batch)
    new = _new_tokens(given, capacity)
    seqlens = given["cache_seqlens"]
    if seqlens is not None and not isinstance(seqlens, torch.Tensor):
        seqlens = length_in_cache(seqlens, capacity, new)
    elif seqlens is not None:
        check_int32("cache_seqlens", seqlens, (batch,), "(batch,)", q.device)
    _index(given, "cache_leftpad", batch, q.device)
    _slopes(given, q)
    _sinks(given, q)
    _rotary(given, capacity, seqlens)
    _numbers(given, q, v_cache, "fwd")
    # Otherwise a copy is used.
    if q.device.type == "cuda" and head_dim % 8 == 0 and v_cache.shape[3] % 8 == 0:
        kernels.check_rows_aligned("k_cache", given["k_cache"])
        if given["v_cache"] is not None:
            kernels.check_rows_aligned("v_cache", v_cache)


def _capacity(given: Given, batch: int) -> int:
    """Returns how many tokens the cache can hold for one sequence."""
    q, k_cache, index = given["q"], given["k_cache"], given["cache_batch_idx"]
    if given["block_table"] is not None:
        _table(given, batch, q.device, "cache_leftpad")
        check_page_size("k_cache", k_cache.shape[1])
        if index is not None:
            raise ArgumentError(
                "cache_batch_idx: expected None together with block_table; pick its rows with "
                "block_table[cache_batch_idx]"
            )
    elif index is not None:
        _index(given, "cache_batch_idx", batch, q.device)
    elif k_cache.shape[0] < batch:
        raise ArgumentError(
            f"k_cache: expected room for the {batch} sequences of q, got shape "
            f"{tuple(k_cache.shape)}; name their places with cache_batch_idx"
        )
    return capacity(k_cache, given["block_table"])


def _new_tokens(given: Given, capacity: int) -> int:
    """Checks the keys and values to append, and returns how many a sequence gets."""
    q, k, v = given["q"], given["k"], given["v"]
    if not _both(given, "k", "v"):
        return 0
    if is_fp8(given["k_cache"]):
        raise UnsupportedError(
            f"k: expected None with a cache in {given['k_cache'].dtype}, got a tensor; write "
            "(k / k_descale).to(k_cache.dtype) into the cache, and the same of v"
        )
    if given["v_cache"] is None:
        raise UnsupportedError(
            "k: expected None with v_cache=None, got a tensor; write the new rows into k_cache "
            "before the call"
        )
    check_rank("k", k, DENSE)
    check_rank("v", v, DENSE)
    check_alike(q, (("k", k), ("v", v)))
    shape = (q.shape[0], k.shape[1], given["k_cache"].shape[2], q.shape[3])
    check_shape("k", k, shape, "(batch, seqlen_new, nheads_k, head_dim) of q and k_cache")
    head_dim_v = given["v_cache"].shape[3]
    what = "" if head_dim_v == shape[3] else ", with the head_dim of v_cache"
    check_shape("v", v, (*shape[:3], head_dim_v), f"the shape of k{what}")
    if given["cache_seqlens"] is None:
        raise ArgumentError(
            "cache_seqlens: expected the lengths at which to append k and v, got None"
        )
    if k.shape[1] > capacity:
        raise ArgumentError(
            f"k: expected at most the {capacity} tokens that the cache holds for a sequence, got "
            f"{k.shape[1]}"
        )
    return k.shape[1]  # type: ignore[no-any-return]


def _both(given: Given, one: str, other: str) -> bool:
    """Returns whether two arguments are given; refuses one without the other."""
    for name, beside in ((one, other), (other, one)):
        if given[name] is None and given[beside] is not None:
            raise ArgumentError(f"{name}: expected a tensor together with {beside}, got None")
    return given[one] is not None


def length_in_cache(cache_seqlens: Any, capacity: int, new: int) -> int:
    """Returns the length of all cached sequences, as an int that leaves room for new tokens."""
    length = numbers.as_int("cache_seqlens", cache_seqlens, "an int, a torch.Tensor or None")

    def message() -> str:
        return (
            f"cache_seqlens: expected 0 to {capacity - new}, the {capacity} tokens of the cache "
            f"less {new} new ones, got {shown(length)}"
        )

    numbers.require(length >= 0, message)
    numbers.require(length <= capacity - new, message)
    return length


def _rotary(given: Given, capacity: int, seqlens: int | torch.Tensor | None) -> None:
    """Checks the tables of a rotary embedding, which have to cover the capacity of the cache."""
    q, cos, sin = given["q"], given["rotary_cos"], given["rotary_sin"]
    if not _both(given, "rotary_cos", "rotary_sin"):
        return
    if given["k"] is None:
        raise ArgumentError(
            "rotary_cos: expected None without k and v; rotation is for tokens that are appended"
        )
    check_rank("rotary_cos", cos, "(seqlen_ro, rotary_dim / 2)")
    check_rank("rotary_sin", sin, "(seqlen_ro, rotary_dim / 2)")
    check_alike(q, (("rotary_cos", cos), ("rotary_sin", sin)))
    seqlen_ro, half = cos.shape
    if half == 0 or half % 8 or 2 * half > q.shape[3]:
        raise ArgumentError(
            "rotary_cos: expected a rotary_dim that is a multiple of 16 and at most the head_dim "
            f"{q.shape[3]}, got {2 * half} (shape {tuple(cos.shape)})"
        )
    if seqlen_ro < capacity:
        raise ArgumentError(
            f"rotary_cos: expected a seqlen_ro of at least the {capacity} tokens that the cache "
            f"holds for a sequence, got shape {tuple(cos.shape)}"
        )
    check_shape("rotary_sin", sin, (seqlen_ro, half), "the shape of rotary_cos")
    if isinstance(seqlens, int):
        values.check_rotated_queries(seqlens, given)


_VALIDATORS: dict[str, Callable[[Given], None]] = {
    **dict.fromkeys(FORWARD, _forward),
    **dict.fromkeys(BACKWARD, _backward),
    "kvcache_fwd": _cache,
    "varlen_bwd_sums": _sums,
    "finish_key_sums": _finish,
    "sink_bwd": _sink,
}
