"""Registers this package as an attention implementation of transformers, when imported.

After it a model takes `attn_implementation="flash_attn_deterministic"`:

    import flash_attn_deterministic.integrations.transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.bfloat16, attn_implementation="flash_attn_deterministic"
    )

Padded and packed batches, sliding windows, softcap, attention sinks (gpt-oss), static and dynamic
caches work as with "flash_attention_2" and others: transformers itself packs padded batches and
finds the sequences in position_ids. The order of additions is that of this package's mode;
transformers' variable FLASH_ATTENTION_DETERMINISTIC sets this mode too, when a process starts.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    modeling_flash_attention_utils,
)
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from ..checks.kernels import DTYPE_NAMES
from ..errors import DtypeError, UnsupportedError
from ..interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from .flash_attn.bert_padding import pad_input, unpad_input

NAME = "flash_attn_deterministic"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the attention of one layer, as transformers' attention functions do.

    attention_mask is (batch, seqlen_k), 1 for tokens and 0 for padding. The option s_aux holds
    sinks, (nheads,). A position bias and masks of other forms raise UnsupportedError.

    Source:
        flash_attention_forward of transformers 5.17 (integrations/flash_attention.py).
    """
    if options.get("position_bias") is not None:
        raise UnsupportedError(
            "position_bias: expected None, as this attention does not support it; use "
            'attn_implementation="eager" for this model'
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedError(
            "attention_mask: expected (batch, seqlen_k), 1 for tokens and 0 for padding, got shape "
            f"{tuple(attention_mask.shape)}; masks of other forms need "
            'attn_implementation="sdpa" or "eager"'
        )
    result: tuple[torch.Tensor, None] = flash_attention_forward(
        module, query, key, value, attention_mask, **options
    )
    return result


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> torch.Tensor | None:
    """Returns the mask for `attention`: (batch_size, keys), None if every place holds a token.

    Its width is the number of places of a static cache that are filled.

    Source:
        flash_attention_mask of transformers 5.17 (masking_utils.py).
    """
    if attention_mask is None:
        # Without a mask, causal attention would read the free places of a static cache.
        filled = int(q_offset) + q_length - kv_offset
        if filled < kv_length:
            return torch.ones(batch_size, filled, dtype=torch.bool, device=device)
    offset: Any = q_offset  # transformers' annotation has no tensors, which its caches pass
    result: torch.Tensor | None = flash_attention_mask(
        batch_size,
        q_length,
        kv_length,
        offset,
        kv_offset,
        attention_mask=attention_mask,
        device=device,
        **options,
    )
    return result


def _by_mode(function: Any) -> Any:
    """Hides `deterministic`: transformers passes what it finds among the parameters, here False."""

    @functools.wraps(function)
    def attention(q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if q.dtype not in DTYPE_NAMES:
            raise DtypeError(
                "dtype: expected torch.float16 or torch.bfloat16; the model computes attention in "
                f"{q.dtype}; load it with dtype=torch.bfloat16, or run it under torch.autocast"
            )
        out: torch.Tensor = function(q, *arguments, **options)
        return out

    signature = inspect.signature(function)
    kept = [one for name, one in signature.parameters.items() if name != "deterministic"]
    attention.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return attention


_FUNCTIONS = (
    _by_mode(flash_attn_func),
    _by_mode(flash_attn_varlen_func),
    flash_attn_with_kvcache,
    pad_input,
    unpad_input,
)
_others = modeling_flash_attention_utils._lazy_imports


def _lazy_imports(implementation: str | None, *arguments: Any, **options: Any) -> Any:
    """Returns our functions for our name; transformers would look for the name on its hub."""
    if implementation == NAME:
        return _FUNCTIONS
    return _others(implementation, *arguments, **options)


# transformers treats every implementation with "flash" in its name as flash attention, as intended,
# but this function knows only the names of flash_attn's releases and of the hub.
modeling_flash_attention_utils._lazy_imports = _lazy_imports
_adjust = PreTrainedModel._check_and_adjust_attn_implementation


def _adjust_ours(
    model: PreTrainedModel, implementation: str | None, *arguments: Any, **options: Any
) -> Any:
    """Adds our name to a model's own list; transformers would fall back to the list's first."""
    listed = getattr(model, "_compatible_flash_implementations", None)
    if implementation == NAME and listed is not None:
        model._compatible_flash_implementations = [*listed, NAME]
    return _adjust(model, implementation, *arguments, **options)


# Models with sinks (gpt-oss) list the flash attentions that compute them.
_model: Any = PreTrainedModel
_model._check_and_adjust_attn_implementation = _adjust_ours
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
