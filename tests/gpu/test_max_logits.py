"""The largest score of each head: from every kernel the one of the definition, bit for bit.

Elements of q and k are small integers and scales powers of two, so that scores are exact.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from flash_attn_deterministic import deterministic_mode
from flash_attn_deterministic.verify.contract.device_override import device_override
from flash_attn_deterministic.verify.exact import Definition

from tests.gpu.attention import (
    DTYPES,
    SCHEDULES,
    assert_same,
    flash_attn_func,
    flash_attn_varlen_func,
    make_qkv,
    pairwise,
    skip_unless_built,
)

pytestmark = pytest.mark.gpu

SCALE = 0.125
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (127, 0), "split_size": 128},
    "softcap": {"softcap": 8.0, "causal": True},
    "alibi": {"alibi": True, "causal": True},
    "sinks": {"sinks": True, "causal": True},
    "dropout": {"dropout_p": 0.5},
    "one-split": {"causal": True, "split_size": 0},
}
CONFIGS = pairwise(
    head_dim=(32, 64, 72, 96, 128, 192, 256),
    dtype=("bf16", "fp16"),
    options=OPTIONS,
    lengths=((1, 700), (16, 513), (300, 300), (200, 65), (300, 1500)),
    heads=((8, 2), (6, 2), (4, 4), (16, 1)),
)


def draw(
    head_dim: int, dtype: str, lengths: tuple[int, int], heads: tuple[int, int], seed: int = 0
) -> list[torch.Tensor]:
    """q and k of small integers, and v."""
    skip_unless_built(head_dim, dtype)
    q, k, v = make_qkv(
        (2, lengths[0], heads[0], head_dim), lengths[1], heads[1], dtype=DTYPES[dtype], seed=seed
    )
    return [(2 * q).round(), (2 * k).round(), v]


def call_and_definition(options: dict[str, Any], nheads: int) -> tuple[dict[str, Any], Definition]:
    """The options of a call, and what it should return."""
    given: dict[str, Any] = {"softmax_scale": SCALE, **options}
    definition = {n: x for n, x in given.items() if n not in ("split_size", "sinks", "dropout_p")}
    if given.pop("sinks", False):
        given["learnable_sink"] = torch.full((nheads,), 200.0, device="cuda")
    if given.pop("alibi", False):
        slopes = 2.0 ** -torch.arange(1.0, nheads + 1, device="cuda")
        given["alibi_slopes"] = slopes
        definition["alibi_slopes"] = slopes.expand(2, nheads)
        definition.pop("alibi")
    return given, Definition(**definition)


@CONFIGS
def test_every_schedule_returns_that_of_the_definition(
    head_dim: int,
    dtype: str,
    options: dict[str, Any],
    lengths: tuple[int, int],
    heads: tuple[int, int],
) -> None:
    qkv = draw(head_dim, dtype, lengths, heads)
    given, definition = call_and_definition(options, heads[0])
    expected = definition.max_logits(*qkv[:2]).float()
    found: torch.Tensor | None = None
    for schedule in SCHEDULES:
        with device_override(schedule):
            torch.manual_seed(3)
            out, own = flash_attn_func(*qkv, **given, return_max_logits=True)
            torch.manual_seed(3)
            without = flash_attn_func(*qkv, **given)
        assert_same((out,), (without,), ("out",))
        if "softcap" in options:  # tanh is approximate, and the same in all kernels
            torch.testing.assert_close(own, expected, rtol=2e-3, atol=1e-3)
            expected = own if found is None else found
        found = own
        assert_same((own,), (expected,), ("max_logits",))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_sequences(head_dim: int, dtype: str) -> None:
    lengths = [(300, 300), (1, 700), (0, 40), (129, 64), (16, 0), (64, 513)]
    q, k, v = (x[0] for x in draw(head_dim, dtype, (600, 1700), (8, 2)))
    starts = [[0, *itertools.accumulate(own)] for own in zip(*lengths, strict=True)]
    q[starts[0][-1] :] = 100.0  # rows of no sequence
    packed = [torch.tensor(own, dtype=torch.int32, device="cuda") for own in starts]
    definition = Definition(causal=True, softmax_scale=SCALE)
    spans = zip(*map(itertools.pairwise, starts), strict=True)
    expected = torch.stack(
        [definition.max_logits(q[None, a:b], k[None, c:d]) for (a, b), (c, d) in spans]
    )
    given = {"causal": True, "softmax_scale": SCALE, "return_max_logits": True}
    for schedule in SCHEDULES:
        with device_override(schedule):
            _, found = flash_attn_varlen_func(q, k, v, *packed, 300, 700, **given)
        assert_same((found,), (expected.amax(0).float(),), ("max_logits",))


def test_rows_without_keys_do_not_count() -> None:
    q, k, v = draw(64, "bf16", (200, 65), (8, 2))
    q[:, :135] = 100.0
    given = {"causal": True, "softmax_scale": SCALE, "return_max_logits": True}
    expected = flash_attn_func(q[:, 135:], k, v, **given)[1]
    for schedule in SCHEDULES:
        with device_override(schedule):
            assert_same((flash_attn_func(q, k, v, **given)[1],), (expected,), ("max_logits",))
            none = flash_attn_func(q, k[:, :0], v[:, :0], **given)[1]
        assert none.tolist() == [-math.inf] * 8


def test_nan_is_seen_in_its_head_alone() -> None:
    q, k, v = draw(64, "bf16", (70, 300), (8, 2))
    q[1, 40, 5, 3] = math.nan
    for schedule in SCHEDULES:
        with device_override(schedule):
            found = flash_attn_func(q, k, v, return_max_logits=True)[1]
        assert found.isnan().tolist() == [head == 5 for head in range(8)]


@pytest.mark.parametrize("keep_residual", [False, True], ids=["plain", "residual"])
def test_gradients_keep_their_bits(keep_residual: bool) -> None:
    skip_unless_built(128, "bf16", "bwd")
    qkv = draw(128, "bf16", (300, 300), (8, 2))

    def gradients(**options: Any) -> Any:
        leaves = [x.detach().requires_grad_() for x in qkv]
        with deterministic_mode(keep_residual=keep_residual):
            out = flash_attn_func(*leaves, causal=True, **options)
        out = out[0] if options else out
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    names = ("dq", "dk", "dv")
    assert_same(gradients(return_max_logits=True), gradients(), names)
