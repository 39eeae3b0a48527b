"""Arguments of packed sequences, paged or not."""

from __future__ import annotations

import math

import pytest
import torch
from bits import bits_equal
from calls import int32, normal, paged_call, varlen_call

ZEROS = int32(0, 0, 0, 0)


def test_rows_of_no_sequence() -> None:
    call = varlen_call()
    q = torch.cat([call.arguments["q"], normal(2, 4, 32)]).requires_grad_()
    k, v = (torch.cat([call.arguments[n], normal(3, 2, 32)]).requires_grad_() for n in "kv")
    out, softmax_lse, _ = call(q=q, k=k, v=v, return_attn_probs=True)
    expected, expected_lse, _ = call(return_attn_probs=True)
    assert bits_equal(out[:8], expected)
    assert bits_equal(out[8:], torch.zeros_like(q[8:]))
    assert bits_equal(softmax_lse[:, :8], expected_lse)
    assert bits_equal(softmax_lse[:, 8:], torch.full((4, 2), math.inf))
    out.sum().backward()
    for tensor, total in ((q, 8), (k, 16), (v, 16)):
        assert tensor.grad is not None
        assert bits_equal(tensor.grad[total:], torch.zeros_like(tensor[total:]))


@pytest.mark.parametrize("longer", [0, 1, 1000])
def test_max_seqlen_may_be_longer(longer: int) -> None:
    lengths = {"max_seqlen_q": 5 + longer, "max_seqlen_k": 9 + longer}
    assert bits_equal(varlen_call()(**lengths), varlen_call()())
    # max_seqlen_k limits the keys in use only.
    cut = {"seqused_k": int32(4, 2, 7), "leftpad_k": int32(0, 0, 2)}
    assert bits_equal(varlen_call()(**cut, max_seqlen_k=5 + longer), varlen_call()(**cut))


def test_seqused_replaces_the_lengths_of_pages() -> None:
    used = {"seqused_k": int32(5, 2, 9)}
    assert bits_equal(paged_call()(**used, cu_seqlens_k=ZEROS), paged_call()())
