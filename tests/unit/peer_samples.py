"""Stand-ins for the packages that bench times, with the parameters and layouts of the real ones.

They take what the real ones take and nothing else, and compute in float32: a call with a wrong
argument, shape or dtype fails here as it would there.
"""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import pytest
import torch
from flash_attn_deterministic.verify.scoreboard import fa3


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int = -1,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of (batch, seqlen, nheads, head_dim), or packed, causal to the bottom right."""
    if cu_seqlens is not None:
        outs = []
        for begin, end in itertools.pairwise(cu_seqlens.tolist()):
            one_q, one_k, one_v = (t[None, begin:end] for t in (q, k, v))
            outs.append(attention(one_q, one_k, one_v, causal, window)[0])
        return torch.cat(outs)
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (t.repeat_interleave(group, dim=2).float() for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), wide_k) * q.shape[3] ** -0.5
    if causal:
        rows, keys = scores.shape[2:]
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        if window >= 0:
            seen &= seen.new_ones(rows, keys).triu(keys - rows - window)
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), wide_v).to(q.dtype)


# --- flash_attn 2.8 -----------------------------------------------------------------------------


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    return attention(q, k, v, causal)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    return attention(q, k_cache, v_cache, causal)


# --- flash-attn-4 -------------------------------------------------------------------------------


def cute_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    deterministic: bool = False,
) -> tuple[torch.Tensor, None]:
    assert window_size[1] in (None, 0)
    assert q.dim() == 4
    return attention(q, k, v, causal, -1 if window_size[0] is None else window_size[0]), None


def cute_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    deterministic: bool = False,
) -> tuple[torch.Tensor, None]:
    assert q.dim() == 3
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_k.diff().max())
    window = -1 if window_size[0] is None else window_size[0]
    return attention(q, k, v, causal, window, cu_seqlens_q), None


# --- FlashAttention-3's ops ---------------------------------------------------------------------


class _Fa3:
    """torch.ops.flash_attn_3, with the arguments that its schemas have."""

    def __init__(self) -> None:
        self.calls: list[dict[str, object]] = []

    def fwd(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        page_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        num_splits: int = 0,
    ) -> tuple[torch.Tensor, ...]:
        self.calls.append({"num_splits": num_splits})
        assert (cu_seqlens_q is None) == (max_seqlen_q is None) == (max_seqlen_k is None)
        assert window_size_right == (0 if window_size_left >= 0 else -1)
        assert softmax_scale == q.shape[-1] ** -0.5
        if page_table is not None:
            assert page_table.dtype == torch.int32
            assert seqused_k is not None, "one length, all full"
            k, v = (t[page_table.long()].flatten(1, 2)[:, : int(seqused_k[0])] for t in (k, v))
        out = attention(q, k, v, is_causal, window_size_left, cu_seqlens_q)
        nothing = torch.empty(0)
        return out, nothing, nothing, nothing

    def bwd(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        deterministic: bool = False,
    ) -> None:
        self.calls.append({"deterministic": deterministic})
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            again = attention(
                leaves[0], leaves[1], leaves[2], is_causal, window_size_left, cu_seqlens_q
            )
        found = torch.autograd.grad(again, leaves, dout)
        for gradient, value in zip((dq, dk, dv), found, strict=True):
            gradient.copy_(value)


def install_fa3(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Puts the ops where they are called from, as if they were loaded; returns their calls."""
    ops = _Fa3()
    monkeypatch.setattr(torch.ops, "flash_attn_3", ops, raising=False)
    monkeypatch.setattr(fa3, "load", lambda: "FA3 of a sample")
    return ops.calls


# --- flashinfer ---------------------------------------------------------------------------------


class _Wrapper:
    """What both wrappers check."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any(), "must be 0 for its first use"
        assert kv_layout == "NHD"
        self.heads = (0, 0, 0)
        self.dtype = torch.float16

    def planned(
        self, heads: tuple[int, int, int], dtype: torch.dtype, *lengths: torch.Tensor
    ) -> None:
        assert all(t.dtype == torch.int32 and t.dim() == 1 for t in lengths)
        self.heads, self.dtype = heads, dtype

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        nheads, nheads_k, head_dim = self.heads
        assert (q.dim(), *q.shape[1:]) == (3, nheads, head_dim)
        for tensor in (k, v):
            assert tensor.shape[-2:] == (nheads_k, head_dim)
            assert tensor.is_contiguous()
        assert {t.dtype for t in (q, k, v)} == {self.dtype}


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert not use_cuda_graph, "would want the three buffers"

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        heads = (num_qo_heads, num_kv_heads, head_dim)
        self.planned(heads, q_data_type, indptr, indices, last_page_len)
        assert len(indptr) == len(last_page_len) + 1
        assert len(indices) == indptr[-1]
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        self.pages = (indptr, indices, last_page_len, page_size)

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        k, v = paged_kv_cache
        self.check(q, k, v)
        indptr, indices, last_page_len, page_size = self.pages
        assert k.shape[1] == v.shape[1] == page_size
        assert len(q) == len(last_page_len)
        rows = []
        for place, query in enumerate(q):
            own = indices[indptr[place] : indptr[place + 1]].long()
            length = (len(own) - 1) * page_size + int(last_page_len[place])
            keys, values = (t[own].flatten(0, 1)[:length] for t in (k, v))
            rows.append(attention(query[None, None], keys[None], values[None], False)[0, 0])
        return torch.stack(rows)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self.planned(heads, q_data_type, qo_indptr, kv_indptr)
        assert len(qo_indptr) == len(kv_indptr)
        self.starts, self.causal = (qo_indptr.tolist(), kv_indptr.tolist()), causal

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.check(q, k, v)
        starts_q, starts_k = self.starts
        assert (len(q), len(k), len(v)) == (starts_q[-1], starts_k[-1], starts_k[-1])
        parts = []
        for place in range(len(starts_q) - 1):
            rows = slice(*starts_q[place : place + 2])
            keys = slice(*starts_k[place : place + 2])
            parts.append(attention(q[rows][None], k[keys][None], v[keys][None], self.causal)[0])
        return torch.cat(parts)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts them where an import finds them."""
    flash_attn: Any = types.ModuleType("flash_attn")
    flash_attn.flash_attn_func = flash_attn_func
    flash_attn.flash_attn_with_kvcache = flash_attn_with_kvcache
    flashinfer: Any = types.ModuleType("flashinfer")
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper):
        setattr(flashinfer, wrapper.__name__, wrapper)
    cute: Any = types.ModuleType("flash_attn.cute")
    cute.flash_attn_func = cute_flash_attn_func
    cute.flash_attn_varlen_func = cute_flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
