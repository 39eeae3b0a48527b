"""Arguments of packed sequences, paged or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import int32, normal, paged_call, varlen_call, varlen_qkvpacked_call
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
