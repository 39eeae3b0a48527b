from __future__ import annotations

import math

import pytest
import torch
from flash_attn_deterministic import reference
from flash_attn_deterministic_lab.deviation.attentions.masks import Call
from flash_attn_deterministic_lab.deviation.emulate import simulate
from flash_attn_deterministic_lab.deviation.emulate.explicit import (
    explicit_attention,
    golden_attention,
)
from flash_attn_deterministic_lab.deviation.emulate.simulate import tiled_attention
from flash_attn_deterministic_lab.deviation.emulate.steps import PRESETS, STEP_NAMES
from flash_attn_deterministic_lab.deviation.forward.inputs import draw
from flash_attn_deterministic_lab.deviation.numbers.formats import NumberFormat, parse_format

SCALE = 32**-0.5
PAPER = PRESETS["paper"]


def _qkv(name: str = "bf16", seqlen: int = 70) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    number_format = parse_format(name)
    drawn = [draw("normal", seed, seqlen, 32) for seed in range(2)]
    q, k, v = (
        number_format.round(torch.stack(part).to(number_format.container))
        for part in zip(*drawn, strict=True)
    )
    return q, k, v


def _error(actual: torch.Tensor, golden: torch.Tensor) -> float:
    return float((actual.double() - golden).abs().max())


@pytest.mark.parametrize("preset", ["paper", "lines", "kernel", "tree"])
def test_float64_presets_are_exact(preset: str) -> None:
    q, k, v = _qkv("fp64", 600)
    found = PRESETS[preset]
    steps = found.steps(parse_format("fp64"))
    # 48 divides neither the keys nor a split of the tree.
    out = tiled_attention(Call(q, k, v, scale=SCALE), found, steps, 48)
    assert _error(out, golden_attention(Call(q, k, v, scale=SCALE))) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_baseline_is_explicit_torch_code_in_the_dtype(dtype: torch.dtype) -> None:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    q, k, v = _qkv(name)
    ours = explicit_attention(Call(q, k, v, scale=0.25), parse_format(name))
    theirs = ((q.to(dtype) @ k.to(dtype).mT) * 0.25).softmax(-1) @ v.to(dtype)
    # Sums in another order may round to the neighbour, rarely.
    assert (ours == theirs.float()).double().mean() > 0.99
    assert float((ours - theirs.float()).abs().max()) <= 2 * float(
        parse_format(name).ulp(theirs.double()).max()
    )


@pytest.mark.parametrize("split_size", [0, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_kernel_and_tree_presets_are_the_cpu_backend_but_for_the_order_of_sums(
    split_size: int, causal: bool
) -> None:
    q, k, v = _qkv("bf16", 300)
    preset = PRESETS["tree" if split_size else "kernel"]
    steps = preset.steps(parse_format("bf16"))
    hidden = torch.ones(300, 300).triu(1).bool()
    bias = torch.zeros(300, 300).masked_fill(hidden, -math.inf) if causal else None
    out = tiled_attention(Call(q, k, v, bias, scale=SCALE), preset, steps, 64)
    wide = {"probs": parse_format("fp32")}
    wrong = tiled_attention(Call(q, k, v, bias, scale=SCALE), preset, wide, 64)
    q16, k16, v16 = (tensor.to(torch.bfloat16)[:, :, None] for tensor in (q, k, v))
    expected, _ = reference.attention(
        q16, k16, v16, softmax_scale=SCALE, causal=causal, split_size=split_size, block_n=64
    )
    real = expected[:, :, 0].float()
    assert (out == real).double().mean() > 0.99
    # The test tells a wrong model from the right one.
    assert (wrong.to(torch.bfloat16).float() == real).double().mean() < 0.9


@pytest.mark.parametrize("preset", ["fa4-steps", "fp8"])
def test_presets_of_the_field_do_what_they_say(preset: str) -> None:
    q, k, v = _qkv("fp32", 200)
    q = 6 * q  # peaked rows: the maximum moves
    found, kernel = PRESETS[preset], PRESETS["kernel"]
    golden = golden_attention(Call(q, k, v, scale=SCALE))
    exact: dict[str, NumberFormat] = {}
    plain = _error(tiled_attention(Call(q, k, v, scale=SCALE), kernel, exact, 16), golden)
    steps = exact if preset == "fa4-steps" else found.steps(parse_format("fp32"))
    other = _error(tiled_attention(Call(q, k, v, scale=SCALE), found, steps, 16), golden)
    # The cubic is good to 9e-5 of a weight, E4M3 to a sixteenth.
    low, high = {"fa4-steps": (1e-5, 1e-3), "fp8": (1e-3, 0.3)}[preset]
    assert plain < low < other < high


def test_the_cubic_is_as_near_as_it_says() -> None:
    values = torch.linspace(-30, 0, 100001, dtype=torch.float64)
    error = (simulate._cubic_exp2(values) / torch.exp2(values) - 1).abs().max()
    assert 8e-5 < float(error) < 9e-5
    assert simulate._cubic_exp2(torch.tensor([-math.inf, -1e9])).tolist() == [0, 0]


def _written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_c: int) -> torch.Tensor:
    """FlashAttention's algorithm 1 with bfloat16 tensors, as one would write it in torch."""
    dtype = torch.bfloat16
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    m = torch.full((len(q), 1), -math.inf, dtype=dtype)
    total = torch.zeros((len(q), 1), dtype=dtype)
    out = torch.zeros_like(q)
    for start in range(0, len(k), block_c):
        scores = ((q.float() @ k[start : start + block_c].float().T) * 0.25).to(dtype)
        block_max = scores.amax(1, keepdim=True)
        probs = (scores.float() - block_max.float()).exp().to(dtype)
        block_sum = probs.float().sum(1, keepdim=True).to(dtype)
        m_new = torch.maximum(m, block_max)
        old = (m.float() - m_new.float()).exp().to(dtype)
        new = (block_max.float() - m_new.float()).exp().to(dtype)
        sum_new = old * total + new * block_sum
        product = (probs.float() @ v[start : start + block_c].float()).to(dtype)
        out = ((total * old) * out + new * product) / sum_new
        m, total = m_new, sum_new
    return out


def test_paper_preset_is_algorithm_1_written_out_in_bfloat16() -> None:
    q, k, v = (tensor[0] for tensor in _qkv())
    steps = PAPER.steps(parse_format("bf16"))
    ours = tiled_attention(Call(q, k, v, scale=0.25), PAPER, steps, 16)
    assert torch.equal(ours, _written_out(q, k, v, 16).float())


@pytest.mark.parametrize("name", ["uniform", "normal", "normal_mean", "scaled_logits", "outliers"])
def test_draws_repeat(name: str) -> None:
    first, again = (draw(name, 3, 50, 8) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], draw(name, 4, 50, 8)[0])
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("step", STEP_NAMES)
def test_every_step_of_the_paper_preset_does_something(step: str) -> None:
    q, k, v = _qkv("fp32")
    exact = tiled_attention(Call(q, k, v, scale=SCALE), PAPER, {}, 16)
    rounded = tiled_attention(Call(q, k, v, scale=SCALE), PAPER, {step: parse_format("p4")}, 16)
    if step == "row_max":
        # Any value near the maximum serves as one: it cancels, up to float32's own rounding.
        assert 0 < _error(rounded, exact.double()) < 1e-5
    else:
        assert _error(rounded, exact.double()) > 1e-4
