"""What the bits of dq, dk and dv must not depend on, besides the rows of `verify`'s contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from flash_attn_deterministic import flash_attn_func

from tests.gpu.attention import BIT_CONFIGS, bits, each_config, pairwise, same_bits
from tests.gpu.gradients import (
    ALL_FEATURES,
    DROPOUT_FEATURES,
    FEATURES,
    GradientCall,
    Gradients,
    assert_same_gradients,
    draw_call,
    run_packed,
)

pytestmark = pytest.mark.gpu

CONFIGS = (*BIT_CONFIGS, (32, "bf16"), (40, "fp16"), (96, "bf16"), (192, "bf16"))
CONFIG = each_config(CONFIGS)
FEATURE = pytest.mark.parametrize("feature", FEATURES)
ALL = pytest.mark.parametrize("feature", ALL_FEATURES)
DROPOUT = pytest.mark.parametrize("feature", DROPOUT_FEATURES)
# (seqlen_q, seqlen_k) around the tiles of 64 and 128 rows and keys, with nothing, with one token,
# with more queries than keys and fewer.
RAGGED = (
    (1, 1),
    (1, 129),
    (0, 70),
    (63, 64),
    (64, 63),
    (65, 65),
    (0, 0),
    (127, 128),
    (128, 127),
    (129, 129),
    (70, 0),
    (200, 400),
    (400, 200),
    (257, 255),
    (1, 1),
    (129, 1),
)
LONGEST = 400


def picked(gradients: Gradients, index: slice | list[int]) -> Gradients:
    """The gradients of some sequences."""
    dq, dk, dv = gradients
    return dq[index], dk[index], dv[index]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128], ids=["d64", "d128"])
def test_long_sequences(head_dim: int, causal: bool) -> None:
    """Many turns to each row block, and one GPU's worth of heads or a few of them."""
    feature = "causal" if causal else "full"
    call = draw_call(head_dim, "bf16", feature, batch=4, seqlen_q=4096 + 65, nheads=16, nheads_k=4)
    together = call()
    for index in (0, 3):
        alone = call.sequences([index])
        expected = alone()
        assert_same_gradients(picked(together, slice(index, index + 1)), expected)
        dq, dk, dv = alone.kv_heads(1, 2)()
        assert_same_gradients(
            (dq, dk, dv),
            (expected[0][:, :, 4:8], expected[1][:, :, 1:2], expected[2][:, :, 1:2]),
        )


def ragged(call: GradientCall) -> list[GradientCall]:
    """A call of one sequence for each of RAGGED."""
    return [call.sequences([i]).lengths(*lengths) for i, lengths in enumerate(RAGGED)]


@FEATURE
@CONFIG
def test_packed_is_dense(head_dim: int, dtype: str, feature: str) -> None:
    size = len(RAGGED)
    calls = ragged(draw_call(head_dim, dtype, feature, batch=size, seqlen_q=LONGEST))
    alone = [call() for call in calls]
    for spare in (0, 77):
        for one, expected in zip(run_packed(calls, spare), alone, strict=True):
            assert_same_gradients(one, expected)
    backwards = run_packed(calls[::-1], 1)
    for one, expected in zip(backwards[::-1], alone, strict=True):
        assert_same_gradients(one, expected)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 70), (70, 0), (0, 0)])
@CONFIG
def test_nothing_to_see(head_dim: int, dtype: str, seqlen_q: int, seqlen_k: int) -> None:
    for gradient in draw_call(head_dim, dtype).lengths(seqlen_q, seqlen_k)():
        assert not bits(gradient).count_nonzero()


