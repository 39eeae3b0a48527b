"""The backend with vLLM's own base classes, on the CPU; `nox -s vllm` installs vLLM."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flash_attn_deterministic as package
import pytest
import torch
from bits import bits_equal
from calls import int32, normal
from flash_attn_deterministic.environment import REPAIR_VLLM_NORM
from flash_attn_deterministic.errors import ArgumentError, UnsupportedError

pytest.importorskip("vllm.v1.attention.backend")

from flash_attn_deterministic.integrations import vllm as integration
from flash_attn_deterministic.verify import vllm as verify
from vllm.model_executor.layers import layernorm
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.v1.attention import backend as base
from vllm.v1.attention.backends.registry import AttentionBackendEnum

ours: Any = integration
dense_func: Any = package.flash_attn_func
varlen_func: Any = package.flash_attn_varlen_func
HEADS, HEADS_K, HEAD_SIZE, PAGE = 4, 2, 32, 16


def test_the_entry_point_registers_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older releases of vLLM share one name among all plugins: it is taken on request alone."""
    monkeypatch.setenv("VLLM_PLUGINS", "other,flash_attn_deterministic")
    ours.register()
    ours.register()
    backend = AttentionBackendEnum[ours.DeterministicBackend.get_name()]
    assert backend.get_class() is ours.DeterministicBackend
    if backend.name == "CUSTOM":
        backend.clear_override()


def test_processes_that_do_not_ask_keep_their_custom_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    AttentionBackendEnum.CUSTOM.clear_override()
    ours.register()
    assert not AttentionBackendEnum.CUSTOM.is_overridden()


@pytest.mark.parametrize(("name", "own_name"), [
    pytest.param("AttentionBackend", "DeterministicBackend", id="backend"),
    pytest.param("AttentionMetadataBuilder", "DeterministicBuilder", id="builder"),
    pytest.param("AttentionImpl", "DeterministicImpl", id="impl"),
])  # fmt: skip
def test_no_abstract_methods_and_the_parameters_of_vllm(name: str, own_name: str) -> None:
    theirs, mine = getattr(base, name), getattr(ours, own_name)
    assert not inspect.isabstract(mine)
    for method in theirs.__abstractmethods__:
        expected = inspect.signature(getattr(theirs, method)).parameters
        found = inspect.signature(getattr(mine, method)).parameters
        # vLLM passes sinks by name, to the backends that have them.
        own = [n for n in found if n not in ("unknown", "sinks")]
        assert list(expected) == own, method


def configuration(**changes: Any) -> list[str]:
    settings = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": (9, 0),
        "attn_type": "decoder",
        "has_sliding_window": True,
        "use_batch_invariant": True,
    }
    reasons: list[str] = ours.DeterministicBackend.validate_configuration(**{**settings, **changes})
    return reasons


def test_vllm_accepts_it_for_batch_invariance() -> None:
    assert configuration() == []
    assert configuration(has_sink=True) == []
    assert configuration(kv_cache_dtype="fp8") == []
    assert configuration(kv_cache_dtype="fp8_e4m3") == []
    assert configuration(kv_cache_dtype="fp8_e5m2")
    assert configuration(kv_cache_dtype="fp8", use_per_head_quant_scales=True)
    assert not ours.DeterministicImpl.supports_quant_query_input
    assert configuration(head_size=512)
    assert configuration(attn_type="encoder")
    assert configuration(device_capability=(7, 5))


class Layer(torch.nn.Module):
    """vLLM's scales of a layer."""

    _k_scale: torch.Tensor
    _v_scale: torch.Tensor

    def __init__(self, k_scale: float, v_scale: float) -> None:
        super().__init__()
        set_default_quant_scales(self, register_buffer=True)
        self._k_scale.fill_(k_scale)
        self._v_scale.fill_(v_scale)
        self._k_scale_float, self._v_scale_float = k_scale, v_scale


