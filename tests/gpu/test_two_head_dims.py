"""v with a head dim of its own: the bits of a call with padded tensors, on every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_attn_deterministic import explain
from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.gpu.attention import (
    DTYPES,
    SCHEDULES,
    assert_same,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    make_qkv,
    pairwise,
    skip_unless_built,
)

pytestmark = pytest.mark.gpu

NAMES = ("out", "softmax_lse", "dq", "dk", "dv")
PAIRS = ((192, 128), (184, 100), (192, 64), (64, 32), (128, 72), (256, 64), (32, 96), (120, 128))
CONFIGS = pairwise(
    head_dims=PAIRS,
    dtype=("bf16", "fp16"),
    options={
        "full": {},
        "causal": {"causal": True},
        "window": {"window_size": (127, 0), "split_size": 128},
        "softcap": {"softcap": 5.0, "causal": True},
        "alibi": {"alibi_slopes": True},
        "dropout": {"dropout_p": 0.2},
        "sink": {"learnable_sink": True, "causal": True},
        "one-split": {"causal": True, "split_size": 0},
    },
    lengths=((1, 700), (16, 513), (300, 300), (200, 65)),
    heads=((8, 2), (3, 3)),
)
Tensors = tuple[torch.Tensor, ...]


def draw(head_dims: tuple[int, int], dtype: str, *shape: Any) -> Tensors:
    """q, k and v of (batch, seqlen_q, seqlen_k, heads)."""
    batch, seqlen_q, seqlen_k, (heads, heads_k) = shape
    for direction in ("fwd", "bwd"):
        skip_unless_built(max(head_dims), dtype, direction)
    q, k, v = make_qkv(
        (batch, seqlen_q, heads, max(head_dims)), seqlen_k, heads_k, dtype=DTYPES[dtype]
    )
    return q[..., : head_dims[0]], k[..., : head_dims[0]], v[..., : head_dims[1]]


def padded(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, head_dim - tensor.shape[-1])).contiguous()


def run(function: Any, inputs: Tensors, dout: torch.Tensor, **options: Any) -> Tensors:
    leaves = [x.detach().requires_grad_() for x in inputs]
    torch.manual_seed(3)
    out, softmax_lse, _ = function(*leaves, return_attn_probs=True, **options)
    return out, softmax_lse, *torch.autograd.grad(out, leaves, padded(dout, out.shape[-1]))


def check(function: Any, inputs: Tensors, what: str, **options: Any) -> None:
    """Compares each schedule with the padded call, which the sm80 family runs."""
    head_dim, head_dim_v = inputs[0].shape[-1], inputs[2].shape[-1]
    options.setdefault("softmax_scale", head_dim**-0.5)
    generator = torch.Generator("cuda").manual_seed(9)
    size = *inputs[0].shape[:-1], head_dim_v
    dout = torch.randn(size, generator=generator, device="cuda", dtype=inputs[0].dtype)
    wide = tuple(padded(x, max(head_dim, head_dim_v)) for x in inputs)
    with device_override("family=sm80"):
        expected = run(function, wide, dout, **options)
    columns = (head_dim_v, None, head_dim, head_dim, head_dim_v)
    expected = tuple(x[..., :n] for x, n in zip(expected, columns, strict=True))
    for schedule in SCHEDULES:
        with device_override(schedule):
            results = run(function, inputs, dout, **options)
        assert_same(results, expected, tuple(f"{what}, {schedule}, {name}" for name in NAMES))


@CONFIGS
def test_every_schedule_has_the_bits_of_padded_tensors(
    head_dims: tuple[int, int],
    dtype: str,
    options: dict[str, Any],
    lengths: tuple[int, int],
    heads: tuple[int, int],
) -> None:
    options = dict(options)
    for name in ("alibi_slopes", "learnable_sink"):
        if name in options:
            options[name] = torch.linspace(-1.0, 2.0, heads[0], device="cuda")
    inputs = draw(head_dims, dtype, 2, *lengths, heads)
    check(flash_attn_func, inputs, "dense", **options)


@pytest.mark.parametrize("head_dims", PAIRS)
def test_packed_sequences(head_dims: tuple[int, int]) -> None:
    inputs = tuple(x[0] for x in draw(head_dims, "bf16", 1, 700, 900, (4, 2)))
    starts = [
        torch.tensor(x, dtype=torch.int32, device="cuda")
        for x in ((0, 1, 130, 130, 650), (0, 300, 301, 500, 880))
    ]
    check(
        lambda *leaves, **given: flash_attn_varlen_func(*leaves, *starts, 520, 380, **given),
        inputs,
        "packed",
        causal=True,
        split_size=128,
    )


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "pages"])
@pytest.mark.parametrize("seqlen_q", [1, 5, 200])
@pytest.mark.parametrize("head_dims", PAIRS)
def test_cache_that_keys_and_values_are_appended_to(
    head_dims: tuple[int, int], seqlen_q: int, paged: bool
) -> None:
    q, *caches = draw(head_dims, "bf16", 2, seqlen_q, 1024, (8, 2))
    new = [x[:, :seqlen_q].flip(1).contiguous() for x in caches]
    table = None
    if paged:
        caches = [x.reshape(32, 64, *x.shape[2:]) for x in caches]
        order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
        table = order.reshape(2, 16).to("cuda", torch.int32)
    widest = max(head_dims)

    def attend(wide: bool) -> Tensors:
        own = [padded(x, widest) if wide else x.clone() for x in (q, *caches, *new)]
        lengths = torch.tensor([700, 129], dtype=torch.int32, device="cuda")
        options = {"softmax_scale": head_dims[0] ** -0.5, "split_size": 256}
        out, softmax_lse = flash_attn_with_kvcache(
            *own,
            cache_seqlens=lengths,
            block_table=table,
            causal=True,
            return_softmax_lse=True,
            **options,
        )
        columns = (head_dims[1], None, *head_dims)
        found = (out, softmax_lse, own[1], own[2])
        return tuple(x[..., :n] for x, n in zip(found, columns, strict=True))

    with device_override("family=sm80"):
        expected = attend(wide=True)
    for schedule in SCHEDULES:
        with device_override(schedule):
            results = attend(wide=False)
        names = ("out", "softmax_lse", "k_cache", "v_cache")
        assert_same(results, expected, tuple(f"{schedule}, {name}" for name in names))


def test_hopper_pads_nothing_that_its_kernels_cover() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no compute capability 9.0")
    inputs = [x.requires_grad_() for x in draw((192, 128), "bf16", 1, 4096, 4096, (8, 8))]
    plan = explain(flash_attn_func, *inputs, causal=True)
    assert (plan.family, plan.head_dim_v) == ("sm90", 128)
    assert plan.backward is not None
    assert (plan.backward.family, plan.backward.head_dim_v) == ("sm90", 128)
    plan = explain(flash_attn_func, *inputs, dropout_p=0.1)
    assert (plan.family, plan.head_dim_v) == ("sm80", 192)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    out = flash_attn_func(*inputs, causal=True)
    used = torch.cuda.max_memory_allocated() - start
    assert used < out.nbytes + 4 * 8 * 4096 + (1 << 20), used
