from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from flash_attn_deterministic import reference
from flash_attn_deterministic.deviation.blocks import Blocks
from flash_attn_deterministic.deviation.formats import parse_format
from flash_attn_deterministic.deviation.inputs import draw
from flash_attn_deterministic.deviation.simulate import (
    baseline_attention,
    check_inputs,
    flash_attention,
    golden_attention,
    ordered_products,
    renormalised_attention,
)
from flash_attn_deterministic.deviation.steps import PRESETS, STEP_NAMES, Steps, find_preset
from flash_attn_deterministic.errors import ArgumentError

SCALE = 32**-0.5


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


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("block_c", [16, 64])
def test_float64_presets_are_exact(preset: str, block_c: int) -> None:
    q, k, v = _qkv("fp64", 300)
    number_format = parse_format("fp64")
    found = find_preset(preset)
    steps = found.steps(number_format)
    out = flash_attention(q, k, v, SCALE, found, steps, Blocks(16, block_c))
    assert _error(out, golden_attention(q, k, v, SCALE)) < 1e-14


def test_golden_is_torchs_math_in_float64() -> None:
    q, k, v = _qkv("fp64")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=SCALE)
    assert _error(golden_attention(q, k, v, SCALE), expected) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_baseline_is_explicit_torch_code_in_the_dtype(dtype: torch.dtype) -> None:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    q, k, v = _qkv(name)
    ours = baseline_attention(q, k, v, 0.25, parse_format(name))
    theirs = ((q.to(dtype) @ k.to(dtype).mT) * 0.25).softmax(-1) @ v.to(dtype)
    # Sums in another order may round to the neighbour, rarely.
    assert (ours == theirs.float()).double().mean() > 0.99
    assert float((ours - theirs.float()).abs().max()) <= 2 * float(
        parse_format(name).ulp(theirs.double()).max()
    )


@pytest.mark.parametrize("split_size", [0, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_kernel_and_tree_presets_are_the_cpu_backend_bit_for_bit(
    split_size: int, dtype: torch.dtype
) -> None:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    q, k, v = _qkv(name, 300)
    preset = find_preset("tree" if split_size else "kernel")
    steps = preset.steps(parse_format(name))
    out = flash_attention(q, k, v, SCALE, preset, steps, Blocks(64, 64))
    q16, k16, v16 = (tensor.to(dtype)[:, :, None] for tensor in (q, k, v))
    expected, _ = reference.attention(q16, k16, v16, SCALE, split_size=split_size, block_n=64)
    assert torch.equal(out, expected[:, :, 0].float())


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
    steps = Steps.all(parse_format("bf16"))
    ours = renormalised_attention(q, k, v, 0.25, steps, Blocks(64, 16))
    assert torch.equal(ours, _written_out(q, k, v, 16).float())


@pytest.mark.parametrize("rows", [1, 16, 33, 70])
def test_rows_of_a_tile_change_no_bit(rows: int) -> None:
    q, k, v = _qkv()
    steps = Steps.all(parse_format("bf16"))
    outs = [
        renormalised_attention(q, k, v, SCALE, steps, Blocks(size, 16), products=ordered_products)
        for size in (7, rows)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("step", STEP_NAMES)
def test_every_step_of_the_paper_preset_does_something(step: str) -> None:
    q, k, v = _qkv("fp32")
    exact = renormalised_attention(q, k, v, SCALE, Steps(), Blocks(16, 16))
    steps = Steps.parse({step: "p4"})
    rounded = renormalised_attention(q, k, v, SCALE, steps, Blocks(16, 16))
    if step == "row_max":
        # Any value near the maximum serves as one: it cancels, up to float32's own rounding.
        assert 0 < _error(rounded, exact.double()) < 1e-5
    else:
        assert _error(rounded, exact.double()) > 1e-4


@pytest.mark.parametrize("preset", ["kernel", "tree"])
def test_steps_of_the_other_presets_do_something(preset: str) -> None:
    q, k, v = _qkv("fp32")
    found = find_preset(preset)
    exact = flash_attention(q, k, v, SCALE, found, Steps.parse({"probs": "fp32"}), Blocks(16, 16))
    for step in ("scores", "probs", "row_sum", "rescale", "acc", "state", "out"):
        steps = Steps.parse({"probs": "fp32", step: "p4"})
        out = flash_attention(q, k, v, SCALE, found, steps, Blocks(16, 16))
        assert _error(out, exact.double()) > 1e-4, step


def test_hidden_keys_take_no_part() -> None:
    q, k, v = _qkv()
    bias = torch.zeros(70, 70).masked_fill(torch.ones(70, 70).triu(1).bool(), -math.inf)
    changed = v.clone()
    changed[:, 40:] = 99.0
    number_format = parse_format("bf16")
    steps = Steps.all(number_format)
    attentions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda values: renormalised_attention(q, k, values, SCALE, steps, Blocks(8, 16), bias=bias),
        lambda values: baseline_attention(q, k, values, SCALE, number_format, bias=bias),
        lambda values: golden_attention(q, k, values, SCALE, bias),
    ]
    for attend in attentions:
        assert torch.equal(attend(v)[:, :40], attend(changed)[:, :40])
        assert not torch.equal(attend(v)[:, 40:], attend(changed)[:, 40:])


def test_rows_without_a_key_are_zero() -> None:
    q, k, v = _qkv()
    bias = torch.full((70, 70), -math.inf)
    steps = Steps.all(parse_format("bf16"))
    out = renormalised_attention(q, k, v, SCALE, steps, Blocks(8, 16), bias=bias)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(golden_attention(q, k, v, SCALE, bias), torch.zeros_like(q).double())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"k": torch.full((70, 32), math.nan)}, "k: expected finite", id="nan"),
        pytest.param({"q": torch.full((70, 32), math.inf)}, "q: expected finite", id="inf"),
        pytest.param({"k": torch.zeros(70, 31)}, "q, k, v: expected", id="head-dim"),
        pytest.param({"v": torch.zeros(71, 32)}, "q, k, v: expected", id="length"),
    ],
)
def test_bad_inputs_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    tensors = {name: torch.zeros(70, 32) for name in "qkv"} | change
    with pytest.raises(ArgumentError, match=message):
        check_inputs(**tensors)


def test_options_that_an_algorithm_lacks_are_refused() -> None:
    q, k, v = _qkv()
    steps = Steps.all(parse_format("bf16"))
    with pytest.raises(ArgumentError, match="bias: expected None"):
        flash_attention(
            q, k, v, SCALE, find_preset("kernel"), steps, Blocks(8, 16), bias=torch.zeros(70, 70)
        )
    with pytest.raises(ArgumentError, match="causal: expected False"):
        flash_attention(q, k, v, SCALE, find_preset("paper"), steps, Blocks(8, 16), causal=True)


def test_unknown_presets_and_steps_are_refused() -> None:
    with pytest.raises(ArgumentError, match="preset: expected one of paper, kernel, tree"):
        find_preset("cuda")
    with pytest.raises(ArgumentError, match="steps: expected names of"):
        Steps.parse({"P": "bf16"})


@pytest.mark.parametrize("name", ["uniform", "normal", "normal_mean", "scaled_logits", "outliers"])
def test_draws_repeat(name: str) -> None:
    first, again = (draw(name, 3, 50, 8) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], draw(name, 4, 50, 8)[0])
    assert not torch.equal(first[0], first[1])


def test_an_unknown_distribution_is_refused() -> None:
    with pytest.raises(ArgumentError, match="inputs: expected one of uniform"):
        draw("cauchy", 0, 8, 8)
