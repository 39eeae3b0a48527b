"""An attention backend plugin for SGLang, `--attention-backend flash_attn_deterministic`.

SGLang loads it through the entry point sglang.srt.plugins. It is among the backends of
`--enable-deterministic-inference`, with the radix cache. It computes decoder attention over pages
of a multiple of 16 tokens (`--page-size 64`), with sliding windows, softcap and sinks; decode runs
in CUDA graphs. A cache may be in 8 bits (`--kv-cache-dtype fp8_e4m3`). Speculative decoding, other
quantised caches, MLA, cross attention and separate pools for sliding windows are refused. The mode
is enabled for each call, whatever the mode of the process.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from ..checks.tensors import FP8, PAGE_MULTIPLE
from ..errors import UnsupportedError
from ..types import Lengths
from .low_level import starts_of
from .paged import PagedAttention

NAME = "flash_attn_deterministic"


def register() -> None:
    """Registers the backend: the entry point, which SGLang calls in each process."""
    if NAME in ATTENTION_BACKENDS:
        return
    register_attention_backend(NAME)(DeterministicBackend)
    choices.add_attention_backend_choices([NAME])
    choices.add_deterministic_attention_backend_choices([NAME])
    choices.add_radix_supported_deterministic_attention_backend_choices([NAME])


class DeterministicBackend(AttentionBackend):  # type: ignore[misc, unused-ignore]
    """Computes the attention of all layers.

    Args:
        runner: SGLang's ModelRunner.

    Raises:
        UnsupportedError: a NotImplementedError; a page size, model or option that is not supported.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        if runner.page_size % PAGE_MULTIPLE:
            raise UnsupportedError(
                f"--page-size: expected a multiple of {PAGE_MULTIPLE}, got {runner.page_size}; "
                "--page-size 64, for instance"
            )
        if getattr(runner, "use_mla_backend", False):
            raise UnsupportedError("attention backend: expected a model without MLA, got one with")
        pool = runner.token_to_kv_pool
        if hasattr(pool, "full_to_swa_index_mapping"):
            raise UnsupportedError(
                "sliding windows: expected one pool for all layers; --disable-hybrid-swa-memory"
            )
        # Formats with a scale for each block of numbers have a buffer of them beside the pages.
        inner = getattr(pool, "full_kv_pool", pool)
        blocks = getattr(inner, "k_scale_buffer", None) is not None
        if blocks or pool.dtype not in (torch.float16, torch.bfloat16, FP8):
            more = " with scales of blocks" if blocks else ""
            raise UnsupportedError(
                "--kv-cache-dtype: expected bfloat16, fp8_e4m3, or auto with a model in 16 bits, "
                f"got a pool in {pool.dtype}{more}"
            )
        self.forward_metadata: Lengths | None = None
        self._page_size = runner.page_size
        self._max_length = runner.model_config.context_len
        self._requests = runner.req_to_token_pool
        self._pool = pool
        self._layers: dict[int, PagedAttention] = {}
        self._graph: Lengths | None = None  # tensors that captured graphs read

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepares a step outside of graphs."""
        batch, mode = forward_batch, forward_batch.forward_mode
        if mode.is_idle():
            return
        if mode.is_decode() and batch.spec_info is None:
            device, longest = batch.seq_lens.device, 1
            starts = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=device)
        elif mode.name in ("EXTEND", "MIXED") and batch.spec_info is None:
            starts = starts_of(batch.extend_seq_lens)
            longest = max(batch.extend_seq_lens_cpu)
        else:
            raise UnsupportedError(f"forward_mode: expected prefill or decode, got {mode.name}")
        self.forward_metadata = Lengths(
            starts,
            starts_of(batch.seq_lens),
            int(longest),
            self._longest(batch),
            batch.seq_lens.int(),
            None,
            self._pages(batch),
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes the tensors that captured graphs of up to max_bs requests read."""
        device = self._requests.req_to_token.device
        pages = -(-self._max_length // self._page_size)
        self._graph = Lengths(
            torch.arange(max_bs + 1, dtype=torch.int32, device=device),
            torch.arange(max_bs + 1, dtype=torch.int32, device=device),
            1,
            self._max_length,
            torch.ones(max_bs, dtype=torch.int32, device=device),
            None,
            torch.zeros(max_bs, pages, dtype=torch.int32, device=device),
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepares a step before the capture or a replay of its graph."""
        batch, graph = forward_batch, self._graph
        if graph is None or batch.spec_info is not None or not batch.forward_mode.is_decode():
            raise UnsupportedError(
                f"forward_mode: expected decode in CUDA graphs, got {batch.forward_mode.name}"
            )
        n = batch.batch_size
        starts, lengths, table = graph.cu_seqlens_k, graph.seqused_k, graph.block_table
        assert lengths is not None
        assert table is not None
        lengths[:n].copy_(batch.seq_lens)
        torch.cumsum(lengths[:n], 0, out=starts[1 : n + 1])
        pages = self._pages(batch)
        table[:n, : pages.shape[1]].copy_(pages)
        self.forward_metadata = graph._replace(
            cu_seqlens_q=graph.cu_seqlens_q[: n + 1],
            cu_seqlens_k=starts[: n + 1],
            seqused_k=lengths[:n],
            block_table=table[:n],
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Returns the length of padding requests."""
        return 1

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> torch.Tensor:
        """Writes k and v into the pool; returns attention, like q: (tokens, nheads * head_dim).

        k and v are (tokens, nheads_k, head_dim), or None where the pool has them already; sinks are
        (nheads,). Layers and arguments that are not supported raise UnsupportedError.
        """
        for name, value in unknown.items():
            if value is not None and value is not False:
                raise UnsupportedError(f"{name}: expected None; use another attention backend")
        attention = self._layers.get(layer.layer_id)
        if attention is None:
            attention = self._layers[layer.layer_id] = self._prepare(layer)
        if k is not None and save_kv_cache:
            where = KVWriteLoc.for_layer(forward_batch, layer)
            self._pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        keys, values = (
            buffer.unflatten(0, (-1, self._page_size))
            for buffer in self._pool.get_kv_buffer(layer.layer_id)
        )
        query = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        assert self.forward_metadata is not None
        out = attention(query, (keys, values), self.forward_metadata, causal, sinks)
        rows: torch.Tensor = out.flatten(1)
        return rows

    forward_extend = forward_decode

    def _prepare(self, layer: Any) -> PagedAttention:
        """Returns the attention of a layer; CUDA graphs keep the scales of its cache."""
        if layer.is_cross_attention:
            raise UnsupportedError("is_cross_attention: expected False, got True")
        if layer.v_head_dim != layer.head_dim:
            raise UnsupportedError(
                f"v_head_dim: expected {layer.head_dim}, as of queries, got {layer.v_head_dim}"
            )
        window = (layer.sliding_window_size, 0) if layer.sliding_window_size > -1 else (-1, -1)
        scales = [1.0, 1.0]
        if self._pool.dtype == FP8:  # in 16 bits, the scales of a checkpoint are not used
            # A checkpoint's are tensors, with a number beside them; those of a file are numbers.
            names = (("k_scale_float", "k_scale"), ("v_scale_float", "v_scale"))
            given = [[getattr(layer, name) for name in pair] for pair in names]
            scales = [float(next((x for x in pair if x is not None), 1.0)) for pair in given]
        return PagedAttention(layer.scaling, window, layer.logit_cap, None, *scales)

    def _longest(self, batch: Any) -> int:
        lengths = batch.seq_lens_cpu
        return self._max_length if lengths is None else max(1, int(lengths.max()))

    def _pages(self, batch: Any) -> torch.Tensor:
        """Returns the pages of each request: SGLang keeps the slots of tokens, in whole pages."""
        table = self._requests.req_to_token
        slots = table[batch.req_pool_indices, : self._longest(batch) : self._page_size]
        pages: torch.Tensor = (slots // self._page_size).int()
        return pages
