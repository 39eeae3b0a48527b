"""The forward rows of the contract: what a row's bits must not depend on, one test for each.

Through the public functions, with every feature. Lengths lie below, at and above the boundaries of
blocks and splits; a path of the kernels is forced through the size of the batch.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from flash_attn_deterministic import (
    deterministic_mode,
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.gpu.attention import (
    DTYPES,
    assert_same,
    bits,
    each_config,
    make_qkv,
    same_bits,
    skip_unless_built,
)

pytestmark = pytest.mark.gpu

Result = tuple[torch.Tensor, torch.Tensor]

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 33)},
    "window-left": {"window_size": (150, -1)},
    "window-right": {"window_size": (-1, 40)},
    "window-right-0": {"window_size": (700, 0)},
    "softcap": {"causal": True, "softcap": 3.0},
    "alibi": {"causal": True, "alibi": True},
    "everything": {"window_size": (600, 20), "softcap": 4.0, "alibi": True},
    "everything-causal": {
        "causal": True,
        "window_size": (600, -1),
        "softcap": 4.0,
        "alibi": True,
    },
}
# Those in which no row sees a key after its own.
CAUSAL_FEATURES = [
    name
    for name, options in FEATURES.items()
    if options.get("causal") or options.get("window_size", (-1, -1))[1] == 0
]
CONFIGS = (
    (64, "bf16"),
    (64, "fp16"),
    (128, "bf16"),
    (128, "fp16"),
    (40, "bf16"),
    (72, "fp16"),
    (80, "bf16"),
    (112, "fp16"),
    (256, "bf16"),
)
SPLITS = (64, 512, 2048)

CONFIG = each_config(CONFIGS)
# decode.cuh copies and multiplies in another way for each head dim it is made for.
DECODE_CONFIGS = (*CONFIGS, (32, "bf16"), (96, "bf16"), (192, "fp16"))
DECODE_CONFIG = each_config(DECODE_CONFIGS)
FEATURE = pytest.mark.parametrize("feature", FEATURES)
CAUSAL_FEATURE = pytest.mark.parametrize("feature", CAUSAL_FEATURES)


@dataclass(frozen=True)
class Call:
    """A call of flash_attn_func; slopes are (batch, nheads)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Result:
        out, softmax_lse, _ = flash_attn_func(
            self.q,
            self.k,
            self.v,
            alibi_slopes=self.slopes,
            return_attn_probs=True,
            **self.options,
        )
        return out, softmax_lse

    @property
    def path(self) -> str:
        return explain(
            flash_attn_func, self.q, self.k, self.v, alibi_slopes=self.slopes, **self.options
        ).path

    def split(self, split_size: int) -> Call:
        return replace(self, options={**self.options, "split_size": split_size})

    def sequences(self, index: slice | list[int]) -> Call:
        slopes = None if self.slopes is None else self.slopes[index]
        return replace(self, q=self.q[index], k=self.k[index], v=self.v[index], slopes=slopes)

    def queries(self, begin: int, end: int) -> Call:
        return replace(self, q=self.q[:, begin:end])

    def keys(self, end: int) -> Call:
        return replace(self, k=self.k[:, :end], v=self.v[:, :end])

    def kv_heads(self, begin: int, end: int) -> Call:
        """Whole groups of heads alone."""
        group = self.q.shape[2] // self.k.shape[2]
        heads = slice(begin * group, end * group)
        return replace(
            self,
            q=self.q[:, :, heads],
            k=self.k[:, :, begin:end],
            v=self.v[:, :, begin:end],
            slopes=None if self.slopes is None else self.slopes[:, heads],
        )


def draw(
    head_dim: int,
    dtype: str,
    feature: str,
    *,
    batch: int = 3,
    seqlen_q: int = 130,
    seqlen_k: int = 1100,
    nheads: int = 8,
    nheads_k: int = 2,
    split_size: int = 512,
    seed: int = 0,
) -> Call:
    skip_unless_built(head_dim, dtype)
    shape = (batch, seqlen_q, nheads, head_dim)
    q, k, v = make_qkv(shape, seqlen_k, nheads_k, dtype=DTYPES[dtype], seed=seed)
    options = {**FEATURES[feature], "split_size": split_size}
    slopes = None
    if options.pop("alibi", False):
        generator = torch.Generator("cuda").manual_seed(seed)
        slopes = 0.3 * torch.rand((batch, nheads), generator=generator, device="cuda")
    return Call(q, k, v, slopes, options)