@pytest.mark.parametrize("seqlen_k", [1, 64, 127, 128, 129, 200])
@CONFIG
def test_rows_without_a_key(head_dim: int, dtype: str, seqlen_k: int) -> None:
    call = draw_call(head_dim, dtype, "causal").lengths(333, seqlen_k)
    dq, dk, dv = call()
    empty = 333 - seqlen_k
    assert not dq[:, :empty].count_nonzero()
    assert dq[:, empty:].isfinite().all()
    # The same keys seen by the rows that see any; the tiles of rows begin elsewhere.
    square = replace(call, q=call.q[:, empty:], dout=call.dout[:, empty:])
    for one, other in zip((dq[:, empty:], dk, dv), square(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


@pairwise(
    config=((64, "bf16"), (80, "fp16"), (128, "bf16"), (192, "fp16"), (256, "bf16")),
    feature=list(FEATURES),
    heads=((8, 4), (12, 4), (8, 2), (16, 2), (32, 2)),
)
def test_kv_groups_alone(config: tuple[int, str], feature: str, heads: tuple[int, int]) -> None:
    nheads, nheads_k = heads
    call = draw_call(*config, feature, nheads=nheads, nheads_k=nheads_k)
    dq, dk, dv = call()
    group = nheads // nheads_k
    for begin, end in {(0, 1), (nheads_k - 1, nheads_k), (0, nheads_k - 1)}:
        rows, keys = slice(begin * group, end * group), slice(begin, end)
        expected = dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]
        assert_same_gradients(call.kv_heads(begin, end)(), expected)


@FEATURE
@CONFIG
def test_dq_of_gqa_is_that_of_mha_on_repeated_kv(head_dim: int, dtype: str, feature: str) -> None:
    call = draw_call(head_dim, dtype, feature, nheads=8, nheads_k=1)
    k, v = (t.repeat_interleave(8, dim=2) for t in (call.k, call.v))
    assert same_bits(call()[0], replace(call, k=k, v=v)()[0])


@DROPOUT
@CONFIG
def test_dropout_follows_the_index_of_sequence_and_head(
    head_dim: int, dtype: str, feature: str
) -> None:
    """So only the last ones can go."""
    call = draw_call(head_dim, dtype, feature, batch=4, nheads=12, nheads_k=4)
    together = call()
    dq, dk, dv = together
    for end in (1, 3):
        first = slice(0, end)
        assert_same_gradients(call.sequences(first)(), picked(together, first))
        assert_same_gradients(
            call.kv_heads(0, end)(), (dq[:, :, : 3 * end], dk[:, :, :end], dv[:, :, :end])
        )
    packed = run_packed([call.sequences([index]) for index in range(4)], spare=5)
    for index, one in enumerate(packed):
        assert_same_gradients(one, picked(together, [index]))
    other = replace(call, seed=call.seed + 1)()
    assert not any(map(same_bits, together, other))


def heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, its heads apart in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, at an address that is no multiple of 16 bytes."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return flat[1:].view(tensor.shape).copy_(tensor)


def odd_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, its rows and heads an odd number of elements apart."""
    wide = torch.empty(
        (*tensor.shape[:-1], tensor.shape[-1] + 1), dtype=tensor.dtype, device=tensor.device
    )
    return wide[..., :-1].copy_(tensor)


@pytest.mark.parametrize("change", [heads_first, unaligned, odd_rows], ids=lambda f: f.__name__)
@CONFIG
def test_strides(head_dim: int, dtype: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    call = draw_call(head_dim, dtype, "causal")
    expected = call()
    assert_same_gradients(replace(call, dout=change(call.dout))(), expected)
    q, k, v = map(change, (call.q, call.k, call.v))
    assert_same_gradients(replace(call, q=q, k=k, v=v)(), expected)


@CONFIG
def test_dout_that_is_expanded(head_dim: int, dtype: str) -> None:
    """The gradient of a sum has stride 0; that of a mean over rows repeats itself."""
    call = draw_call(head_dim, dtype)
    one = torch.ones((), dtype=call.q.dtype, device="cuda")
    rows = call.dout[:, :1].expand(call.q.shape)
    for dout in (one.expand(call.q.shape), rows):
        expected = replace(call, dout=dout.contiguous())()
        assert_same_gradients(replace(call, dout=dout)(), expected)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
def test_gradients_of_some_inputs_only(wanted: str) -> None:
    call = draw_call(64, "bf16", "causal")
    expected = dict(zip("qkv", call(), strict=True))
    tensors = {name: getattr(call, name).detach().clone() for name in "qkv"}
    for name in wanted:
        tensors[name].requires_grad_()
    out = flash_attn_func(**tensors, causal=True)
    leaves = [tensors[name] for name in wanted]
    found = torch.autograd.grad(out, leaves, call.dout)
    for name, gradient in zip(wanted, found, strict=True):
        assert same_bits(gradient, expected[name])


@pytest.mark.parametrize("nheads_k", [1, 2], ids=["gqa", "mha"])
@pytest.mark.parametrize("head_dim", [64, 128], ids=["d64", "d128"])
def test_atomics_are_seen(head_dim: int, nheads_k: int) -> None:
    """The tests above could not see anything otherwise: atomics change dq, and nothing else."""
    call = draw_call(
        head_dim, "bf16", batch=2, seqlen_q=8192, nheads=2, nheads_k=nheads_k
    ).with_options(deterministic="never")
    backward = call.repeated()
    first = backward()
    seen = False
    for _ in range(50):
        dq, dk, dv = backward()
        assert same_bits(dk, first[1])
        assert same_bits(dv, first[2])
        seen = seen or not same_bits(dq, first[0])
    assert seen
    in_turns = call.with_options(deterministic=True)()
    assert same_bits(in_turns[1], first[1])
    assert same_bits(in_turns[2], first[2])
    torch.testing.assert_close(in_turns[0], first[0], rtol=0.02, atol=1e-4)
