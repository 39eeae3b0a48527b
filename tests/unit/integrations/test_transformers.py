from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import flash_attn_deterministic as package
import pytest
import small_models
import torch
from bits import bits_equal
from calls import normal
from flash_attn_deterministic.errors import DtypeError, UnsupportedError
from small_models import NAME

transformers = pytest.importorskip("transformers")

from flash_attn_deterministic.integrations import transformers as integration  # noqa: E402

# Any, because the type checker can't match unpacked arguments.
ours: Any = integration
attention_func: Any = package.flash_attn_func

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"sliding_window": 8, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "Mistral": {"sliding_window": 8},
    "Qwen3": {},
    "DeepseekV3": {  # keys wider than values, which transformers pads
        **{"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8},
        "first_k_dense_replace": 2,  # no experts, whose choice can flip
    },
    "GptOss": {  # smaller: windows in every second layer, 8 query heads to a KV head
        **{"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64},
        "sliding_window": 16,
        **{"num_local_experts": 2, "num_experts_per_tok": 2},  # all: no choice of them can flip
    },
}
families = pytest.mark.parametrize("family", FAMILIES)


def make_model(family: str) -> Any:
    model = small_models.make_model(family, **FAMILIES[family])
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, 1.0, 2.0)
    return model


def tokens(batch: int, seqlen: int) -> torch.Tensor:
    return torch.randint(1, 97, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def padding(side: str) -> torch.Tensor:
    mask = torch.ones(3, 24, dtype=torch.int64)
    for row, count in ((0, 9), (2, 3)):
        if side == "left":
            mask[row, :count] = 0
        else:
            mask[row, -count:] = 0
    return mask


def compare_with_eager(model: Any, run: Any) -> None:
    """Compares with the eager attention of transformers, and checks that ours has run."""
    results = run(model)
    model.set_attn_implementation("eager")
    expected = run(model)
    model.set_attn_implementation(NAME)
    torch.testing.assert_close(results, expected, atol=0.02, rtol=0.05)
    assert not torch.equal(results, expected)


@families
@pytest.mark.parametrize("side", ["left", "right", "none"])
@torch.no_grad()
def test_padded_batches_agree_with_eager(family: str, side: str) -> None:
    mask = padding(side) if side != "none" else torch.ones(3, 24, dtype=torch.int64)
    ids = tokens(3, 24)
    compare_with_eager(
        make_model(family), lambda model: model(ids, attention_mask=mask).logits[mask.bool()]
    )


ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "Bart": {
        **{"d_model": 64, "encoder_layers": 2, "decoder_layers": 2},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    },
}


