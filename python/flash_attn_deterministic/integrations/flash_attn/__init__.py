"""The names of the package flash_attn 2.8.3, for code that imports them.

The public functions are those of flash_attn_deterministic. With
`flash_attn_deterministic.as_flash_attn`, `import flash_attn` gives this package. flash_attn's
layers, losses, models, ops and Triton kernels are not included.
"""

from __future__ import annotations

from ...interface import *  # noqa: F403
from ...interface import __all__ as __all__
from . import bert_padding as bert_padding
from . import flash_attn_interface as flash_attn_interface

# At least 2.8.3 for code that compares versions, but visibly no release of flash-attn.
__version__ = "2.8.3+deterministic"
