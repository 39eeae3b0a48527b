"""Attention over several ranks, with the bits of one device. See docs/distributed.md."""

from __future__ import annotations

from .api import (
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .plan import Explanation
from .sdpa import SdpaOverRanks
from .sharding import shard, unshard

__all__ = [
    "Explanation",
    "SdpaOverRanks",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "shard",
    "unshard",
]
