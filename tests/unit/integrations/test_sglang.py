"""The backend with SGLang's own classes, on the CPU; `nox -s sglang` installs SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import flash_attn_deterministic as package
import pytest
import torch
from bits import bits_equal
from calls import int32, normal
from flash_attn_deterministic.errors import UnsupportedError

pytest.importorskip("sglang.srt.layers.attention.base_attn_backend")

from flash_attn_deterministic.integrations import sglang as integration
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

ours: Any = integration
dense_func: Any = package.flash_attn_func
varlen_func: Any = package.flash_attn_varlen_func
HEADS, HEADS_K, HEAD_DIM, PAGE, LENGTH = 4, 2, 32, 16, 48


def test_the_entry_point_adds_the_backend_to_the_lists() -> None:
    ours.register()
    ours.register()
    assert ATTENTION_BACKENDS[ours.NAME] is ours.DeterministicBackend
    for names in (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        assert names.count(ours.NAME) == 1


class Engine:
    """Two requests, SGLang's pools, and steps of any lengths."""

    def __init__(
        self, sinks: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16, **options: Any
    ) -> None:
        self.sinks = sinks
        self.layer = RadixAttention(HEADS, HEAD_DIM, 0.2, HEADS_K, 0, **options)
        requests = ReqToTokenPool(2, LENGTH, "cpu", enable_memory_saver=False)
        for request, pages in ((1, (3, 1, 7)), (2, (2, 8, 5))):
            slots = torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)
            requests.req_to_token[request, :LENGTH] = slots.flatten()
        self.requests = requests
        pool = MHATokenToKVPool(9 * PAGE, PAGE, dtype, HEADS_K, HEAD_DIM, 1, "cpu", False)
        self.runner = SimpleNamespace(
            page_size=PAGE,
            model_config=SimpleNamespace(context_len=LENGTH),
            req_to_token_pool=requests,
            token_to_kv_pool=pool,
        )
        self.backend = ours.DeterministicBackend(self.runner)
        self.q = normal(3, LENGTH, HEADS, HEAD_DIM, seed=0)
        self.k, self.v = (normal(3, LENGTH, HEADS_K, HEAD_DIM, seed=seed) for seed in (1, 2))

    def step(self, *parts: tuple[int, int, int], graph: bool = False) -> torch.Tensor:
        """Computes tokens [begin, end) of requests; parts are (request, begin, end)."""
        decode = graph or all(end - begin == 1 for _, begin, end in parts)
        lengths = torch.tensor([end for _, _, end in parts])
        new = [end - begin for _, begin, end in parts]
        places = [self.requests.req_to_token[r, b:e] for r, b, e in parts]
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            batch_size=len(parts),
            input_ids=torch.zeros(sum(new), dtype=torch.int64),
            req_pool_indices=torch.tensor([r for r, _, _ in parts]),
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            out_cache_loc=torch.cat(places).long(),
            seq_lens_sum=int(lengths.sum()),
            extend_seq_lens=torch.tensor(new),
            extend_seq_lens_cpu=new,
        )
        if graph:
            self.backend.init_forward_metadata_out_graph(batch)
        else:
            self.backend.init_forward_metadata(batch)
        q, k, v = (torch.cat([t[r, b:e] for r, b, e in parts]) for t in (self.q, self.k, self.v))
        out: torch.Tensor = self.backend.forward(
            q.flatten(1), k, v, self.layer, batch, sinks=self.sinks
        )
        return out.view(-1, HEADS, HEAD_DIM)