def rows(result: Result, begin: int, end: int) -> Result:
    """Picks rows of (batch, seqlen_q, nheads, head_dim) and (batch, nheads, seqlen_q)."""
    return result[0][:, begin:end], result[1][:, :, begin:end]


def sequence(result: Result, index: int) -> Result:
    """Picks one sequence of a batch."""
    return result[0][index : index + 1], result[1][index : index + 1]


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def garbage(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """NaN, +Inf and -Inf in turns."""
    size = math.prod(shape)
    values = torch.tensor([math.nan, math.inf, -math.inf], device="cuda", dtype=dtype)
    return values.repeat(-(-size // 3))[:size].view(shape)


@FEATURE
@CONFIG
def test_run_to_run(head_dim: int, dtype: str, feature: str) -> None:
    call = draw(head_dim, dtype, feature)
    expected = call()
    busy = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    other = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(busy):
            other = (other @ other).clamp(-1, 1)
        for one, wanted in zip(call(), expected, strict=True):
            different |= (bits(one) != bits(wanted)).any()
    torch.cuda.synchronize()
    assert not bool(different)


@FEATURE
@pytest.mark.parametrize("seqlen_q", [1, 130])
@CONFIG
def test_batch(head_dim: int, dtype: str, seqlen_q: int, feature: str) -> None:
    call = draw(head_dim, dtype, feature, batch=201, seqlen_q=seqlen_q, seqlen_k=1025)
    alone: dict[int, Result] = {}
    for mates in (1, 2, 3, 64, 200):
        together = call.sequences(slice(0, mates + 1))()
        for place in (0, mates // 2, mates):
            if place not in alone:
                alone[place] = call.sequences([place])()
            assert_same(sequence(together, place), alone[place])
    order = [2, 0, 3, 1]
    permuted = call.sequences(order)()
    for place, index in enumerate(order):
        assert_same(sequence(permuted, place), call.sequences([index])())


@CAUSAL_FEATURE
@pytest.mark.parametrize("split_size", [*SPLITS, 0])
@CONFIG
def test_chunk(head_dim: int, dtype: str, split_size: int, feature: str) -> None:
    seqlen = 2200
    call = draw(
        head_dim, dtype, feature, batch=1, seqlen_q=seqlen, seqlen_k=seqlen, split_size=split_size
    )
    whole = call()
    bounds = (0, 1, 63, 64, 65, 128, 511, 512, 513, 1200, 2047, 2048, 2049, seqlen)
    for begin, end in itertools.pairwise(bounds):
        assert_same(call.queries(begin, end).keys(end)(), rows(whole, begin, end))


@CAUSAL_FEATURE
@pytest.mark.parametrize("split_size", SPLITS)
@CONFIG
def test_decode(head_dim: int, dtype: str, split_size: int, feature: str) -> None:
    """Row t of a prefill, and a step that appends token t to a cache of t tokens."""
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 511, 512, 513, 2047, 2048, 2049, 4097, 4100]
    size = lengths[-1]
    call = draw(
        head_dim, dtype, feature, batch=1, seqlen_q=size, seqlen_k=size, split_size=split_size
    )
    out, softmax_lse = call()
    last = [length - 1 for length in lengths]
    expected = out[0, last].unsqueeze(1), softmax_lse[0][:, last].T.unsqueeze(-1)
    for place, t in list(enumerate(last))[::3]:
        assert_same(call.queries(t, t + 1).keys(t + 1)(), sequence(expected, place))

    shape = (len(lengths), size + 60, *call.k.shape[2:])
    k_cache, v_cache = (garbage(shape, call.k.dtype) for _ in range(2))
    for place, t in enumerate(last):
        k_cache[place, :t], v_cache[place, :t] = call.k[0, :t], call.v[0, :t]
    stepped = flash_attn_with_kvcache(
        call.q[0, last].unsqueeze(1),
        k_cache,
        v_cache,
        call.k[0, last].unsqueeze(1),
        call.v[0, last].unsqueeze(1),
        cache_seqlens=int32(last),
        alibi_slopes=None if call.slopes is None else call.slopes[0],
        return_softmax_lse=True,
        **call.options,
    )
    assert_same(stepped, expected)
    for place, length in enumerate(lengths):
        assert same_bits(k_cache[place, :length], call.k[0, :length])
        assert same_bits(v_cache[place, :length], call.v[0, :length])
        assert not k_cache[place, length:].isfinite().any()


@FEATURE
@pytest.mark.parametrize("seqlen_q", [1, 70])
@CONFIG
def test_capacity(head_dim: int, dtype: str, seqlen_q: int, feature: str) -> None:
    call = draw(head_dim, dtype, feature, batch=2, seqlen_q=seqlen_q)
    for length in (63, 64, 65, 511, 512, 513, 1024, 1025):
        short = call.keys(length)
        expected = short()
        for capacity in (length + 1, 1536, 2049):
            shape = (2, capacity, *call.k.shape[2:])
            k_cache, v_cache = (garbage(shape, call.k.dtype) for _ in range(2))
            k_cache[:, :length], v_cache[:, :length] = short.k, short.v
            views = replace(short, k=k_cache[:, :length], v=v_cache[:, :length])
            assert_same(views(), expected)
            cached = flash_attn_with_kvcache(
                call.q,
                k_cache,
                v_cache,
                cache_seqlens=int32([length] * 2),
                alibi_slopes=call.slopes,
                return_softmax_lse=True,
                **call.options,
            )
            assert_same(cached, expected)


@FEATURE
@pytest.mark.parametrize("page_size", [16, 48, 256])
@pytest.mark.parametrize("seqlen_q", [1, 70])
@DECODE_CONFIG
def test_paged(head_dim: int, dtype: str, seqlen_q: int, page_size: int, feature: str) -> None:
    lengths = [64, 513, 1100]
    call = draw(head_dim, dtype, feature, seqlen_q=seqlen_q)
    per_sequence = -(-1200 // page_size)
    num_blocks = 3 * per_sequence + 2
    generator = torch.Generator().manual_seed(page_size)
    table = torch.randperm(num_blocks, generator=generator)[: 3 * per_sequence].view(3, -1)
    k_pages, v_pages = (
        garbage((num_blocks, page_size, *call.k.shape[2:]), call.k.dtype) for _ in range(2)
    )
    for index, length in enumerate(lengths):
        for number, begin in enumerate(range(0, length, page_size)):
            end = min(begin + page_size, length)
            page = int(table[index, number])
            k_pages[page, : end - begin] = call.k[index, begin:end]
            v_pages[page, : end - begin] = call.v[index, begin:end]
    block_table = table.to("cuda", torch.int32)
    paged = flash_attn_with_kvcache(
        call.q,
        k_pages,
        v_pages,
        cache_seqlens=int32(lengths),
        block_table=block_table,
        alibi_slopes=call.slopes,
        return_softmax_lse=True,
        **call.options,
    )
    out, softmax_lse, _ = flash_attn_varlen_func(
        call.q.flatten(0, 1),
        k_pages,
        v_pages,
        int32([i * seqlen_q for i in range(4)]),
        int32([0, *itertools.accumulate(lengths)]),
        seqlen_q,
        max(lengths),
        alibi_slopes=call.slopes,
        block_table=block_table,
        return_attn_probs=True,
        **call.options,
    )
    packed = (
        out.view(call.q.shape),
        softmax_lse.view(-1, 3, seqlen_q).transpose(0, 1),
    )
    assert_same(packed, paged)
    for index, length in enumerate(lengths):
        assert_same(sequence(paged, index), call.sequences([index]).keys(length)())


@FEATURE
@pytest.mark.parametrize("kind", ["ragged", "one-query-each"])
@CONFIG
def test_varlen(head_dim: int, dtype: str, kind: str, feature: str) -> None:
    lengths_k = [0, 65, 512, 0, 1100, 64, 513, 1, 511]
    lengths_q = [3, 65, 0, 0, 200, 129, 1, 64, 5] if kind == "ragged" else [1] * 9
    call = draw(head_dim, dtype, feature, batch=9, seqlen_q=max(lengths_q))
    pieces = zip(call.q, lengths_q, strict=True)
    q = torch.cat([one[:length] for one, length in pieces])
    k, v = (
        torch.cat([one[:length] for one, length in zip(t, lengths_k, strict=True)])
        for t in (call.k, call.v)
    )
    cu_seqlens_q = [0, *itertools.accumulate(lengths_q)]
    cu_seqlens_k = [0, *itertools.accumulate(lengths_k)]
    common: dict[str, Any] = {
        **call.options,
        "alibi_slopes": call.slopes,
        "return_attn_probs": True,
    }
    out, softmax_lse, _ = flash_attn_varlen_func(
        q,
        k,
        v,
        int32(cu_seqlens_q),
        int32(cu_seqlens_k),
        max(lengths_q),
        max(lengths_k),
        **common,
    )
    capacity = 1200
    k_wide, v_wide = (garbage((9, capacity, *k.shape[1:]), k.dtype) for _ in range(2))
    for index, length in enumerate(lengths_k):
        k_wide[index, :length] = call.k[index, :length]
        v_wide[index, :length] = call.v[index, :length]
    padded = flash_attn_varlen_func(
        q,
        k_wide.flatten(0, 1),
        v_wide.flatten(0, 1),
        int32(cu_seqlens_q),
        int32([i * capacity for i in range(10)]),
        max(lengths_q),
        capacity,
        seqused_k=int32(lengths_k),
        **common,
    )
    assert_same(padded[:2], (out, softmax_lse))
    for index, (length_q, length_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        if length_q == 0:
            continue
        own = slice(cu_seqlens_q[index], cu_seqlens_q[index + 1])
        alone = call.sequences([index]).queries(0, length_q).keys(length_k)()
        assert_same((out[own].unsqueeze(0), softmax_lse[:, own].unsqueeze(0)), alone)


@FEATURE
@pytest.mark.parametrize("seqlen_q", [1, 130])
@CONFIG
def test_heads(head_dim: int, dtype: str, seqlen_q: int, feature: str) -> None:
    call = draw(head_dim, dtype, feature, seqlen_q=seqlen_q, nheads=12, nheads_k=4)
    out, softmax_lse = call()
    for begin, end in ((0, 1), (1, 2), (3, 4), (1, 3), (0, 3)):
        heads = slice(3 * begin, 3 * end)
        assert_same(call.kv_heads(begin, end)(), (out[:, :, heads], softmax_lse[:, heads]))
    k, v = (t.repeat_interleave(3, dim=2) for t in (call.k, call.v))
    assert_same(replace(call, k=k, v=v)(), (out, softmax_lse))


@FEATURE
@pytest.mark.parametrize("split_size", SPLITS)
@DECODE_CONFIG
def test_few_rows(head_dim: int, dtype: str, split_size: int, feature: str) -> None:
    """The last rows alone, which the kernel for a few rows takes, and among others."""
    call = draw(
        head_dim, dtype, feature, seqlen_q=150, seqlen_k=2049, nheads=4, split_size=split_size
    )
    whole = call()
    for count in (1, 5, 15, 16, 17):
        assert_same(call.queries(150 - count, 150)(), rows(whole, 150 - count, 150))


@FEATURE
@pytest.mark.parametrize("split_size", SPLITS)
@pytest.mark.parametrize("seqlen_q", [17, 64, 129, 1000, 4096])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (128, "bf16"), (112, "fp16")])
def test_schedule(
    head_dim: int,
    dtype: str,
    seqlen_q: int,
    split_size: int,
    feature: str,
) -> None:
    """The same sequence alone and often enough to give each multiprocessor row blocks."""
    if seqlen_q == 4096 and head_dim != 64:
        pytest.skip("the longest with one head dim only")
    call = draw(
        head_dim,
        dtype,
        feature,
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_k=2049 if seqlen_q < 2049 else 4097,
        nheads=4,
        split_size=split_size,
    )
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    row_blocks = -(-seqlen_q // 128) * 2
    often = call.sequences([0] * (2 * sms // row_blocks + 1))
    with device_override("path=parts"):
        assert call.path == "parts"
        expected = call()
    with device_override("path=one_cta"):  # parts may be faster: heads of a group share tiles
        assert often.path == "one-cta"
        results = often()
    for index in (0, results[0].shape[0] // 2, results[0].shape[0] - 1):
        assert_same(sequence(results, index), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_mode_the_batch_changes_bits(dtype: str) -> None:
    """The tests above could not see anything otherwise."""
    call = draw(128, dtype, "full", batch=64, seqlen_q=1, seqlen_k=16_384, nheads=32, nheads_k=8)
    without = replace(call, options={})
    with deterministic_mode(enabled=False):
        alone, together = without.sequences([0])(), without()
    assert not same_bits(alone[0], together[0][:1])
    assert_same(sequence(call(), 0), call.sequences([0])())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen_q", [1, 130])
def test_split_size_changes_bits(seqlen_q: int, dtype: str) -> None:
    call = draw(128, dtype, "full", seqlen_q=seqlen_q, seqlen_k=4096)
    results = [call.split(size)()[0] for size in (64, 512, 2048, 0)]
    for left, right in itertools.combinations(results, 2):
        assert not same_bits(left, right)


@CONFIG
def test_mode_is_what_a_call_without_split_size_takes(head_dim: int, dtype: str) -> None:
    call = draw(head_dim, dtype, "causal", split_size=64)
    without = replace(call, options={"causal": True})
    with deterministic_mode(split_size=64):
        assert_same(without(), call())
    assert_same(without(), call.split(2048)())
