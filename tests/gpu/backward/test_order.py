"""The order of additions itself, which the other tests see only by its bits staying the same.

Two large terms that cancel, and ones: a one is lost if it comes before either of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from flash_attn_deterministic import flash_attn_func
from flash_attn_deterministic.tree import CHUNK_ROWS

from tests.gpu.attention import same_bits, skip_unless_built

pytestmark = pytest.mark.gpu

TILES = Path(__file__).resolve().parents[3] / "cpp" / "instances.json"
HEAD_DIM = pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256], ids=lambda d: f"d{d}")
LARGE = 2.0**30
NUM_TERMS = 8
SEQLEN = 1024
KEYS_PER_TERM = SEQLEN // NUM_TERMS


def make_terms(columns: int) -> torch.Tensor:
    """Returns terms to be added up: (NUM_TERMS, columns), fp32.

    In order, the sum of a column is how many ones come after its two large terms, which columns
    have in different places.
    """
    terms = torch.ones(NUM_TERMS, columns)
    for column in range(columns):
        last = 1 + column % (NUM_TERMS - 1)
        terms[last, column] = -LARGE
        terms[column // (NUM_TERMS - 1) % last, column] = LARGE
    return terms


def first_to_last(terms: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the rows in fp32, one after another."""
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


def alternating(seqlen: int) -> torch.Tensor:
    """Returns +1, -1, +1...: (seqlen, 1), so that an even number of them has no mean."""
    return torch.tensor([1.0, -1.0]).repeat(seqlen // 2)[:, None]


def test_terms_tell_orders_apart() -> None:
    terms = make_terms(32)
    for first in range(1, NUM_TERMS - 1):  # which of the first two comes first cannot matter
        order = list(range(NUM_TERMS))
        order[first], order[first + 1] = order[first + 1], order[first]
        assert not torch.equal(first_to_last(terms), first_to_last(terms[order]))


@HEAD_DIM
@pytest.mark.parametrize("heads", [2, None], ids=["few-heads", "a-head-for-each-multiprocessor"])
@pytest.mark.parametrize(("window", "visible"), [
    pytest.param((-1, -1), {0: (0, 1024), 700: (0, 1024)}, id="full"),
    pytest.param((-1, 0), {255: (0, 256), 511: (0, 512), 1023: (0, 1024)}, id="causal"),
    pytest.param((511, 0), {511: (0, 512), 1023: (512, 1024)}, id="window"),
])  # fmt: skip
def test_dq_takes_key_blocks_first_to_last(
    window: tuple[int, int], visible: dict[int, tuple[int, int]], heads: int | None, head_dim: int
) -> None:
    """Without queries all keys that a row sees weigh the same: dq is a sum of terms."""
    skip_unless_built(head_dim, "bf16", "bwd")
    heads = heads or torch.cuda.get_device_properties("cuda").multi_processor_count
    block_n = json.loads(TILES.read_text())["bwd_tiles"][str(head_dim)]["block_n"]
    terms = make_terms(head_dim)
    sign = alternating(SEQLEN)
    keys = sign * terms.repeat_interleave(KEYS_PER_TERM, dim=0)
    values = torch.zeros(SEQLEN, head_dim)
    values[:, :1] = sign
    dout = torch.zeros(SEQLEN, head_dim)
    dout[:, 0] = 1.0

    def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to("cuda", torch.bfloat16)
        return tensor[None, :, None].expand(1, SEQLEN, heads, head_dim).contiguous()

    q = torch.zeros(1, SEQLEN, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    out = flash_attn_func(
        q.requires_grad_(), on_gpu(keys), on_gpu(values), softmax_scale=1.0, window_size=window
    )
    (dq,) = torch.autograd.grad(out, q, on_gpu(dout))
    for row, (begin, end) in visible.items():
        seen = terms.repeat_interleave(KEYS_PER_TERM // block_n, dim=0)
        seen = seen[begin // block_n : end // block_n] * (block_n / (end - begin))
        expected = first_to_last(seen).to(torch.bfloat16).cuda()
        assert same_bits(dq[0, row], expected.expand(heads, head_dim))


@HEAD_DIM
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_dk_and_dv_take_query_heads_first_to_last(causal: bool, head_dim: int) -> None:
    """Without keys all of them weigh the same; each query head of the group adds one term."""
    skip_unless_built(head_dim, "bf16", "bwd")
    seqlen_q, seqlen_k = 64, 256
    terms = make_terms(head_dim)
    terms[:, 0] = 0.0  # the column by which keys differ
    q = terms.expand(seqlen_q, NUM_TERMS, head_dim).clone()
    dout = q.clone()
    dout[:, :, 0] = 1.0
    values = torch.zeros(seqlen_k, 1, head_dim)
    values[:, 0, :1] = alternating(seqlen_k)
    if causal:  # only the last query sees all keys
        q[:-1], dout[:-1] = 0.0, 0.0
    inputs = (q, torch.zeros_like(values), values)
    q, k, v = (t[None].to("cuda", torch.bfloat16).requires_grad_() for t in inputs)
    out = flash_attn_func(q, k, v, softmax_scale=1.0, causal=causal)
    _, dk, dv = torch.autograd.grad(out, (q, k, v), dout[None].to("cuda", torch.bfloat16))
    rows = 1 if causal else seqlen_q
    total = first_to_last(terms * (rows / seqlen_k)).to(torch.bfloat16)
    assert same_bits(dv[0, :, 0, 1:], total[1:].cuda().expand(seqlen_k, head_dim - 1))
    expected = alternating(seqlen_k).to(torch.bfloat16) * total
    # A zero's sign is that of the last product, not of the sum.
    assert same_bits(dk[0, :, 0, 1:] + 0.0, expected[:, 1:].cuda() + 0.0)


@HEAD_DIM
def test_dk_and_dv_add_chunks_in_pairs(head_dim: int) -> None:
    """Without keys all of them weigh the same; the rows of a chunk add one term."""
    skip_unless_built(head_dim, "bf16", "bwd")
    seqlen_k = 128
    terms = make_terms(head_dim)
    dout = terms.repeat_interleave(CHUNK_ROWS, dim=0)[:, None]
    zeros = torch.zeros(seqlen_k, 1, head_dim)
    inputs = (torch.zeros_like(dout), zeros, zeros)
    q, k, v = (t[None].to("cuda", torch.bfloat16).requires_grad_() for t in inputs)
    out = flash_attn_func(q, k, v, softmax_scale=1.0)
    (dv,) = torch.autograd.grad(out, v, dout[None].to("cuda", torch.bfloat16))
    sums = list(terms * (CHUNK_ROWS / seqlen_k))
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    assert same_bits(dv[0, :, 0], sums[0].to(torch.bfloat16).cuda().expand(seqlen_k, head_dim))