class Engine:
    """Two requests, their pages, and steps of any lengths."""

    def __init__(self, layer: Layer | None = None, **options: Any) -> None:
        self.layer = layer
        self.impl = ours.DeterministicImpl(HEADS, HEAD_SIZE, 0.2, HEADS_K, **options)
        self.cache = torch.full((9, HEADS_K, PAGE, 2 * HEAD_SIZE), torch.nan, dtype=torch.bfloat16)
        if layer is not None:
            self.cache = torch.full(self.cache.shape, 0x7F, dtype=torch.uint8)  # NaN
        self.table = torch.tensor([[3, 1, 7], [2, 8, 5]], dtype=torch.int32)
        self.q = normal(2, 40, HEADS, HEAD_SIZE, seed=0)
        self.k, self.v = (normal(2, 40, HEADS_K, HEAD_SIZE, seed=seed) for seed in (1, 2))

    def step(self, *parts: tuple[int, int, int]) -> torch.Tensor:
        """Computes tokens [begin, end) of requests; parts are (request, begin, end)."""
        lengths = [end - begin for _, begin, end in parts]
        tokens = sum(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        slots = [
            int(self.table[request, token // PAGE]) * PAGE + token % PAGE
            for request, begin, end in parts
            for token in range(begin, end)
        ]
        common = SimpleNamespace(
            num_actual_tokens=tokens,
            max_query_len=max(lengths),
            max_seq_len=48,
            query_start_loc=starts,
            seq_lens=int32(*(end for _, _, end in parts), 0),  # padded, as for a CUDA graph
            block_table_tensor=self.table[[*(request for request, _, _ in parts), 0]],
            causal=True,
        )
        builder = ours.DeterministicBuilder(None, [], None, torch.device("cpu"))
        metadata = builder.build(0, common)
        again = builder.build(0, common).lengths.cu_seqlens_k
        assert metadata.lengths.cu_seqlens_k.data_ptr() == again.data_ptr()
        q, k, v = (
            torch.cat([t[r, b:e] for r, b, e in parts] + [torch.zeros_like(t[0, :3])])  # padded
            for t in (self.q, self.k, self.v)
        )
        output = torch.empty(tokens + 3, HEADS * HEAD_SIZE, dtype=torch.bfloat16)
        slot_mapping = torch.tensor([*slots, -1])  # the last is padding
        before = self.cache.clone()
        self.impl.do_kv_cache_update(self.layer, k, v, self.cache, slot_mapping)
        written = (before.view(torch.uint8) != self.cache.view(torch.uint8)).any((1, 3))
        assert set(written.flatten().nonzero()[:, 0].tolist()) <= set(slots)
        returned = self.impl.forward(self.layer, q, k, v, self.cache, metadata, output)
        assert returned is output
        found: torch.Tensor = output[:tokens].view(tokens, HEADS, HEAD_SIZE)
        return found


@pytest.mark.parametrize("options", [
    pytest.param({}, id="plain"),
    pytest.param({"sliding_window": 9, "logits_soft_cap": 5.0}, id="window-softcap"),
    pytest.param({"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, id="alibi"),
    pytest.param({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, id="sinks"),
])  # fmt: skip
def test_steps_of_the_scheduler_have_the_bits_of_one_prefill(options: dict[str, Any]) -> None:
    whole = Engine(**options).step((0, 0, 40))
    engine = Engine(**options)
    parts = [
        engine.step((0, 0, 17), (1, 0, 5))[:17],
        engine.step((1, 5, 6), (0, 17, 39))[1:],
        engine.step((0, 39, 40), (1, 6, 9))[:1],
    ]
    assert bits_equal(torch.cat(parts), whole)
    slopes = options.get("alibi_slopes")
    expected = dense_func(
        engine.q[:1],
        engine.k[:1],
        engine.v[:1],
        softmax_scale=0.2,
        causal=True,
        window_size=(8, 0) if "sliding_window" in options else (-1, -1),
        softcap=options.get("logits_soft_cap", 0.0),
        alibi_slopes=None if slopes is None else torch.tensor(slopes),
        learnable_sink=options.get("sinks"),
    )
    assert bits_equal(whole, expected[0])


@pytest.mark.parametrize(
    ("k_scale", "v_scale"),
    [pytest.param(1.0, 1.0, id="no-scales"), pytest.param(0.0371, 0.013, id="scales")],
)
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_caches_in_8_bits(name: str, k_scale: float, v_scale: float) -> None:
    """Steps have the bits of one prefill, and of our function on the pages with their scales."""
    layer = Layer(k_scale, v_scale)
    options: dict[str, Any] = {"kv_cache_dtype": name, "logits_soft_cap": 5.0}
    first, engine = Engine(layer, **options), Engine(layer, **options)
    engine.k[..., :4] *= 2000  # some are beyond the largest number of the format
    first.k = engine.k
    whole = first.step((0, 0, 40))
    parts = [
        engine.step((0, 0, 17), (1, 0, 5))[:17],
        engine.step((1, 5, 6), (0, 17, 39))[1:],
        engine.step((0, 39, 40), (1, 6, 9))[:1],
    ]
    assert bits_equal(torch.cat(parts), whole)
    keys, values = first.cache.view(torch.float8_e4m3fn).transpose(1, 2).chunk(2, -1)
    lengths = int32(0, 40), int32(0, 40), 40, 40
    expected = varlen_func(
        first.q[0],
        keys,
        values,
        *lengths,
        softmax_scale=0.2 * k_scale,
        causal=True,
        softcap=5.0,
        block_table=first.table[:1],
        v_descale=v_scale,
    )
    assert bits_equal(whole, expected)
    pages = keys[first.table[0].long()].flatten(0, 1)[:40].float() * k_scale
    allowed = 448 * k_scale
    error = (pages - first.k[0].float().clamp(-allowed, allowed)).abs()
    assert (error <= pages.abs() / 16 + k_scale / 1024).all()


def test_scales_that_cannot_be_used_are_refused() -> None:
    engine = Engine(Layer(0.5, 1.0), kv_cache_dtype="fp8")
    engine.step((0, 0, 4))
    engine.layer = Layer(0.25, 1.0)
    with pytest.raises(UnsupportedError, match=r"expected \(0.5, 1.0\) .* got \(0.25, 1.0\)"):
        engine.step((0, 4, 5))
    layer = Layer(1.0, 1.0)
    layer._k_scale = torch.ones(HEADS_K, 1)
    with pytest.raises(UnsupportedError, match="one number for all heads of a layer, got 2 and 1"):
        Engine(layer, kv_cache_dtype="fp8").step((0, 0, 4))
    for name in ("fp8_e5m2", "fp8_per_token_head"):
        with pytest.raises(UnsupportedError, match=f"kv_cache_dtype: expected .* got {name}"):
            Engine(kv_cache_dtype=name)


def test_mode_of_the_process_has_no_effect() -> None:
    with package.deterministic_mode(False):
        found = Engine().step((0, 0, 40))
    assert bits_equal(found, Engine().step((0, 0, 40)))


def test_a_layer_that_shares_a_cache_does_not_write() -> None:
    engine = Engine(kv_sharing_target_layer_name="first")
    engine.cache.zero_()
    engine.step((0, 0, 4))
    assert not engine.cache.any()


def test_unsupported_arguments_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="attn_type"):
        Engine(attn_type="encoder_only")
    with pytest.raises(UnsupportedError, match="indexer"):
        Engine(indexer=torch.zeros(4))
    engine = Engine()
    engine.cache = engine.cache.transpose(1, 2)
    with pytest.raises(UnsupportedError, match="kv_cache: expected"):
        engine.step((0, 0, 4))
    output = torch.ones(4, HEADS, HEAD_SIZE)
    assert not engine.impl.forward(None, *[output] * 3, engine.cache, None, output).any()


@pytest.mark.parametrize("variable", REPAIR_VLLM_NORM)
def test_the_norm_is_repaired_on_request(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain norm runs in Triton; here something simple stands for it."""

    def plain(x: torch.Tensor, weight: Any, eps: float = 1e-6, residual: Any = None) -> Any:
        assert residual is None, "the fused norm depends on the batch"
        return x * weight + eps

    monkeypatch.setattr(layernorm, "rms_norm_batch_invariant", plain)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    ours.register()
    assert layernorm.rms_norm_batch_invariant is plain
    monkeypatch.setenv(variable, "maybe")
    with pytest.raises(ArgumentError, match=f"{variable}: expected one of 1, .* got 'maybe'"):
        ours.register()
    monkeypatch.setenv(variable, "true")
    ours.register()
    ours.register()
    x, residual, weight = (normal(3, 8, seed=seed) for seed in range(3))
    repaired: Any = layernorm.rms_norm_batch_invariant
    assert bits_equal(repaired(x, weight, 0.5), plain(x, weight, 0.5))
    out, total = repaired(x, weight, 0.5, residual)
    assert bits_equal(total, x + residual)
    assert bits_equal(out, plain(x + residual, weight, 0.5))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> verify.Engine:
    """A small random Llama in vLLM, in this process."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("runs on vLLM's build for CPUs")
    folder: Path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=512,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_BATCH_INVARIANT", "0")  # in Triton, on GPUs alone
        options = {"max_model_len": 300, "max_num_seqs": 16, "dtype": "bfloat16"}
        return verify.Engine(str(folder), enforce_eager=True, **options)


@pytest.mark.parametrize(
    "name", ["model.layers.1.post_attention_layernorm", "model.layers.0.mlp.act_fn"]
)
def test_the_module_that_differs_first_is_named(
    engine: verify.Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = engine.model.get_submodule(name)
    forward = module.forward

    def depends_on_the_batch(x: torch.Tensor, *arguments: Any) -> Any:
        result = forward(x, *arguments)
        first, *rest = result if isinstance(result, tuple) else (result,)
        first = first * (1.0 + len(x) / 4096)
        return (first, *rest) if rest else first

    checks = verify.list_checks(engine, (7, 40, 130))[:1]
    assert [one.equal for one in verify.run_checks(checks)] == [3]
    monkeypatch.setattr(module, "forward", depends_on_the_batch)
    (outcome,) = verify.run_checks(checks, engine.model)
    assert outcome.equal < 3
    assert outcome.first is not None
    assert outcome.first.name == name
