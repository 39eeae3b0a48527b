from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from flash_attn_deterministic import as_flash_attn
from flash_attn_deterministic.errors import ArgumentError
from flash_attn_deterministic.integrations.flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

MASK = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]])


def states(*shape: int) -> torch.Tensor:
    numbers = torch.arange(1.0, 1 + torch.Size(shape).numel())
    return numbers.view(shape).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=["bool", "int"])
@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 4, 2, 3)], ids=["hidden", "heads"])
def test_unpad_and_pad_again(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    hidden = states(*shape)
    packed, indices, cu_seqlens, longest, seqused = unpad_input(hidden, MASK.to(dtype))
    assert indices.tolist() == [0, 1, 9, 11]
    assert cu_seqlens.tolist() == [0, 2, 2, 4]
    assert cu_seqlens.dtype == seqused.dtype == torch.int32
    assert (longest, seqused.tolist()) == (2, [2, 0, 2])
    assert isinstance(longest, int)
    mask = MASK.bool()
    assert torch.equal(packed, hidden[mask])
    padded = pad_input(packed, indices, 3, 4)
    kept = mask.view(3, 4, *[1] * (len(shape) - 2))
    assert torch.equal(padded, hidden * kept)
    torch.autograd.backward(padded.sum())
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, kept.expand(shape).float())


def test_unused_tokens_are_kept_and_not_counted() -> None:
    unused = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    _, indices, cu_seqlens, longest, seqused = unpad_input(states(3, 4, 1), MASK, unused)
    assert indices.tolist() == [0, 1, 2, 4, 9, 11]
    assert (cu_seqlens.tolist(), longest, seqused.tolist()) == ([0, 3, 4, 6], 3, [2, 0, 2])


def test_several_sequences_in_a_row() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [0] * 6])
    hidden = states(3, 6, 2)
    packed, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(hidden, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 11]
    assert (cu_seqlens.dtype, longest) == (torch.int32, 6)
    assert indices.tolist() == [*range(5), *range(6, 12)]
    assert torch.equal(packed, hidden.flatten(0, 1)[indices])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_rows_are_selected_and_scattered(dtype: torch.dtype) -> None:
    rows, indices = states(4, 2, 3), torch.tensor([3, 1], dtype=dtype)
    taken, whole = index_first_axis_residual(rows, indices)
    assert whole is rows
    assert torch.equal(taken, index_first_axis(rows, indices))
    put = index_put_first_axis(taken, indices, 5)
    assert torch.equal(put[indices], taken)
    assert put.shape == (5, 2, 3)
    assert not put[[0, 2, 4]].any()


def test_a_mask_of_another_batch_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"attention_mask: expected shape .* \(2, 4\), .* \(3, 4\)"
    ):
        unpad_input(states(2, 4, 1), MASK)
    with pytest.raises(ArgumentError, match="unused_mask"):
        unpad_input(states(3, 4, 1), MASK, MASK[:2])


def test_einops_functions_that_callers_import_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is verl's; einops, which may not be installed, is stood in for."""
    line = "from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input"
    einops = ModuleType("einops")
    einops.__dict__.update(rearrange=states, repeat=index_first_axis)
    monkeypatch.setitem(sys.modules, "einops", einops)
    found: dict[str, object] = {}
    with as_flash_attn():
        exec(line, found)
        assert found["rearrange"] is states
        assert found["unpad_input"] is unpad_input
        monkeypatch.setitem(sys.modules, "einops", None)
        with pytest.raises(ImportError, match=r"rearrange: expected einops, .* not installed"):
            exec(line)
        with pytest.raises(ImportError, match="cannot import name 'reduce'"):
            exec("from flash_attn.bert_padding import reduce")
