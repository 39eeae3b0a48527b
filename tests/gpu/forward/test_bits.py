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
@pytest.mark.parametrize(
    "layout",
    ["qkv", "heads-first", "gaps", "last-dim-strided", "expanded", "odd-rows", "odd-start"],
)
@CONFIGS
def test_strides(head_dim: int, dtype: str, layout: str, causal: bool) -> None:
    tensors = draw(head_dim, dtype, nheads_k=8)
    if layout == "expanded":
        tensors = tuple(t[:1].expand(2, -1, -1, -1) for t in tensors)  # type: ignore[assignment]
    q, k, v = (t.contiguous() for t in tensors)
    expected = attend(q, k, v, causal=causal)
    if layout == "qkv":
        views = torch.stack(tensors, dim=2).unbind(2)
    elif layout == "heads-first":
        views = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors)
    elif layout == "gaps":
        views = tuple(spread(t, (1, 2)) for t in tensors)
    elif layout == "last-dim-strided":
        views = tuple(spread(t, (3,)) for t in tensors)
    elif layout == "odd-rows":
        views = tuple(torch.nn.functional.pad(t, (0, 3))[..., :-3] for t in tensors)
    elif layout == "odd-start":
        views = tuple(torch.nn.functional.pad(t, (1, 7))[..., 1:-7] for t in tensors)
    else:
        views = tensors
    assert any(not view.is_contiguous() for view in views)
    q, k, v = views
    assert_same(attend(q, k, v, causal=causal), expected)


def spread(tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """A copy whose neighbours along some dimensions lie twice as far apart, NaN between them."""
    sizes = [size * 2 if dim in dims else size for dim, size in enumerate(tensor.shape)]
    view = torch.full(sizes, math.nan, dtype=tensor.dtype, device=tensor.device)
    for dim in dims:
        pairs = view.unflatten(dim, (-1, 2))  # type: ignore[no-untyped-call, unused-ignore]
        view = pairs.select(dim + 1, 0)
    return view.copy_(tensor)


@CAUSAL
@pytest.mark.parametrize("head_dim", [36, 65, 100, 250, 1])
def test_head_dim_padded_by_hand(head_dim: int, causal: bool) -> None:
    q, k, v = draw(head_dim, "bf16")
    q_pad, k_pad, v_pad = (torch.nn.functional.pad(t, (0, -head_dim % 8)) for t in (q, k, v))
    out, softmax_lse = attend(q_pad, k_pad, v_pad, head_dim**-0.5, causal)
    assert_same(attend(q, k, v, causal=causal), (out[..., :head_dim], softmax_lse))


@CAUSAL
@pytest.mark.parametrize(("head_dim", "larger"), [(40, 64), (72, 96), (112, 128), (224, 256)])
def test_head_dim_padded_to_the_kernels(head_dim: int, larger: int, causal: bool) -> None:
    """The even and the uneven instance of one kernel agree."""
    q, k, v = draw(head_dim, "bf16")
    widths = (0, larger - head_dim)
    q_pad, k_pad, v_pad = (torch.nn.functional.pad(t, widths) for t in (q, k, v))
    out, softmax_lse = attend(q_pad, k_pad, v_pad, head_dim**-0.5, causal)
    assert_same(attend(q, k, v, causal=causal), (out[..., :head_dim], softmax_lse))


@CONFIGS
def test_other_stream(head_dim: int, dtype: str) -> None:
    q, k, v = draw(head_dim, dtype)
    expected = attend(q, k, v, causal=True)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Only a launch on this very stream sees the inputs after they are written.
        q_late, k_late, v_late = (torch.empty_like(t) for t in (q, k, v))
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call, unused-ignore]
        for late, tensor in ((q_late, q), (k_late, k), (v_late, v)):
            late.copy_(tensor)
        result = attend(q_late, k_late, v_late, causal=True)
    stream.synchronize()
    assert_same(result, expected)


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


@CAUSAL
@CONFIGS
def test_cuda_graph(head_dim: int, dtype: str, causal: bool) -> None:
    first = draw(head_dim, dtype)
    second = draw(head_dim, dtype, seed=1)
    expected = [attend(*tensors, causal=causal) for tensors in (first, second)]
    q, k, v = (t.clone() for t in first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attend(q, k, v, causal=causal)
    for tensors, wanted in ((second, expected[1]), (first, expected[0]), (second, expected[1])):
        for buffer, tensor in zip((q, k, v), tensors, strict=True):
            buffer.copy_(tensor)
        for tensor in result:
            tensor.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(result, wanted)


# torch.compile itself warns about what it plans to change.
@pytest.mark.filterwarnings("ignore")
@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 36], ids=["d64", "d36"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
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


def test_batch_larger_than_a_grid_dimension() -> None:
    q, k, v = draw(64, "bf16", batch=70_000, seqlen_q=2, seqlen_k=3, nheads=1, nheads_k=1)
    out, softmax_lse = attend(q, k, v, causal=True)
    for i in (0, 65_535, 65_536, 69_999):
        one = slice(i, i + 1)
        assert_same(attend(q[one], k[one], v[one], causal=True), (out[one], softmax_lse[one]))


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


@pytest.mark.slow
def test_more_than_2_to_31_elements_over_the_batch() -> None:
    q, k, v = draw(64, "bf16", batch=33_000, seqlen_q=32, nheads=32, nheads_k=32)
    assert q.numel() > 2**31
    out, softmax_lse = attend(q, k, v, causal=True)
    for i in (0, 16_400, 32_999):
        one = slice(i, i + 1)
        assert_same(attend(q[one], k[one], v[one], causal=True), (out[one], softmax_lse[one]))


@pytest.mark.slow
def test_more_than_2_to_31_elements_in_a_sequence() -> None:
    q, k, v = draw(128, "bf16", batch=1, seqlen_q=3, seqlen_k=530_000, nheads=32, nheads_k=32)
    assert k.numel() > 2**31
    out, softmax_lse = attend(q, k, v, causal=True)
    for h in (0, 31):
        heads = slice(h, h + 1)
        one = attend(
            q[:, :, heads], k[:, :, heads].contiguous(), v[:, :, heads].contiguous(), causal=True
        )
        assert_same(one, (out[:, :, heads], softmax_lse[:, heads]))
