"""torch's SDPA and varlen attention, and models of transformers, on our kernels."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flash_attn_deterministic import flash_attn_func, flash_attn_varlen_func
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.gpu.attention import same_bits, skip_unless_built
from tests.gpu.gradients import int32

pytestmark = pytest.mark.gpu
dense: Any = flash_attn_func
varlen: Any = flash_attn_varlen_func


def draw(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)


@pytest.fixture
def provider() -> Iterator[None]:
    import flash_attn_deterministic.integrations.torch

    assert flash_attn_deterministic.integrations.torch.NAME
    skip_unless_built(64, "bf16")
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("torch 2.10 keeps what was activated")
    attention.activate_flash_attention_impl("flash_attn_deterministic")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield
    attention.restore_flash_attention_impl()


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    function: Any = torch.nn.functional.scaled_dot_product_attention
    out: torch.Tensor = function(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out


def run(function: Any, inputs: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    """Returns out and the gradients."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("nheads_k", [8, 2], ids=["mha", "gqa"])
@pytest.mark.usefixtures("provider")
def test_sdpa_has_our_bits(nheads_k: int) -> None:
    q, dout = draw(3, 8, 700, 64, seed=0), draw(3, 8, 700, 64, seed=3)
    k, v = (draw(3, nheads_k, 700, 64, seed=seed) for seed in (1, 2))
    found = run(sdpa, [q, k, v], dout)
    expected = run(
        lambda *inputs: dense(*inputs, causal=True),
        [t.transpose(1, 2) for t in (q, k, v)],
        dout.transpose(1, 2),
    )
    for left, right in zip(found, expected, strict=True):
        assert same_bits(left, right.transpose(1, 2))
    alone = run(sdpa, [t[1:2] for t in (q, k, v)], dout[1:2])
    for left, right in zip(found, alone, strict=True):
        assert same_bits(left[1:2], right)


@pytest.mark.parametrize("layout", ["heads-first", "transposed"])
@pytest.mark.usefixtures("provider")
def test_compiled_sdpa_has_our_bits(layout: str) -> None:
    def make(seed: int) -> torch.Tensor:
        if layout == "heads-first":
            return draw(2, 4, 300, 64, seed=seed)
        return draw(2, 300, 4, 64, seed=seed).transpose(1, 2)

    inputs, dout = [make(seed) for seed in range(3)], make(3)
    torch.compiler.reset()
    compiled = torch.compile(sdpa, fullgraph=True)
    for left, right in zip(run(compiled, inputs, dout), run(sdpa, inputs, dout), strict=True):
        assert same_bits(left, right)


@pytest.mark.usefixtures("provider")
def test_torch_varlen_attention_has_our_bits() -> None:
    from torch.nn.attention import varlen as torch_varlen

    varlen_attn: Any = torch_varlen.varlen_attn
    inputs = [draw(900, 4, 64, seed=seed) for seed in range(3)]
    dout, starts = draw(900, 4, 64, seed=3), int32([0, 300, 301, 900])
    parameters = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    found = run(lambda *t: varlen_attn(*t, starts, starts, 599, 599, **causal), inputs, dout)
    expected = run(lambda *t: varlen(*t, starts, starts, 599, 599, causal=True), inputs, dout)
    for left, right in zip(found, expected, strict=True):
        assert same_bits(left, right)


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"sliding_window": 64, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64},
    "Mistral": {"sliding_window": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    skip_unless_built(64, "bf16")
    import flash_attn_deterministic.integrations.transformers

    assert flash_attn_deterministic.integrations.transformers.NAME
    config = getattr(transformers, f"{family}Config")(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=97,
        pad_token_id=0,
        **FAMILIES[family],
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(
        config, attn_implementation="flash_attn_deterministic", dtype=torch.bfloat16
    )
    model = model.cuda().eval()
    ids = torch.randint(1, 97, (3, 200), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :90] = 0
    mask[2, :3] = 0
    with torch.no_grad():
        found = model(ids, attention_mask=mask).logits[mask.bool()]
        texts = [
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=8,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
            )
            for cache in (None, "static")
        ]
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0.05)
    assert torch.equal(*texts)
    assert same_bits(*gradients)
