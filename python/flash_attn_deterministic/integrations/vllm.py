"""An attention backend plugin for vLLM, `--attention-backend FLASH_ATTN_DETERMINISTIC`.

vLLM loads it through the entry point vllm.general_plugins. Where vLLM takes new names for backends
(0.32 does), it registers its own and touches nothing else. Older releases have one name for all
plugins, CUSTOM: it takes that only if VLLM_PLUGINS names this plugin.

It computes decoder attention over vLLM's pages, with sliding windows, softcap, ALiBi and sinks.
Rows have the same bits in every batch, in whole and chunked prompts, in decode and prefill. A cache
may be in 8 bits (`--kv-cache-dtype fp8`: e4m3, one scale for the keys of a layer and one for the
values); other quantised caches, encoders and context parallelism are not supported. The mode is
enabled for each call, whatever the mode of the process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..checks.tensors import FP8, MAX_HEAD_DIM, PAGE_MULTIPLE
from ..environment import REPAIR_VLLM_NORM, read_flag
from ..errors import UnsupportedError
from ..types import Lengths
from .paged import PagedAttention

NAME = "FLASH_ATTN_DETERMINISTIC"
_FP8_NAMES = ("fp8", "fp8_e4m3")  # vLLM's names of float8_e4m3fn; it stores the bytes as uint8


def register() -> None:
    """Registers the backend: the entry point, which vLLM calls in each process, maybe twice."""
    path = f"{__name__}.{DeterministicBackend.__name__}"
    if hasattr(AttentionBackendEnum, "register"):
        if NAME not in AttentionBackendEnum.__members__:
            register_backend(NAME, path)
    elif "flash_attn_deterministic" in os.environ.get("VLLM_PLUGINS", "").split(","):
        register_backend(AttentionBackendEnum.CUSTOM, path)
    if read_flag(os.environ, REPAIR_VLLM_NORM)[1]:
        repair_norm()


def repair_norm() -> None:
    """Replaces the fused norm of vLLM's batch-invariant mode, whose bits depend on the batch.

    The residual is added first, and the plain norm, which is invariant, is computed after it.
    """
    from vllm.model_executor.layers import layernorm

    plain = layernorm.rms_norm_batch_invariant
    if hasattr(plain, "repaired"):
        return

    def norm(
        input: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float = 1e-6,
        residual: torch.Tensor | None = None,
    ) -> Any:
        if residual is None:
            return plain(input, weight, eps)
        residual = residual + input
        return plain(residual, weight, eps), residual

    norm.repaired = True  # type: ignore[attr-defined]
    layernorm.rms_norm_batch_invariant = norm


class DeterministicBackend(AttentionBackend):  # type: ignore[misc, unused-ignore]
    """The properties of this backend, as vLLM queries them."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *_FP8_NAMES]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Returns the name that vLLM knows it by: ours, or CUSTOM in older releases."""
        return NAME if hasattr(AttentionBackendEnum, "register") else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[DeterministicImpl]:
        """Returns the class that computes."""
        return DeterministicImpl

    @staticmethod
    def get_builder_cls() -> type[DeterministicBuilder]:
        """Returns the class that prepares a step."""
        return DeterministicBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Returns the page sizes that the kernels support."""
        return [MultipleOf(PAGE_MULTIPLE)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Returns the shape of a layer's cache; vLLM asks until 0.31."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Returns the order of that shape's dimensions in memory; vLLM asks until 0.31."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        if get_kv_cache_layout() == "NHD":
            return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)
        return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Returns whether the kernels support a head dim; a call raises if the wheel lacks it."""
        return head_size % 8 == 0 and head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        """Returns True: sinks, sliding windows and batch invariance are supported."""
        return True

    supports_sliding_window = supports_batch_invariance = supports_sink

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Returns whether kernels exist for a compute capability."""
        return bool(capability >= (8, 0))


@dataclass
class Step:
    """One step of the scheduler: what its layers have in common.

    Args:
        num_actual_tokens: without padding.
        lengths: of queries and keys, and the pages. cu_seqlens_k are sums of seqused_k, the tokens
            of each request, new ones included.
        causal: whether the mask is causal.
    """

    num_actual_tokens: int
    lengths: Lengths
    causal: bool


class DeterministicBuilder(AttentionMetadataBuilder):  # type: ignore[misc, type-arg, unused-ignore]
    """Prepares a step. Decode, also of several tokens a request, runs in full CUDA graphs."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Replayed CUDA graphs read the sums of a step where those of the capture stood.
        self._cu_seqlens_k = torch.zeros(1, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Step:
        """Returns what the layers of a step need; a causal for each request is refused."""
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise UnsupportedError("causal: expected one flag for all requests, got a tensor")
        requests = common.query_start_loc.shape[0] - 1
        # vLLM pads these to the size of a CUDA graph.
        seq_lens = common.seq_lens[:requests]
        lengths = Lengths(
            common.query_start_loc,
            self._sums(seq_lens),
            int(common.max_query_len),
            int(common.max_seq_len),
            seq_lens,
            None,
            common.block_table_tensor[:requests],
        )
        return Step(common.num_actual_tokens, lengths, bool(common.causal))

    def update_block_table(
        self, metadata: Step, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Step:
        """Returns the step with the pages of another group of layers."""
        lengths = metadata.lengths
        requests = lengths.cu_seqlens_q.shape[0] - 1
        return replace(metadata, lengths=lengths._replace(block_table=blk_table[:requests]))

    def _sums(self, seq_lens: torch.Tensor) -> torch.Tensor:
        requests = seq_lens.shape[0]
        if requests >= self._cu_seqlens_k.shape[0]:
            scheduler = getattr(self.vllm_config, "scheduler_config", None)
            largest = max(requests, getattr(scheduler, "max_num_seqs", 0))
            self._cu_seqlens_k = self._cu_seqlens_k.new_zeros(largest + 1)
        torch.cumsum(seq_lens, 0, out=self._cu_seqlens_k[1 : requests + 1])
        return self._cu_seqlens_k[: requests + 1]


class DeterministicImpl(AttentionImpl):  # type: ignore[misc, type-arg, unused-ignore]
    """Computes the attention of one layer; arguments as vLLM passes them.

    sliding_window counts the query's own token. With kv_sharing_target_layer_name, the layer reads
    another one's cache, with scales of its own, and writes none. Encoders, other caches than
    `DeterministicBackend.supported_kv_cache_dtypes` and unknown arguments raise UnsupportedError.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError(f"attn_type: expected a decoder, got {attn_type}")
        for name, value in unknown.items():
            if value is not None:
                raise UnsupportedError(f"{name}: expected None; use another attention backend")
        if kv_cache_dtype not in DeterministicBackend.supported_kv_cache_dtypes:
            names = ", ".join(DeterministicBackend.supported_kv_cache_dtypes)
            raise UnsupportedError(f"kv_cache_dtype: expected one of {names}, got {kv_cache_dtype}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self._arguments = self.scale, window, logits_soft_cap or 0.0, slopes
        self._attention = PagedAttention(*self._arguments)
        self._is_fp8 = kv_cache_dtype in _FP8_NAMES
        self._scales: tuple[float, float] | None = None  # of keys and values in 8 bits
        self._sinks = sinks
        self._writes = kv_sharing_target_layer_name is None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes attention over the cache into output, and returns it.

        key and value are in the cache already: do_kv_cache_update wrote them. A quantised output,
        or a cache of another shape, raises UnsupportedError.

        Args:
            layer: has the scales of a cache in 8 bits. key and value are not used.
            query: (tokens, num_heads, head_size), padded.
            key: see layer.
            value: see layer.
            kv_cache: (pages, num_kv_heads, page_block_size, 2 * head_size); fp8 also as uint8.
            attn_metadata: the step; None while vLLM measures memory.
            output: (tokens, num_heads, head_size) or (tokens, num_heads * head_size).
            output_scale: None, like output_block_scale.
            output_block_scale: see output_scale.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale: expected None; outputs are not quantised")
        if attn_metadata is None:
            return output.fill_(0)
        if self._is_fp8:
            self._read_scales(layer)
            kv_cache = kv_cache.view(FP8)
        tokens = attn_metadata.num_actual_tokens
        pages = self._pages(kv_cache)
        lengths, causal = attn_metadata.lengths, attn_metadata.causal
        self._attention(query[:tokens], pages, lengths, causal, self._sinks, output[:tokens])
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes new keys and values (tokens, num_kv_heads, head_size) into the cache.

        slot_mapping is (tokens,), int64: page * page_block_size + place of each new token; -1 for
        padding, which is not written. There may be more keys than that.
        """
        if not self._writes:
            return
        pages_k, pages_v = self._pages(kv_cache)
        if key.is_cuda:
            from vllm._custom_ops import reshape_and_cache_flash

            dtype = self.kv_cache_dtype if self._is_fp8 else "auto"
            scales = (layer._k_scale, layer._v_scale)
            reshape_and_cache_flash(key, value, pages_k, pages_v, slot_mapping, dtype, *scales)
            return
        tokens = (slot_mapping >= 0).nonzero()[:, 0]
        slots = slot_mapping[tokens]
        page, place = slots // pages_k.shape[1], slots % pages_k.shape[1]
        if self._is_fp8:  # as vLLM's kernel: divided in float32, the largest number of e4m3 at most
            key, value = key.float() / layer._k_scale, value.float() / layer._v_scale
            key, value = (x.clamp(-448, 448).to(FP8).view(kv_cache.dtype) for x in (key, value))
        pages_k[page, place] = key[tokens]
        pages_v[page, place] = value[tokens]

    def _read_scales(self, layer: Any) -> None:
        """Reads the scales of a layer's cache, once: graphs are captured with these numbers."""
        scales = layer._k_scale_float, layer._v_scale_float
        if scales == self._scales:
            return
        if self._scales is not None:
            raise UnsupportedError(
                f"_k_scale, _v_scale: expected {self._scales} as in the first step, got {scales}: "
                "CUDA graphs keep the first ones; start vLLM again after loading other scales"
            )
        if layer._k_scale.numel() > 1 or layer._v_scale.numel() > 1:
            raise UnsupportedError(
                "_k_scale, _v_scale: expected one number for all heads of a layer, got "
                f"{layer._k_scale.numel()} and {layer._v_scale.numel()} of them; use another "
                "attention backend"
            )
        self._scales = scales
        self._attention = PagedAttention(*self._arguments, *scales)

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values as views (pages, page_block_size, num_kv_heads, head_size)."""
        expected = (self.num_kv_heads, 2 * self.head_size)
        if kv_cache.dim() != 4 or (kv_cache.shape[1], kv_cache.shape[3]) != expected:
            raise UnsupportedError(
                "kv_cache: expected (pages, num_kv_heads, page_block_size, 2 * head_size) with "
                f"{expected[0]} heads and {self.head_size} of head_size, got "
                f"{tuple(kv_cache.shape)}; this version of vLLM lays out its cache in another way"
            )
        keys, values = kv_cache.transpose(1, 2).chunk(2, -1)
        return keys, values