@pytest.mark.parametrize("options", [
    pytest.param({}, id="plain"),
    pytest.param({"sliding_window_size": 9, "logit_cap": 5.0}, id="window-softcap"),
    pytest.param({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, id="sinks"),
])  # fmt: skip
def test_steps_of_the_scheduler_have_the_bits_of_one_prefill(options: dict[str, Any]) -> None:
    whole = Engine(**options).step((1, 0, 40))
    engine = Engine(**options)
    engine.backend.init_cuda_graph_state(2, 2)
    parts = [
        engine.step((1, 0, 17), (2, 0, 5))[:17],
        engine.step((2, 5, 6), (1, 17, 38))[1:],
        engine.step((1, 38, 39), (2, 6, 7))[:1],
        engine.step((1, 39, 40), (2, 7, 8), graph=True)[:1],
    ]
    assert bits_equal(torch.cat(parts), whole)
    expected = dense_func(
        engine.q[1:2, :40],
        engine.k[1:2, :40],
        engine.v[1:2, :40],
        softmax_scale=0.2,
        causal=True,
        window_size=(options.get("sliding_window_size", -1), 0),
        softcap=options.get("logit_cap", 0.0),
        learnable_sink=options.get("sinks"),
    )
    assert bits_equal(whole, expected[0])


@pytest.mark.parametrize("kind", [
    pytest.param("none", id="no-scales"),
    pytest.param("checkpoint", id="scales-of-a-checkpoint"),
    pytest.param("file", id="scales-of-a-file"),
])  # fmt: skip
def test_caches_in_8_bits(kind: str) -> None:
    """Steps have the bits of one prefill, and of our function on the pages with their scales."""
    k_scale, v_scale = (1.0, 1.0) if kind == "none" else (0.0371, 0.013)

    def make() -> Engine:
        engine = Engine(dtype=torch.float8_e4m3fn, logit_cap=5.0)
        layer = engine.layer
        if kind == "checkpoint":  # as SGLang's BaseKVCacheMethod leaves them
            layer.k_scale, layer.v_scale = torch.tensor(k_scale), torch.tensor(v_scale)
            layer.k_scale_float, layer.v_scale_float = k_scale, v_scale
        elif kind == "file":
            layer.k_scale, layer.v_scale = k_scale, v_scale
        return engine

    first, engine = make(), make()
    whole = first.step((1, 0, 40))
    engine.backend.init_cuda_graph_state(2, 2)
    parts = [
        engine.step((1, 0, 17), (2, 0, 5))[:17],
        engine.step((2, 5, 6), (1, 17, 39))[1:],
        engine.step((1, 39, 40), (2, 6, 7), graph=True)[:1],
    ]
    assert bits_equal(torch.cat(parts), whole)
    keys, values = (
        buffer.unflatten(0, (-1, PAGE)) for buffer in first.runner.token_to_kv_pool.get_kv_buffer(0)
    )
    lengths = int32(0, 40), int32(0, 40), 40, 40
    expected = varlen_func(
        first.q[1, :40],
        keys,
        values,
        *lengths,
        softmax_scale=0.2 * k_scale,
        causal=True,
        softcap=5.0,
        block_table=int32(3, 1, 7)[None],
        v_descale=v_scale,
    )
    assert bits_equal(whole, expected)
    pages = keys[[3, 1, 7]].flatten(0, 1)[:40].float() * k_scale
    assert (pages - first.k[1, :40].float()).abs().max() < 0.13 * pages.abs().max()


def test_replays_read_where_the_capture_read() -> None:
    engine = Engine()
    engine.backend.init_cuda_graph_state(2, 2)
    engine.step((1, 0, 1), (2, 0, 1), graph=True)
    first = engine.backend.forward_metadata
    engine.step((1, 1, 2), (2, 1, 2), graph=True)
    second = engine.backend.forward_metadata
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()
    assert first.max_seqlen_k == second.max_seqlen_k == LENGTH


def test_what_it_does_not_support_is_refused() -> None:
    engine = Engine()
    engine.runner.page_size = 1
    with pytest.raises(UnsupportedError, match="--page-size: expected a multiple of 16, got 1"):
        ours.DeterministicBackend(engine.runner)
    for dtype in (torch.float8_e5m2, torch.float32):
        with pytest.raises(UnsupportedError, match=f"--kv-cache-dtype: .* got a pool in {dtype}"):
            Engine(dtype=dtype)
    engine.runner.page_size = PAGE
    engine.runner.token_to_kv_pool.k_scale_buffer = [torch.ones(1)]
    with pytest.raises(UnsupportedError, match=r"--kv-cache-dtype: .* with scales of blocks"):
        ours.DeterministicBackend(engine.runner)
    verify = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, spec_info=None)
    with pytest.raises(UnsupportedError, match="forward_mode: expected prefill or decode"):
        engine.backend.init_forward_metadata(verify)
    engine.step((1, 0, 4))
    q, k = torch.zeros(4, HEADS * HEAD_DIM), torch.zeros(4, HEADS_K, HEAD_DIM)
    with pytest.raises(UnsupportedError, match="score_mod: expected None"):
        engine.backend.forward_decode(q, k, k, engine.layer, None, score_mod=torch.relu)
