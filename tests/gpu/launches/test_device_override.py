"""Schedules of other GPUs, run on the one at hand, give the same bits.

FLASH_ATTENTION_TEST_DEVICE replaces what the host knows of the device: the number of SMs, and the
shared memory that a block may ask for. It is read in each call.
"""

from __future__ import annotations

import pytest
import torch
from flash_attn_deterministic import (
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.gpu.attention import BIT_CONFIGS, DTYPES, assert_same, make_qkv, pairwise
from tests.gpu.gradients import assert_same_gradients, draw_call, int32

pytestmark = pytest.mark.gpu

SMALL_SHARED = 101_376  # 99 KB, of compute capability 8.6 and 8.9
DEVICES = {
    "1-sm": "sms=1",
    "14-sms": "sms=14",
    "108-sms": "sms=108",
    "148-sms": "sms=148",
    "99-kb": f"shared={SMALL_SHARED}",
    "1-sm-99-kb": f"sms=1,shared={SMALL_SHARED}",
    "84-sms-99-kb": f"sms=84,shared={SMALL_SHARED}",
}
DEVICE = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
CONFIG = {f"d{d}-{t}": (d, t) for d, t in (*BIT_CONFIGS, (32, "bf16"), (96, "fp16"), (192, "bf16"))}
FEATURES = ("full", "causal", "everything")


@pytest.mark.parametrize(("sms", "path"), [(1, "one-cta"), (10_000, "parts")])
def test_the_number_of_sms_is_overridden(sms: int, path: str) -> None:
    q, k, v = make_qkv((1, 4000, 8, 64))
    with device_override(f"sms={sms}"):
        assert explain(flash_attn_func, q, k, v, split_size=512).path == path


def test_shared_memory_is_overridden() -> None:
    q, k, v = make_qkv((4, 1000, 8, 128))
    with device_override("sms=1"):
        assert explain(flash_attn_func, q, k, v, split_size=512).path == "one-cta"
    with device_override(f"sms=1,shared={SMALL_SHARED}"):
        assert explain(flash_attn_func, q, k, v, split_size=512).path == "parts"


def test_explain_tells_whether_the_backward_fits() -> None:
    q, k, v = make_qkv((1, 300, 2, 128))
    assert explain(flash_attn_func, q, k, v, deterministic=True).backward is not None
    with device_override(f"shared={SMALL_SHARED}"):
        assert explain(flash_attn_func, q, k, v, deterministic=True).backward is None


@pairwise(config=CONFIG, feature=FEATURES, device=DEVICES)
def test_forward(config: tuple[int, str], feature: str, device: str) -> None:
    head_dim, dtype = config
    call = draw_call(head_dim, dtype, feature, seqlen_q=700, seqlen_k=1100, nheads=8)

    def run(batch: slice) -> tuple[torch.Tensor, torch.Tensor]:
        some = call.sequences(batch)
        out, softmax_lse, _ = flash_attn_func(
            some.q,
            some.k,
            some.v,
            alibi_slopes=some.slopes,
            split_size=256,
            return_attn_probs=True,
            **call.options,
        )
        return out, softmax_lse

    for batch in (slice(0, 2), slice(1, 2)):
        expected = run(batch)
        with device_override(device):
            assert_same(run(batch), expected)


@pairwise(config=CONFIG, seqlen_q=(1, 5, 20), device=DEVICES)
def test_decode(config: tuple[int, str], seqlen_q: int, device: str) -> None:
    head_dim, dtype = config
    call = draw_call(head_dim, dtype, "causal", batch=3, seqlen_q=seqlen_q, seqlen_k=1104, nheads=8)
    pages = torch.randperm(3 * 69, generator=torch.Generator().manual_seed(0))
    table = pages.view(3, 69).to("cuda", torch.int32)
    lengths = int32([1104, 511, 64])

    def paged(tensor: torch.Tensor) -> torch.Tensor:
        blocks = torch.empty(3 * 69, 16, *tensor.shape[2:], device="cuda", dtype=DTYPES[dtype])
        blocks[table.flatten().long()] = tensor.reshape(-1, 16, *tensor.shape[2:])
        return blocks

    k_pages, v_pages = paged(call.k), paged(call.v)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        out, softmax_lse = flash_attn_with_kvcache(
            call.q,
            k_pages,
            v_pages,
            cache_seqlens=lengths,
            block_table=table,
            causal=True,
            split_size=256,
            return_softmax_lse=True,
        )
        return out, softmax_lse

    expected = run()
    with device_override(device):
        assert_same(run(), expected)


@DEVICE
@pytest.mark.parametrize("head_dim", [64, 128], ids=lambda d: f"d{d}")
def test_packed(head_dim: int, device: str) -> None:
    call = draw_call(head_dim, "bf16", batch=1, seqlen_q=1500, nheads=8)
    q, k, v = (t[0] for t in (call.q, call.k, call.v))
    starts = int32([0, 1, 2, 700, 700, 1500])

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        out, softmax_lse, _ = flash_attn_varlen_func(
            q, k, v, starts, starts, 800, 800, causal=True, split_size=256, return_attn_probs=True
        )
        return out, softmax_lse

    expected = run()
    with device_override(device):
        assert_same(run(), expected)


@pairwise(config=CONFIG, feature=FEATURES, device=DEVICES)
def test_backward(config: tuple[int, str], feature: str, device: str) -> None:
    """Groups of heads, and one head of its own keys to each of many sequences."""
    head_dim, dtype = config
    shapes = (
        {"batch": 2, "seqlen_q": 500, "nheads": 4, "nheads_k": 2},
        {"batch": 40, "seqlen_q": 300, "nheads": 1, "nheads_k": 1},
    )
    for shape in shapes:
        call = draw_call(head_dim, dtype, feature, **shape)
        expected = call()
        with device_override(device):
            if f"shared={SMALL_SHARED}" in device and not _fits_small_shared(head_dim):
                with pytest.raises(RuntimeError, match="shared memory"):
                    call()
            else:
                assert_same_gradients(call(), expected)


def _fits_small_shared(head_dim: int) -> bool:
    """Returns whether the README promises a backward with 99 KB of shared memory to a block."""
    return head_dim <= 32 or 64 < head_dim <= 96
