from __future__ import annotations

import math

import pytest
import torch
from attention_cases import make_inputs, softmax_attention, tolerance
from bits import all_equal, bits_equal
from flash_attn_deterministic.build_info import build_info
from flash_attn_deterministic.errors import ArgumentError, DtypeError
from flash_attn_deterministic.reference import Formats, State, attention, ieee, merge_state

INF = math.inf
LOG2_E = math.log2(math.e)


# --- Values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(60, 300), (1, 1)], ids=str)
@pytest.mark.parametrize("split_size", [0, 128], ids=["one-split", "splits"])
def test_float64_inputs_are_computed_in_float64(split_size: int, lengths: tuple[int, int]) -> None:
    q, k, v = make_inputs(1, *lengths, 2, 1, 64, torch.float64)
    out, softmax_lse = attention(q, k, v, causal=True, split_size=split_size)
    exact_out, exact_lse = softmax_attention(q, k, v, causal=True)
    assert out.dtype == softmax_lse.dtype == torch.float64
    torch.testing.assert_close(out, exact_out, rtol=0, atol=1e-13)
    torch.testing.assert_close(softmax_lse, exact_lse, rtol=0, atol=1e-13)


@pytest.mark.parametrize("softmax_scale", [0.0, 1.0, -0.3], ids=["zero", "one", "negative"])
def test_any_finite_scale(softmax_scale: float) -> None:
    q, k, v = make_inputs(1, 5, 150, 1, 1, 32, torch.float64)
    out, softmax_lse = attention(q, k, v, softmax_scale=softmax_scale, causal=True, block_n=64)
    exact_out, exact_lse = softmax_attention(q, k, v, softmax_scale, causal=True)
    torch.testing.assert_close(out, exact_out, rtol=0, atol=1e-13)
    torch.testing.assert_close(softmax_lse, exact_lse, rtol=0, atol=1e-13)


