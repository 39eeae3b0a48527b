"""Small random models of transformers on our attention, for the tests of several modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

NAME = "flash_attn_deterministic"
SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0},
    "max_position_embeddings": 128,
}


def make_config(family: str, **options: Any) -> Any:
    """Returns the configuration of a model with SIZES, where options say nothing else."""
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, f"{family}Config")(**{**SIZES, **options})


def make_model(family: str, **options: Any) -> Any:
    """Returns a model; the same options give the same one."""
    transformers = pytest.importorskip("transformers")
    import flash_attn_deterministic.integrations.transformers  # noqa: F401  (registers it)

    torch.manual_seed(0)
    kind, config = getattr(transformers, f"{family}ForCausalLM"), make_config(family, **options)
    return kind._from_config(config, attn_implementation=NAME, dtype=torch.bfloat16).eval()
