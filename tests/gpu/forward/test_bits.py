"""A row's bits depend on the row's own inputs and on nothing else: what the contract leaves out."""

from __future__ import annotations

import math

import pytest
import torch
from flash_attn_deterministic import explain, flash_attn_func, flash_attn_with_kvcache

from tests.gpu.attention import (
    BIT_CONFIGS,
    DTYPES,
    Tensors,
    assert_same,
    attend,
    bits,
    each_config,
    make_qkv,
    same_bits,
    skip_unless_built,
)
from tests.inductor import HAS_HEADERS

pytestmark = pytest.mark.gpu

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
CONFIGS = each_config(BIT_CONFIGS)


def draw(
    head_dim: int,
    dtype: str,
    *,
    batch: int = 2,
    seqlen_q: int = 333,
    seqlen_k: int | None = None,
    nheads: int = 8,
    nheads_k: int = 2,
    seed: int = 0,
) -> Tensors:
    skip_unless_built(head_dim, dtype)
    shape = (batch, seqlen_q, nheads, head_dim)
    return make_qkv(shape, seqlen_k, nheads_k, dtype=DTYPES[dtype], seed=seed)


@CONFIGS
def test_rows_without_causal_mask(head_dim: int, dtype: str) -> None:
    q, k, v = draw(head_dim, dtype)
    out, softmax_lse = attend(q, k, v)
    for rows in (slice(0, 1), slice(100, 165), slice(200, 333)):
        assert_same(attend(q[:, rows], k, v), (out[:, rows], softmax_lse[:, :, rows]))


@CAUSAL
@pytest.mark.parametrize(("head_dim", "larger"), [
    (1, 8),
    (36, 40),
    (65, 72),
    (100, 104),
    (250, 256),
    (40, 64),
    (72, 96),
    (112, 128),
    (224, 256),
])  # fmt: skip
def test_padded_head_dim(head_dim: int, larger: int, causal: bool) -> None:
    """To a multiple of 8 by hand; to the kernel's, whose even and uneven instances agree."""
    q, k, v = draw(head_dim, "bf16")
    widths = (0, larger - head_dim)
    q_pad, k_pad, v_pad = (torch.nn.functional.pad(t, widths) for t in (q, k, v))
    out, softmax_lse = attend(q_pad, k_pad, v_pad, head_dim**-0.5, causal)
    assert_same(attend(q, k, v, causal=causal), (out[..., :head_dim], softmax_lse))


@pytest.mark.parametrize("seqlen_k", [1, 63, 64, 65, 200])
@CONFIGS
def test_rows_without_a_key(head_dim: int, dtype: str, seqlen_k: int) -> None:
    q, k, v = draw(head_dim, dtype, seqlen_k=seqlen_k)
    out, softmax_lse = attend(q, k, v, causal=True)
    empty = q.shape[1] - seqlen_k
    assert (bits(out[:, :empty]) == 0).all()
    assert (softmax_lse[:, :, :empty] == math.inf).all()
    square = attend(q[:, empty:], k, v, causal=True)
    assert_same((out[:, empty:], softmax_lse[:, :, empty:]), square)


@CAUSAL
@CONFIGS
def test_no_keys_at_all(head_dim: int, dtype: str, causal: bool) -> None:
    q, k, v = draw(head_dim, dtype, seqlen_k=0)
    out, softmax_lse = attend(q, k, v, causal=causal)
    assert out.shape == q.shape
    assert (bits(out) == 0).all()
    assert softmax_lse.shape == (2, 8, 333)
    assert (softmax_lse == math.inf).all()


def test_no_queries() -> None:
    q, k, v = draw(64, "bf16", seqlen_q=0, seqlen_k=100)
    out, softmax_lse = attend(q, k, v)
    assert out.shape == (2, 0, 8, 64)
    assert softmax_lse.shape == (2, 8, 0)


@CAUSAL
@CONFIGS
def test_nan_in_a_query_stays_in_its_row(head_dim: int, dtype: str, causal: bool) -> None:
    q, k, v = draw(head_dim, dtype)
    out, softmax_lse = attend(q, k, v, causal=causal)
    q[1, 200, 3, 5] = math.nan
    poisoned, poisoned_lse = attend(q, k, v, causal=causal)
    assert poisoned[1, 200, 3].isnan().all()
    assert poisoned_lse[1, 3, 200].isnan()
    poisoned[1, 200, 3] = out[1, 200, 3]
    poisoned_lse[1, 3, 200] = softmax_lse[1, 3, 200]
    assert_same((poisoned, poisoned_lse), (out, softmax_lse))


# torch.compile itself warns about what it plans to change.
@pytest.mark.filterwarnings("ignore")
@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 36], ids=["d64", "d36"])
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, HAS_HEADERS])]
)
def test_torch_compile(backend: str, head_dim: int, causal: bool) -> None:
    q, k, v = draw(head_dim, "bf16")
    torch.compiler.reset()  # each case counts as a recompilation of the same code otherwise

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, softmax_lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
        return out, softmax_lse

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    assert_same(compiled(q, k, v), call(q, k, v))
    longer = draw(head_dim, "bf16", batch=3, seqlen_q=500)
    assert_same(compiled(*longer), call(*longer))


@pytest.mark.filterwarnings("ignore")
@CAUSAL
def test_opcheck(causal: bool) -> None:
    q, k, v = draw(64, "bf16", seqlen_q=65)
    result = torch.library.opcheck(
        torch.ops.flash_attn_deterministic.fwd.default,
        (q, k, v, None, None, 0.0, 0.125, -1, 0 if causal else -1, 0.0, 2048, True, True),
    )
    assert set(result.values()) == {"SUCCESS"}


def test_more_splits_than_a_grid_dimension() -> None:
    """A split per thread block is then no way to go; one thread block walks over all of them."""
    q, k, v = draw(64, "bf16", batch=1, seqlen_q=1, seqlen_k=64 * 65_536 + 1, nheads=2, nheads_k=1)
    plan = explain(flash_attn_func, q, k, v, split_size=64)
    assert (plan.path, plan.num_splits, plan.scratch_bytes) == ("one-cta", 65_537, 0)
    _, softmax_lse, _ = flash_attn_func(q, k, v, split_size=64, return_attn_probs=True)
    scores = torch.einsum("hd,td->ht", q[0, 0].double(), k[0, :, 0].double()) / math.sqrt(64)
    wanted = scores.logsumexp(1)
    torch.testing.assert_close(softmax_lse[0, :, 0].double(), wanted, atol=1e-3, rtol=0)

    # The room in a cache chooses the path, and no bits.
    used = torch.tensor([5000], dtype=torch.int32, device="cuda")
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=used, split_size=64)
    less = (k[:, :5000], v[:, :5000])
    assert explain(flash_attn_func, q, *less, split_size=64).path == "few-rows"
    assert same_bits(out, flash_attn_func(q, *less, split_size=64))
