"""The ops on CPU tensors: the reference."""

from __future__ import annotations

from typing import Any

import torch

from .._checks.split import check_split_size
from .._checks.values import check_cache_values, check_starts, check_varlen_values
from .arguments import Lengths, Scores
from .schemas import Gradients, Outputs


def register(library: Any) -> None:
    """Registers the CPU implementations."""
    library.impl("fwd", _fwd, "CPU")
    library.impl("varlen_fwd", _varlen_fwd, "CPU")
    library.impl("kvcache_fwd", _kvcache_fwd, "CPU")
    library.impl("bwd", _bwd, "CPU")
    library.impl("varlen_bwd", _varlen_bwd, "CPU")


# The reference is imported where it is called, to keep the package's import short. It knows no
# other order than the split tree: without `deterministic` it runs the tree of one split. Its
# backward has one order for every call. `numbers` begins with the four of Scores.


def check_values(name: str, arguments: dict[str, Any]) -> None:
    """Checks what a forward op finds in tensors of lengths and indices.

    Args:
        name: of the op.
        arguments: of the op, by name.

    Raises:
        ArgumentError: one of them holds what can't be.
    """
    if name == "varlen_fwd":
        lengths = Lengths(*(arguments[field] for field in Lengths._fields))
        check_varlen_values(arguments["q"], arguments["k"], lengths)
    elif name == "kvcache_fwd":
        names = (
            *("q", "k_cache", "k", "cache_seqlens", "rotary_cos"),
            *("cache_batch_idx", "cache_leftpad", "block_table"),
        )
        scores = Scores(*(arguments[field] for field in Scores._fields))
        check_cache_values(**{name: arguments[name] for name in names}, scores=scores)


def _fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    dropout_p: float,
    *numbers: Any,
) -> Outputs:
    from .. import reference

    return reference.attention(
        q,
        k,
        v,
        **_scores(numbers),
        split_size=_tree(q, numbers),
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        rng_state=rng_state,
    )


def _varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    *numbers: Any,
) -> Outputs:
    from .. import reference

    lengths = Lengths(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k, block_table
    )
    check_varlen_values(q, k, lengths)
    return reference.varlen_attention(
        q,
        k,
        v,
        **lengths._asdict(),
        **_scores(numbers),
        split_size=_tree(q, numbers),
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        rng_state=rng_state,
    )


def _kvcache_fwd(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    *numbers: Any,
) -> Outputs:
    from .. import reference

    *scores, rotary_interleaved, split_size, deterministic = numbers
    check_cache_values(
        q,
        k_cache,
        k,
        cache_seqlens,
        rotary_cos,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        Scores(*scores),
    )
    return reference.kvcache_attention(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        **_scores(numbers),
        rotary_interleaved=rotary_interleaved,
        split_size=_tree(q, (*scores, split_size, deterministic)),
        alibi_slopes=alibi_slopes,
    )


def _bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    dropout_p: float,
    *numbers: Any,
) -> Gradients:
    from .. import reference

    return reference.attention_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        **_scores(numbers),
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        rng_state=rng_state,
    )


def _varlen_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    *numbers: Any,
) -> Gradients:
    from .. import reference

    check_starts("cu_seqlens_q", cu_seqlens_q.tolist(), q.shape[0])
    check_starts("cu_seqlens_k", cu_seqlens_k.tolist(), k.shape[0])
    return reference.varlen_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        cu_seqlens_k,
        **_scores(numbers),
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        rng_state=rng_state,
    )


def _scores(numbers: tuple[Any, ...]) -> dict[str, Any]:
    scale, left, right, softcap = numbers[:4]
    return {"softmax_scale": scale, "window": (left, right), "softcap": softcap}


def _tree(q: torch.Tensor, numbers: tuple[Any, ...]) -> int:
    split_size, deterministic = numbers[4:6]
    if not deterministic:
        return 0
    return check_split_size(split_size, q.shape[-1]) or 0
