"""The names of the package flash_attn 2.8.3, for code that imports them.

The public functions are those of flash_attn_deterministic. With
`flash_attn_deterministic.as_flash_attn`, `import flash_attn` gives this package. flash_attn's
layers, losses, models, ops and Triton kernels are not included.
"""

from __future__ import annotations

from . import bert_padding as bert_padding
from . import flash_attn_interface as flash_attn_interface
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

# At least 2.8.3 for code that compares versions, but visibly no release of flash-attn.
__version__ = "2.8.3+deterministic"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
