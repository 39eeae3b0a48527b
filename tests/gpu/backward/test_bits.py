"""What the bits of dq, dk and dv must not depend on, besides the rows of `verify`'s contract."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from flash_attn_deterministic.verify.contract import layouts
from flash_attn_deterministic.verify.contract.call import part
from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.gpu.attention import BIT_CONFIGS, bits, each_config, named, pairwise, same_bits
from tests.gpu.gradients import FEATURES, GRADIENTS, assert_same_results, draw_call, results

pytestmark = pytest.mark.gpu

CONFIGS = (*BIT_CONFIGS, (32, "bf16"), (40, "fp16"), (96, "bf16"), (192, "bf16"))
CONFIG = each_config(CONFIGS)
NAMED = named(CONFIGS)
# Queries and keys around the tiles of 64 and 128, with nothing, with one token, with more queries
# than keys and fewer.
RAGGED = (
    (1, 1, 0, 63, 64, 65, 0, 127, 128, 129, 70, 200, 400, 257, 1, 129, 300, 1, 640),
    (1, 129, 70, 64, 63, 65, 0, 128, 127, 129, 0, 400, 200, 255, 1, 1, 300, 900, 129),
)


@pairwise(
    config=NAMED | named([(8, "bf16"), (72, "fp16"), (136, "bf16"), (200, "fp16"), (256, "fp16")]),
    feature=FEATURES,
    family=("sm80", "sm90"),
    spare=(0, 77),
)
def test_packed_is_dense(config: tuple[int, str], feature: str, family: str, spare: int) -> None:
    call = draw_call(*config, feature, batch=len(RAGGED[0]), seqlen_q=640, seqlen_k=900)
    with device_override(f"family={family}"):
        parts = layouts.packed(call, *RAGGED, spare=spare, gradients=True).parts
    for one, own in parts:
        assert_same_results(own, one.gradients())


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 70), (70, 0), (0, 0)])
@CONFIG
def test_nothing_to_see(head_dim: int, dtype: str, seqlen_q: int, seqlen_k: int) -> None:
    call = draw_call(head_dim, dtype, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    for gradient in call.gradients().values():
        assert not bits(gradient).count_nonzero()


@pytest.mark.parametrize("seqlen_k", [1, 64, 127, 128, 129, 200])
@CONFIG
def test_rows_without_a_key(head_dim: int, dtype: str, seqlen_k: int) -> None:
    call = draw_call(head_dim, dtype, "causal", seqlen_k=seqlen_k)
    found = call.gradients()
    empty = 333 - seqlen_k
    assert not found["dq"][:, :empty].count_nonzero()
    # The same keys seen by the rows that see any; the tiles of rows begin elsewhere.
    square = call.queries(empty, 333).gradients()
    found["dq"] = found["dq"][:, empty:]
    for name in GRADIENTS:
        torch.testing.assert_close(found[name], square[name], rtol=0.05, atol=0.05)


@pairwise(
    config=named([(64, "bf16"), (80, "fp16"), (128, "bf16"), (192, "fp16"), (256, "bf16")]),
    feature=FEATURES,
    heads=((8, 4), (12, 4), (8, 2), (16, 2), (32, 2)),
)
def test_kv_groups_alone(config: tuple[int, str], feature: str, heads: tuple[int, int]) -> None:
    nheads, nheads_k = heads
    call = draw_call(*config, feature, nheads=nheads, nheads_k=nheads_k)
    together = call.gradients()
    group = nheads // nheads_k
    for begin, end in {(0, 1), (nheads_k - 1, nheads_k), (0, nheads_k - 1)}:
        expected = part(together, h=slice(begin * group, end * group), g=slice(begin, end))
        assert_same_results(call.kv_heads(begin, end).gradients(), expected)


@pairwise(config=NAMED, feature=FEATURES)
def test_dq_of_gqa_is_that_of_mha_on_repeated_kv(config: tuple[int, str], feature: str) -> None:
    call = draw_call(*config, feature, nheads=8, nheads_k=1)
    k, v = (t.repeat_interleave(8, dim=2) for t in (call.k, call.v))
    assert same_bits(call.gradients()["dq"], replace(call, k=k, v=v).gradients()["dq"])


def spread(tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """A copy whose neighbours along some dimensions lie twice as far apart, NaN between them."""
    sizes = [size * 2 if dim in dims else size for dim, size in enumerate(tensor.shape)]
    view = torch.full(sizes, math.nan, dtype=tensor.dtype, device=tensor.device)
    for dim in dims:
        pairs = view.unflatten(dim, (-1, 2))  # type: ignore[no-untyped-call, unused-ignore]
        view = pairs.select(dim + 1, 0)
    return view.copy_(tensor)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads-first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "gaps": lambda t: spread(t, (1, 2)),
    "last-dim-strided": lambda t: spread(t, (3,)),
    "odd-rows": lambda t: torch.nn.functional.pad(t, (0, 3))[..., :-3],
    "odd-start": lambda t: torch.nn.functional.pad(t, (1, 7))[..., 1:-7],
    "odd-address": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "one-sequence": lambda t: t[:1].expand(t.shape),
    "one-row": lambda t: t[:, :1].expand(t.shape),  # as the gradient of a mean over rows
    "one-element": lambda t: t.flatten()[0].expand(t.shape),  # as that of a sum
}


@pairwise(view=VIEWS, config=NAMED, causal={"full": False, "causal": True})
def test_strides(
    view: Callable[[torch.Tensor], torch.Tensor], config: tuple[int, str], causal: bool
) -> None:
    """Views as inputs, and as dout."""
    call = draw_call(*config, "causal" if causal else "full", nheads_k=4)
    for names in (("q", "k", "v"), ("dout",)):
        views: dict[str, Any] = {name: view(getattr(call, name)) for name in names}
        copies: dict[str, Any] = {
            n: t.clone(memory_format=torch.contiguous_format) for n, t in views.items()
        }
        assert_same_results(results(replace(call, **views)), results(replace(call, **copies)))


@pytest.mark.parametrize("nheads_k", [1, 2], ids=["gqa", "mha"])
@pytest.mark.parametrize("head_dim", [64, 128], ids=["d64", "d128"])
def test_atomics_are_seen(head_dim: int, nheads_k: int) -> None:
    """The tests above could not see anything otherwise: atomics change dq, and nothing else."""
    call = draw_call(
        head_dim, "bf16", batch=2, seqlen_q=8192, nheads=2, nheads_k=nheads_k
    ).with_options(deterministic="never")
    first = call.gradients()
    seen = False
    for _ in range(50):
        again = call.gradients()
        assert same_bits(again["dk"], first["dk"])
        assert same_bits(again["dv"], first["dv"])
        seen = seen or not same_bits(again["dq"], first["dq"])
    assert seen
    in_turns = call.with_options(deterministic=True).gradients()
    assert same_bits(in_turns["dk"], first["dk"])
    assert same_bits(in_turns["dv"], first["dv"])
    torch.testing.assert_close(in_turns["dq"], first["dq"], rtol=0.02, atol=1e-4)
