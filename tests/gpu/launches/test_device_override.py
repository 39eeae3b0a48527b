"""Schedules of other GPUs, run on the one at hand, give the same bits.

FLASH_ATTENTION_TEST_DEVICE replaces what the host knows of the device: the number of SMs, and the
shared memory that a block may ask for. It is read in each call.
"""

from __future__ import annotations

import pytest
import torch
from flash_attn_deterministic import explain, flash_attn_func
from flash_attn_deterministic.verify.contract import layouts
from flash_attn_deterministic.verify.contract.call import Attention, draw
from flash_attn_deterministic.verify.contract.device_override import device_override
from flash_attn_deterministic.verify.features import options_of

from tests.gpu.attention import (
    BIT_CONFIGS,
    assert_same,
    make_qkv,
    named,
    pairwise,
    skip_unless_built,
)
from tests.gpu.gradients import assert_same_results, draw_call

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
CONFIG = named([*BIT_CONFIGS, (32, "bf16"), (96, "fp16"), (192, "bf16")])
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


@pairwise(
    config=CONFIG,
    feature=FEATURES,
    device=DEVICES,
    lengths=((700, 1100), (1500, 1500), (20, 1104), (5, 1104), (1, 1104)),
)
def test_forward(
    config: tuple[int, str], feature: str, device: str, lengths: tuple[int, int]
) -> None:
    """Dense, a sequence alone, packed, and over pages."""
    (head_dim, dtype), (seqlen_q, seqlen_k) = config, lengths
    skip_unless_built(head_dim, dtype)
    options = {**options_of(feature), "split_size": 256}
    call = draw(
        Attention.installed(), (3, seqlen_q, 8, head_dim), seqlen_k, 2,
        dtype=dtype, device="cuda", seed=0, options=options,
    )  # fmt: skip

    def run() -> tuple[torch.Tensor, ...]:
        keys = [seqlen_k, 511, 64]
        parts = layouts.packed(call, [seqlen_q, 1, max(0, seqlen_q - 2)], keys).parts
        parts += layouts.cached(call, keys, page_size=16)
        found = [call(), call.sequences([1])(), *(own for _, own in parts)]
        return tuple(tensor for own in found for tensor in own.values())

    expected = run()
    with device_override(device):
        results = run()
    assert_same(results, expected, tuple(f"result {i}" for i in range(len(expected))))


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
        expected = call.gradients()
        with device_override(device):
            if f"shared={SMALL_SHARED}" in device and not _fits_small_shared(head_dim):
                with pytest.raises(RuntimeError, match="shared memory"):
                    call.gradients()
            else:
                assert_same_results(call.gradients(), expected)


def _fits_small_shared(head_dim: int) -> bool:
    """Returns whether the README promises a backward with 99 KB of shared memory to a block."""
    return head_dim <= 32 or 64 < head_dim <= 96
