"""Attention over sequences of one length."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..checks.tensors import check_tensor
from ..types import Deterministic
from .call import WithMax, WithProbs, WithProbsAndMax, attend, typed


@typed
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: Deterministic = None,
    return_attn_probs: bool = False,
    *,
    split_size: int | None = None,
    learnable_sink: torch.Tensor | None = None,
    return_max_logits: bool = False,
    dropout_seeds: torch.Tensor | None = None,
) -> torch.Tensor | WithMax | WithProbs | WithProbsAndMax:
    """Computes softmax(q k^T * softmax_scale) v with the call signature of flash_attn 2.8.3.

    With causal=True the mask is aligned to the bottom right corner: key j is visible to query i
    where j <= i + seqlen_k - seqlen_q. With a window it is visible where i + seqlen_k - seqlen_q -
    left <= j <= i + seqlen_k - seqlen_q + right. Visible keys are 1:

        causal, seqlen_q = 2, seqlen_k = 5        seqlen_q = 5, seqlen_k = 2
            1 1 1 1 0                                 0 0
            1 1 1 1 1                                 0 0
                                                      0 0
                                                      1 0
                                                      1 1

        window_size=(2, 0), seqlen_q = 2, seqlen_k = 5
            0 1 1 1 0
            0 0 1 1 1

    Numbers and flags may be those of Python or NumPy, or tensors of one element; the host waits for
    a tensor on a GPU. An integer is a flag too, a bool a number (0 or 1).

    CPU tensors run through `flash_attn_deterministic.reference`, which has the same order of
    additions and is slow: for tests, not for long sequences.

    q, k, v and learnable_sink get gradients, of out and softmax_lse; alibi_slopes does not. S_dmask
    has no gradient, and there is no double backward, no forward-mode derivative (torch.func.jvp)
    and no torch.func.grad.
    torch.utils.checkpoint has to recompute a call in its first mode: see `checkpoint_contexts`.

    Under autocast, float32 inputs are cast as those of scaled_dot_product_attention.
    torch.func.vmap of dense calls has the bits of a loop. DTensors may be sharded along the batch
    or, in whole groups, along the heads; out is sharded likewise. (Torch 2.10 shards no qkv in one
    tensor.)

    Args:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16, on the CPU or a CUDA device.
            head_dim is 1 to 256; if no multiple of 8, q, k and v are copied and padded with zeros.
            They are also copied if the last dimension is strided, or rows do not start at multiples
            of 8 elements: kernels load 16 bytes at a time.
        k: (batch, seqlen_k, nheads_k, head_dim), like q. nheads is a multiple of nheads_k: query
            head h uses key and value head h // (nheads / nheads_k).
        v: (batch, seqlen_k, nheads_k, head_dim_v), like q. head_dim_v may differ from head_dim: the
            bits are those of the call with the narrower tensors padded with zeros. On compute
            capability 9.0 a narrower v is taken as it is, fastest at 192 and 128, but for ALiBi,
            dropout and the backward with softcap. Elsewhere v is copied and padded; q and k are
            where v is wider. `explain` says so.
        dropout_p: probability in [0, 1) that the weight of a key is dropped; the others are divided
            by keep = float32(1 - dropout_p). A random byte decides, as in flash_attn, so the actual
            probability of keeping is (floor(255 * keep) + 1) / 256: nothing is dropped where keep
            rounds to 1, below 2**-25. Seed and offset come from torch's generator of the device
            (torch.manual_seed). For given ones, the mask depends only on the sequence's index in
            the batch (see dropout_seeds), the head's index and those of query and key among the
            sequence's rows of this call: a chunk of queries has another mask than in one call.
        softmax_scale: positive factor of q k^T, 2**-126 to 2**127; None: head_dim ** -0.5.
        causal: whether to apply the causal mask above.
        window_size: (left, right), as any sequence or tensor of two ints: how many keys before and
            after its own position a query sees; -1 or any negative number: no limit. With causal,
            right counts as 0.
        softcap: c > 0: scores become c * tanh(score / c) after softmax_scale; c and softmax_scale /
            c have the range of softmax_scale. 0.0 or negative: no softcap.
        alibi_slopes: (nheads,) or (batch, nheads), float32; adds -slope * |i + seqlen_k - seqlen_q
            - j| to the score of query i and key j. Without gradient.
        deterministic: whether the gradients' bits depend on their own inputs only. None and False
            (flash_attn's default, which frameworks pass on): as in the mode at the forward call,
            or yes under torch.use_deterministic_algorithms. True: yes, in every mode. "never": no,
            in every mode; gradients are then added atomically, with other bits each time. The
            forward pass follows the mode alone.
        return_attn_probs: whether to return softmax_lse and S_dmask. For tests: S_dmask holds
            seqlen_q * seqlen_k numbers per head, and its computation needs more memory.
        split_size: tokens per split, a multiple of the kernels' 64 keys per block, at most 2^29;
            0: one split; None: that of the mode. The bits depend on it. No effect where the mode is
            not enabled.
        learnable_sink: (nheads,), float32, float16 or bfloat16: an attention sink, one more score
            of each row, without a value and after softmax_scale: it adds exp(sink) to the sum that
            weights are divided by, and softmax_lse includes it. Its own gradient adds up the rows
            of each sequence, which depends on nothing else, then sequences first to last. A sink of
            -inf changes no bit. None: no sinks.
        return_max_logits: whether to return the largest score of each head as well, for QK-clip.
            It has no gradient, and changes no bit of what else is returned.
        dropout_seeds: (batch,), int64, on the device of q: the seed of each sequence, any 64 bits.
            Its mask then depends on its own seed and the indices of head, query and key, not on the
            index in the batch, and torch's generator is not used. Sequences of one seed have one
            mask. The backward reads them again (a copy, where they are not contiguous): a change in
            place before it is an error. With dropout_p 0.0 they are checked, and have no effect.
            None: as dropout_p says.

    Returns:
        out (batch, seqlen_q, nheads, head_dim_v) in q's dtype; with return_attn_probs the tuple of
        out, softmax_lse (batch, nheads, seqlen_q) in float32, the natural logarithm of the sum of
        exp(scaled scores), and S_dmask (batch, nheads, seqlen_q, seqlen_k) in q's dtype: the
        softmax before dropout, with its sign bit set where it was dropped; without dropout an
        empty tensor of shape (0,). flash_attn's has the same signs, another scale in each block of
        keys, and is padded to multiples of 128. Rows without a visible key: out 0, softmax_lse
        +inf, or with sinks the sink (but for a rounding). With return_max_logits one more, the
        last: max_logits (nheads,) in float32, over all rows and the keys that each sees the largest
        score as it enters the softmax: after softmax_scale, softcap and the bias of ALiBi; without
        the sink, before dropout. It is a maximum, so that its bits depend on the rows alone, not on
        their order, split_size or the path. -inf where no row sees a key, NaN where a row's
        softmax_lse is.

    Raises:
        ArgumentError: a ValueError, and a RuntimeError as flash_attn's own checks raise; a wrong
            value, shape or device.
        ArgumentTypeError: a TypeError and a RuntimeError; DtypeError for the dtype of a tensor.
        UnsupportedError: a NotImplementedError; a derivative by forward mode or torch.func, vmap
            (randomness="different"; else torch raises) with dropout but without dropout_seeds,
            DTensors with dropout; from the backward: a double backward.
        NotDeterministicError: a RuntimeError, from the backward: torch may use deterministic
            algorithms only, and deterministic is "never".
        UnsupportedDeviceError: a RuntimeError; this wheel can't run on the tensors' device.
        MissingInstanceError: a RuntimeError; this wheel lacks the kernel for dtype and head_dim.

    Source:
        flash_attn_func of flash_attn 2.8.3 (flash_attn_interface.py); FlashAttention-2 (Dao, 2023,
        arXiv 2307.08691).

    Example:
        >>> q = k = v = torch.ones(1, 4, 2, 64, dtype=torch.bfloat16)
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([1, 4, 2, 64])
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, split_size, deterministic
    others = return_attn_probs, learnable_sink, return_max_logits
    results: torch.Tensor | WithMax | WithProbs | WithProbsAndMax = attend(
        (q, k, v), None, options, alibi_slopes, *others, dropout_seeds=dropout_seeds
    )
    return results


@typed
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: Deterministic = None,
    return_attn_probs: bool = False,
    *,
    split_size: int | None = None,
    dropout_seeds: torch.Tensor | None = None,
) -> torch.Tensor | WithProbs:
    """Computes attention as `flash_attn_func` does, with q, k and v in one tensor.

    Args:
        qkv: (batch, seqlen, 3, nheads, head_dim), float16 or bfloat16; q, k and v in this order.
            It is copied only where `flash_attn_func` would copy q, k and v.
        dropout_p: as in `flash_attn_func`; so are the arguments after it.

    Returns:
        out (batch, seqlen, nheads, head_dim); with return_attn_probs as in `flash_attn_func`.

    Raises:
        As `flash_attn_func`.

    Source:
        flash_attn 2.8.3, under this name.
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, split_size, deterministic
    results: torch.Tensor | WithProbs = attend(
        (None, qkv), None, options, alibi_slopes, return_attn_probs, dropout_seeds=dropout_seeds
    )
    return results


@typed
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: Deterministic = None,
    return_attn_probs: bool = False,
    *,
    split_size: int | None = None,
    dropout_seeds: torch.Tensor | None = None,
) -> torch.Tensor | WithProbs:
    """Computes attention as `flash_attn_func` does, with k and v in one tensor.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16.
        kv: (batch, seqlen_k, 2, nheads_k, head_dim), like q; k and v in this order. nheads is a
            multiple of nheads_k.
        dropout_p: as in `flash_attn_func`; so are the arguments after it.

    Returns:
        out (batch, seqlen_q, nheads, head_dim); with return_attn_probs as in `flash_attn_func`.

    Raises:
        As `flash_attn_func`.

    Source:
        flash_attn 2.8.3, under this name.
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, split_size, deterministic
    if q is None:  # which in an op says that q is in kv
        check_tensor("q", q)
    results: torch.Tensor | WithProbs = attend(
        (q, kv), None, options, alibi_slopes, return_attn_probs, dropout_seeds=dropout_seeds
    )
    return results
