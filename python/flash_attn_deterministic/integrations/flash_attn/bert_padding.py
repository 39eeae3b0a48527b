"""The names of the module flash_attn.bert_padding 2.8.3, in plain torch.

Padded batches become packed sequences, and back. Rows are only copied, so they keep their bits.
Gradients pass through. `rearrange` and `repeat` are einops', which callers import from here too;
einops is imported when one of them is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ...errors import ArgumentError
from ..low_level import starts_of


def __getattr__(name: str) -> Any:
    if name not in ("rearrange", "repeat"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        einops = importlib.import_module("einops")
    except ImportError as error:
        raise ImportError(
            f"flash_attn.bert_padding.{name}: expected einops, which is not installed; "
            "run `python -m pip install einops`"
        ) from error
    return getattr(einops, name)


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Takes rows (total, ...) of input."""
    return input.index_select(0, indices)


def index_put_first_axis(
    values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int
) -> torch.Tensor:
    """Puts rows into zeros of first_axis_dim rows; indices have no repetition."""
    output = values.new_zeros(first_axis_dim, *values.shape[1:])
    return output.index_put((indices,), values)


def index_first_axis_residual(
    input: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes rows, and returns the input as well."""
    return input.index_select(0, indices), input


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Packs the tokens of a padded batch. The host waits for the GPU to count them.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or int: 1 for tokens, 0 for padding.
        unused_mask: the same: 1 for tokens that are packed too, but not counted in seqused.

    Returns:
        The tokens (total, ...); their indices (total,) among batch * seqlen, int64; cu_seqlens
        (batch + 1,), int32; the length of the longest sequence; and seqused (batch,), int32.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    kept = attention_mask
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        kept = attention_mask + unused_mask
    seqused = attention_mask.sum(-1, dtype=torch.int32)
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, starts_of(lengths), int(lengths.max()), seqused


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Packs a padded batch whose rows hold several sequences each, one after another.

    A row of attention_mask_in_length has the lengths of its sequences, then zeros: [2, 3, 0, 0, 0,
    0] is a sequence of 2 tokens, one of 3, and a token of padding. Returns as `unpad_input`,
    without seqused.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    batch, seqlen = attention_mask_in_length.shape
    used = attention_mask_in_length.sum(-1, keepdim=True)
    tokens = torch.arange(seqlen, device=used.device).expand(batch, seqlen) < used
    indices = tokens.flatten().nonzero().flatten()
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths.nonzero().flatten()]
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, starts_of(lengths), int(lengths.max())


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """Puts packed tokens (total, ...) back into a padded batch (batch, seqlen, ...) of zeros."""
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *padded.shape[1:])


def _check_mask(name: str, mask: torch.Tensor, hidden_states: torch.Tensor) -> None:
    if mask.shape != hidden_states.shape[:2]:
        raise ArgumentError(
            f"{name}: expected shape (batch, seqlen) = {tuple(hidden_states.shape[:2])}, as in "
            f"hidden_states, got {tuple(mask.shape)}"
        )
