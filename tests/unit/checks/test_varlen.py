"""Arguments of packed sequences, paged or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import bits_equal
from calls import Call, int32, normal, paged_call, varlen_call, varlen_qkvpacked_call
from flash_attn_deterministic.errors import (
    ArgumentError,
    ArgumentTypeError,
    DtypeError,
    FlashAttnError,
)

TABLE = int32(2, 0, 3).reshape(3, 1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        pytest.param(
            {"q": normal(1, 8, 4, 32)}, ArgumentError,
            r"q: expected 3 dimensions \(total tokens, nheads, head_dim\), got shape \(1, 8",
            id="q-rank",
        ),
        pytest.param(
            {"k": normal(4, 16, 2, 32)}, ArgumentError, "k: expected 3 dimensions", id="k-paged",
        ),
        pytest.param(
            {"k": normal(16, 3, 32)}, ArgumentError,
            "k: expected a number of heads that divides the 4 heads of q, got 3", id="heads",
        ),
        pytest.param(
            {"k": normal(16, 2, 64)}, ArgumentError,
            "k: expected a head_dim of 32, that of q, got 64", id="head-dim",
        ),
        pytest.param(
            {"v": normal(15, 2, 32)}, ArgumentError,
            r"v: expected shape \(16, 2, 32\), the shape of k, got \(15, 2, 32\)", id="v-shape",
        ),
        pytest.param({"v": normal(16, 2, 32).half()}, DtypeError, "v: expected", id="v-dtype"),
        pytest.param(
            {"cu_seqlens_q": [0, 3, 8]}, ArgumentTypeError,
            r"cu_seqlens_q: expected a torch\.Tensor, got list", id="cu-list",
        ),
        pytest.param(
            {"cu_seqlens_q": int32(0, 3, 3, 8).long()}, DtypeError,
            r"cu_seqlens_q: expected dtype torch\.int32, got torch\.int64", id="cu-int64",
        ),
        pytest.param(
            {"cu_seqlens_q": int32(0, 3, 3, 8)[None]}, ArgumentError,
            r"cu_seqlens_q: expected shape \(batch \+ 1,\) = \(any,\), got \(1, 4\)", id="cu-rank",
        ),
        pytest.param(
            {"cu_seqlens_q": int32(0)}, ArgumentError,
            "cu_seqlens_q: expected a batch of at least 1", id="cu-empty-batch",
        ),
        pytest.param(
            {"cu_seqlens_q": int32()}, ArgumentError, "cu_seqlens_q: .* at least 1", id="cu-empty",
        ),
        pytest.param(
            {"cu_seqlens_k": int32(0, 5, 16)}, ArgumentError,
            r"cu_seqlens_k: expected shape \(batch \+ 1,\) = \(4,\), got \(3,\)", id="cu-length",
        ),
        pytest.param(
            {"cu_seqlens_k": int32(0, 5, 7, 16).to("meta")}, ArgumentError,
            "cu_seqlens_k: expected a tensor on cpu, the device of q", id="cu-device",
        ),
        pytest.param(
            {"seqused_k": int32(1, 2)}, ArgumentError,
            r"seqused_k: expected shape \(batch,\) = \(3,\), got \(2,\)", id="seqused-length",
        ),
        pytest.param(
            {"seqused_k": torch.ones(3)}, DtypeError, "seqused_k: .*float32", id="seqused-dtype",
        ),
        pytest.param(
            {"leftpad_k": int32(1)}, ArgumentError, "leftpad_k: expected shape",
            id="leftpad-length",
        ),
        pytest.param(
            {"alibi_slopes": torch.ones(2, 4)}, ArgumentError,
            r"alibi_slopes: .* = \(3, 4\), got \(2, 4\)", id="alibi-batch",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments(
    changes: dict[str, Any], error: type[FlashAttnError], message: str
) -> None:
    with pytest.raises(error, match=message):
        varlen_call()(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        pytest.param(
            {"k": normal(16, 2, 32)}, ArgumentError,
            r"k: expected 4 dimensions \(num_blocks, page_block_size, nheads_k, head_dim\)",
            id="k-rank",
        ),
        pytest.param(
            {"k": normal(4, 24, 2, 32), "v": normal(4, 24, 2, 32)}, ArgumentError,
            "k: expected a page_block_size that is a multiple of 16, got 24", id="page-24",
        ),
        pytest.param(
            {"k": normal(4, 0, 2, 32), "v": normal(4, 0, 2, 32)}, ArgumentError,
            "k: expected a page_block_size .* got 0", id="page-0",
        ),
        pytest.param(
            {"block_table": TABLE.long()}, DtypeError,
            r"block_table: expected dtype torch\.int32, got torch\.int64", id="table-dtype",
        ),
        pytest.param(
            {"block_table": TABLE[0]}, ArgumentError,
            r"block_table: expected shape \(batch, max_num_blocks_per_seq\) = \(3, any\), got",
            id="table-rank",
        ),
        pytest.param(
            {"block_table": TABLE[:2]}, ArgumentError, r"= \(3, any\), got \(2, 1\)",
            id="table-batch",
        ),
        pytest.param(
            {"leftpad_k": int32(0, 0, 0)}, ArgumentError,
            "leftpad_k: expected None together with block_table", id="leftpad",
        ),
    ],
)  # fmt: skip
def test_wrong_paged_arguments(
    changes: dict[str, Any], error: type[FlashAttnError], message: str
) -> None:
    with pytest.raises(error, match=message):
        paged_call()(**changes)


def test_packed_arguments_have_the_callers_names() -> None:
    call = varlen_qkvpacked_call()
    with pytest.raises(ArgumentError, match="qkv: expected 4 dimensions"):
        call(qkv=normal(8, 4, 32))
    with pytest.raises(DtypeError, match="qkv: expected dtype"):
        call(qkv=call.arguments["qkv"].float())
    with pytest.raises(DtypeError, match="cu_seqlens: expected dtype"):
        call(cu_seqlens=call.arguments["cu_seqlens"].long())
    with pytest.raises(ArgumentTypeError, match="max_seqlen: expected an int"):
        call(max_seqlen=5.0)


# --- Values of lengths and indices --------------------------------------------------------------

ZEROS = int32(0, 0, 0, 0)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        pytest.param(
            varlen_call, {"cu_seqlens_q": int32(1, 3, 3, 8)},
            "cu_seqlens_q: expected 0 as its first element, got 1", id="q-first",
        ),
        pytest.param(
            varlen_call, {"cu_seqlens_q": int32(0, 3, 2, 8)},
            r"cu_seqlens_q: expected elements that do not decrease, got 2 after 3 \(sequence 1\)",
            id="q-decreases",
        ),
        pytest.param(
            varlen_call, {"cu_seqlens_q": int32(0, 3, 4, 9)},
            "cu_seqlens_q: expected a last element of at most 8, the number of tokens, got 9",
            id="q-beyond",
        ),
        pytest.param(
            varlen_call, {"cu_seqlens_k": int32(-1, 5, 7, 16)},
            "cu_seqlens_k: expected 0 as its first element, got -1", id="k-first",
        ),
        pytest.param(
            varlen_call, {"cu_seqlens_k": int32(0, 7, 5, 16)},
            "cu_seqlens_k: expected elements that do not decrease, got 5 after 7", id="k-decreases",
        ),
        pytest.param(
            varlen_call, {"cu_seqlens_k": int32(0, 5, 7, 17)},
            "cu_seqlens_k: expected a last element of at most 16, the number of tokens, got 17",
            id="k-beyond",
        ),
        pytest.param(
            varlen_call, {"max_seqlen_q": 4},
            "max_seqlen_q: expected at least 5, the length of the longest sequence, got 4",
            id="max-q",
        ),
        pytest.param(
            varlen_call, {"max_seqlen_k": 8},
            "max_seqlen_k: expected at least 9, the length of the longest sequence, got 8",
            id="max-k",
        ),
        pytest.param(
            varlen_qkvpacked_call, {"max_seqlen": 4}, "^max_seqlen: expected at least 5",
            id="max-packed",
        ),
        pytest.param(
            varlen_call, {"seqused_k": int32(4, -1, 9)},
            "seqused_k: expected 0 to 2, the keys that cu_seqlens_k has room for, for sequence 1, "
            "got -1", id="seqused-negative",
        ),
        pytest.param(
            varlen_call, {"seqused_k": int32(6, 2, 9)},
            "seqused_k: expected 0 to 5, .* sequence 0, got 6", id="seqused-beyond",
        ),
        pytest.param(
            varlen_call, {"leftpad_k": int32(0, 0, -2)},
            "leftpad_k: expected 0 to 9, the length, for sequence 2, got -2", id="leftpad-negative",
        ),
        pytest.param(
            varlen_call, {"seqused_k": int32(4, 2, 9), "leftpad_k": int32(5, 0, 0)},
            "leftpad_k: expected 0 to 4, the length, for sequence 0, got 5", id="leftpad-beyond",
        ),
        pytest.param(
            paged_call, {"block_table": int32(2, 4, 3).view(3, 1)},
            "block_table: expected pages 0 to 3, got 4 for sequence 1", id="page-beyond",
        ),
        pytest.param(
            paged_call, {"block_table": int32(-1, 0, 3).view(3, 1)},
            "block_table: expected pages 0 to 3, got -1 for sequence 0", id="page-negative",
        ),
        pytest.param(
            paged_call, {"cu_seqlens_k": int32(0, 5, 7, 24), "max_seqlen_k": 17},
            "block_table: expected at least 2 pages of 16 tokens for the 17 of sequence 2, got 1",
            id="table-too-short",
        ),
        pytest.param(
            paged_call, {"cu_seqlens_k": int32(0, 7, 5, 16)},
            "cu_seqlens_k: expected elements that do not decrease", id="paged-decreases",
        ),
        pytest.param(
            paged_call, {"seqused_k": int32(4, 17, 9)},
            "seqused_k: expected 0 to 16, the tokens of its pages, for sequence 1, got 17",
            id="paged-seqused-beyond",
        ),
    ],
)  # fmt: skip
def test_wrong_values(
    make: Callable[[], Call], changes: dict[str, Any], message: str, compiles: bool
) -> None:
    torch._dynamo.reset()
    call = make()
    function = call.function
    if compiles:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    with pytest.raises(ArgumentError, match=message):
        function(**{**call.arguments, **changes})


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