def test_extreme_scores_do_not_overflow() -> None:
    q, k, v = make_inputs(1, 4, 200, dtype=torch.float16)
    out, softmax_lse = attention(q * 200, k * 200, v)
    exact_out, exact_lse = softmax_attention(q * 200, k * 200, v)
    torch.testing.assert_close(out.double(), exact_out, rtol=0, atol=tolerance(q.dtype, v))
    torch.testing.assert_close(softmax_lse.double(), exact_lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("split_size", [0, 128], ids=["one-split", "splits"])
@pytest.mark.parametrize("position", [0, 140, 299], ids=["first", "middle", "last"])
@pytest.mark.parametrize("value", [math.nan, INF], ids=["nan", "inf"])
def test_nan_sum_reaches_out_and_lse(value: float, position: int, split_size: int) -> None:
    q, k, v = make_inputs(1, 2, 300)
    q = q.abs()
    k[0, position, 0] = value
    out, softmax_lse = attention(q, k, v, block_n=64, split_size=split_size)
    assert out[:, :, 0].isnan().all()
    assert softmax_lse[:, 0].isnan().all()
    assert out[:, :, 1].isfinite().all()


# --- Order of operations ------------------------------------------------------------------------


def _scalar_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: int, block_n: int, split_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of attention, one operation on one number at a time."""
    scale = torch.tensor(len(q) ** -0.5)
    scale_log2 = torch.tensor(scale.item() * LOG2_E)
    zero, lowest = torch.tensor(0.0), torch.tensor(-INF)

    def exp2(x: torch.Tensor) -> torch.Tensor:
        return ieee.exp2(x.reshape(1))[0]

    def tree(values: list[torch.Tensor]) -> torch.Tensor:
        while len(values) > 1:
            half = len(values) // 2
            values = [values[i] + values[i + half] for i in range(half)]
        return values[0]

    def split(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        row_max, row_sum, acc = lowest, zero, [zero] * len(q)
        for start in reversed(range(begin, end, block_n)):
            keys = range(start, min(start + block_n, end))
            scores = []
            for j in keys:
                score = zero
                for d in range(len(q)):
                    score = score + q[d].float() * k[j, d].float()
                scores.append(score)
            before, row_max = row_max, torch.stack([row_max, *scores]).max()
            rescale = zero if before == -INF else exp2((before - row_max) * scale_log2)
            probs = [exp2(s * scale_log2 - row_max * scale_log2) for s in scores]
            row_sum = row_sum * rescale + tree(probs + [zero] * (block_n - len(probs)))
            acc = [a * rescale for a in acc]
            for j, prob in zip(keys, probs, strict=True):
                rounded = prob.to(q.dtype).float()
                acc = [a + rounded * v[j, d].float() for d, a in enumerate(acc)]
        return row_max, row_sum, acc

    step = split_size or visible
    begins = list(range(0, visible, step))
    row_max, row_sum, acc = split(begins[-1], visible)
    for begin in reversed(begins[:-1]):
        part_max, part_sum, part_acc = split(begin, begin + step)
        merged = torch.maximum(row_max, part_max)
        left, right = exp2((row_max - merged) * scale_log2), exp2((part_max - merged) * scale_log2)
        row_max, row_sum = merged, row_sum * left + part_sum * right
        acc = [a * left + b * right for a, b in zip(acc, part_acc, strict=True)]
    out = torch.stack([a / row_sum for a in acc]).to(q.dtype)
    return out, row_max * scale + ieee.log(row_sum.reshape(1))[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("split_size", [0, 16, 32], ids=["one-split", "split-16", "split-32"])
def test_tree_is_the_documented_one(split_size: int, dtype: torch.dtype) -> None:
    q, k, v = make_inputs(1, 3, 107, 1, 1, 8, dtype)
    out, softmax_lse = attention(q, k, v, causal=True, block_n=8, split_size=split_size)
    for row in range(3):
        expected_out, expected_lse = _scalar_row(
            q[0, row, 0], k[0, :, 0], v[0, :, 0], 107 - 2 + row, 8, split_size
        )
        assert bits_equal(out[0, row, 0], expected_out)
        assert bits_equal(softmax_lse[0, 0, row], expected_lse)


def test_block_n_is_that_of_the_kernel() -> None:
    for head_dim, tile in build_info().tiles.items():
        q, k, v = make_inputs(1, 2, 200, 1, 1, head_dim)
        other = 64 if tile.block_n == 128 else 128
        result = attention(q, k, v)
        assert all_equal(result, attention(q, k, v, block_n=tile.block_n))
        assert not all_equal(result, attention(q, k, v, block_n=other))


@pytest.mark.parametrize("split_size", [-128, 64, 200])
def test_split_size_is_whole_blocks(split_size: int) -> None:
    with pytest.raises(ArgumentError, match=rf"split_size: .* of 128, .*, got {split_size};"):
        attention(*make_inputs(), split_size=split_size, block_n=128)


@pytest.mark.parametrize("block_n", [-64, 0, 48])
def test_block_n_is_a_power_of_two(block_n: int) -> None:
    with pytest.raises(ArgumentError, match=f"block_n: expected a power of two, got {block_n}"):
        attention(*make_inputs(), block_n=block_n)


def test_integer_inputs_are_refused() -> None:
    q, k, v = (tensor.to(torch.int32) for tensor in make_inputs())
    with pytest.raises(DtypeError, match=r"q: .* got torch\.int32"):
        attention(q, k, v)


# --- merge_state --------------------------------------------------------------------------------


def _state(row_max: float, row_sum: float, *acc: float) -> State:
    return State(torch.tensor([[row_max]]), torch.tensor([[row_sum]]), torch.tensor([list(acc)]))


EMPTY = _state(-INF, 0.0, 0.0, 0.0)
FULL = _state(1.2345678, 3.3, 0.1, -0.0)


@pytest.mark.parametrize("scale_log2", [0.18, 0.0, -0.18], ids=["positive", "zero", "negative"])
def test_merging_an_empty_part_changes_nothing(scale_log2: float) -> None:
    assert all_equal(merge_state(FULL, EMPTY, scale_log2), FULL)
    assert all_equal(merge_state(EMPTY, FULL, scale_log2), FULL)
    assert all_equal(merge_state(EMPTY, EMPTY, scale_log2), EMPTY)


@pytest.mark.parametrize("nan_first", [False, True])
def test_merging_keeps_a_nan_sum(nan_first: bool) -> None:
    nan = _state(math.nan, math.nan, math.nan, math.nan)
    merged = merge_state(nan, FULL, 0.18) if nan_first else merge_state(FULL, nan, 0.18)
    assert merged.row_sum.isnan().all()
    assert merged.acc.isnan().all()


# --- Formats ------------------------------------------------------------------------------------

FIELDS = ["scores", "probs", "row_max", "row_sum", "rescale", "acc", "out"]


@pytest.mark.parametrize("field", FIELDS)
def test_each_format_rounds_its_step(field: str) -> None:
    q, k, v = make_inputs(1, 16, 200, 1, 1, 32, torch.float32)
    coarse = attention(q, k, v, block_n=64, formats=Formats(**{field: torch.bfloat16}))
    exact_out, _ = softmax_attention(q, k, v)
    assert not all_equal(coarse, attention(q, k, v, block_n=64))
    torch.testing.assert_close(coarse[0].double(), exact_out, rtol=0, atol=0.05)


@pytest.mark.parametrize("field", FIELDS)
def test_formats_reach_the_merge(field: str) -> None:
    seen: list[torch.Size] = []

    def record(values: torch.Tensor) -> torch.Tensor:
        seen.append(values.shape)
        return values

    formats = Formats(**{field: record})
    plain = merge_state(FULL, _state(3.0, 1.0, 1.0, 1.0), 0.18)
    merged = merge_state(FULL, _state(3.0, 1.0, 1.0, 1.0), 0.18, formats)
    assert all_equal(plain, merged)
    assert bool(seen) == (field in ("row_max", "row_sum", "rescale", "acc"))


def test_a_callable_rounds_like_its_dtype() -> None:
    q, k, v = make_inputs(1, 5, 200, 1, 1, 32)
    by_dtype = attention(q, k, v, formats=Formats(scores=torch.float16))
    by_call = attention(q, k, v, formats=Formats(scores=lambda x: x.half().float()))
    assert all_equal(by_dtype, by_call)