@pytest.mark.parametrize("family", ENCODERS)
@torch.no_grad()
def test_encoders_and_encoder_decoders_agree_with_eager(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(vocab_size=97, **ENCODERS[family])
    torch.manual_seed(0)
    model = (
        getattr(transformers, f"{family}Model")
        ._from_config(config, attn_implementation=NAME, dtype=torch.bfloat16)
        .eval()
    )
    ids, mask = tokens(3, 24), padding("right")
    compare_with_eager(model, lambda model: model(ids, attention_mask=mask)[0][mask.bool()])


@families
@torch.no_grad()
def test_packed_batches_agree_with_sequences_alone(family: str) -> None:
    model, ids = make_model(family), tokens(1, 24)
    positions = torch.cat([torch.arange(n) for n in (7, 1, 16)])[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits[0]
    parts = (ids[:, :7], ids[:, 7:8], ids[:, 8:])
    alone = [model(part, use_cache=False).logits[0] for part in parts]
    torch.testing.assert_close(packed, torch.cat(alone), atol=0.02, rtol=0.05)


@families
@torch.no_grad()
def test_generate_with_caches_gives_one_text(family: str) -> None:
    model, ids, mask = make_model(family), tokens(3, 24), padding("left")
    settings = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    dynamic = model.generate(ids, **settings)
    static = model.generate(ids, cache_implementation="static", **settings)
    no_cache = model.generate(ids, use_cache=False, **settings)
    assert torch.equal(dynamic, static)
    assert torch.equal(dynamic, no_cache)


@torch.no_grad()
def test_a_static_cache_without_a_mask_sees_its_tokens_only() -> None:
    # With "flash_attention_2" the queries also see the free places of the cache.
    model, ids = make_model("Llama"), tokens(2, 12)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    # By position: the parameter is named past_key_values before transformers 5.24, cache since.
    first = model(ids[:, :8], None, None, cache, use_cache=True).logits
    second = model(ids[:, 8:], None, None, cache, use_cache=True).logits
    expected = model(ids).logits
    torch.testing.assert_close(torch.cat([first, second], 1), expected, atol=0.02, rtol=0.05)


@families
def test_gradients_agree_with_eager(family: str) -> None:
    model, ids, mask = make_model(family), tokens(3, 24), padding("right")

    def gradient(model: Any) -> torch.Tensor:
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        result: torch.Tensor = model.model.layers[0].self_attn.q_proj.weight.grad
        return result

    compare_with_eager(model, gradient)


def layer(**options: Any) -> Any:
    """The attributes of a layer that the attention function reads."""
    config = SimpleNamespace(_attn_implementation=NAME)
    return SimpleNamespace(config=config, is_causal=True, layer_idx=0, **options)


@pytest.mark.parametrize("sliding_window", [None, 8], ids=["no-window", "window"])
def test_a_row_has_the_same_bits_padded_packed_and_alone(sliding_window: int | None) -> None:
    q = normal(3, 4, 24, 16, seed=0)
    k, v = (normal(3, 2, 24, 16, seed=seed) for seed in (1, 2))
    options = {"scaling": 0.2, "sliding_window": sliding_window, "softcap": 4.0}
    mask = padding("left").bool()
    padded, weights = ours.attention(layer(), q, k, v, mask, **options)
    assert (tuple(padded.shape), weights) == ((3, 24, 4, 16), None)
    packed_inputs = [
        torch.cat([t[row][:, mask[row]] for row in range(3)], 1)[None] for t in (q, k, v)
    ]
    positions = torch.cat([torch.arange(int(n)) for n in mask.sum(-1)])[None]
    packed, _ = ours.attention(layer(), *packed_inputs, None, position_ids=positions, **options)
    parts = packed[0].tensor_split(mask.sum(-1).cumsum(0)[:-1])
    for row in range(3):
        one = [t[row : row + 1][:, :, mask[row]] for t in (q, k, v)]
        alone, _ = ours.attention(layer(), *one, None, **options)
        assert bits_equal(padded[row][mask[row]], alone[0])
        assert bits_equal(parts[row], alone[0])
        window = (-1, -1) if sliding_window is None else (7, 0)
        expected = attention_func(
            *[t.transpose(1, 2) for t in one],
            softmax_scale=0.2,
            causal=True,
            window_size=window,
            softcap=4.0,
        )
        assert bits_equal(alone, expected)


@pytest.mark.parametrize("variable", ["0", "1"])
@pytest.mark.parametrize("enabled", [True, False], ids=["mode-on", "mode-off"])
def test_backward_follows_the_mode(
    variable: str,
    enabled: bool,
    backward_calls: list[tuple[str, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", variable)
    q = normal(1, 2, 4, 16).requires_grad_()
    with package.deterministic_mode(enabled):
        out, _ = ours.attention(layer(), q, q, q, None)
    torch.autograd.backward(out.sum())
    assert backward_calls == [("bwd", enabled)]


def test_unsupported_arguments_are_refused() -> None:
    q = normal(1, 2, 4, 16, seed=0)
    with pytest.raises(UnsupportedError, match="position_bias"):
        ours.attention(layer(), q, q, q, None, position_bias=torch.zeros(2))
    with pytest.raises(UnsupportedError, match=r"attention_mask: .* got shape \(1, 1, 4, 4\)"):
        ours.attention(layer(), q, q, q, torch.ones(1, 1, 4, 4))


def test_error_of_a_model_in_float32() -> None:
    model = make_model("Llama").float()
    advice = "attention in torch.float32; load it with dtype=torch.bfloat16, or run it under"
    for ids in (tokens(1, 4), tokens(2, 4)):
        with pytest.raises(DtypeError, match=advice):
            model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens(1, 4)).logits.isfinite().all()


def test_other_names_are_left_to_transformers() -> None:
    with pytest.raises(ValueError, match="Could not find"):
        transformers.modeling_flash_attention_utils._lazy_imports("flash_no_such")


@pytest.mark.parametrize(("seen", "new", "places", "width"), [
    pytest.param(0, 8, 8, None, id="no-cache"),
    pytest.param(5, 1, 6, None, id="full"),
    pytest.param(torch.tensor(5), 3, 32, 8, id="free-places"),
])  # fmt: skip
def test_width_of_the_mask_is_the_filled_part_of_a_cache(
    seen: int | torch.Tensor, new: int, places: int, width: int | None
) -> None:
    mask = ours.mask(2, new, places, q_offset=seen)
    assert mask is None if width is None else mask is not None and mask.shape == (2, width)
