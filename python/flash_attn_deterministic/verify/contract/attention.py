"""The functions that the checks are about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _family(*args: Any, **kwargs: Any) -> str:
    import flash_attn_deterministic as package

    return package.explain(package.flash_attn_func, *args, **kwargs).family


@dataclass(frozen=True)
class Attention:
    """The functions under test; tests put broken ones here."""

    dense: Callable[..., Any]  # flash_attn_func
    varlen: Callable[..., Any]  # flash_attn_varlen_func
    kvcache: Callable[..., Any]  # flash_attn_with_kvcache
    path: Callable[..., str]  # returns "one-cta" or "parts" for the arguments of a call of `dense`
    family: Callable[..., str] = _family  # returns "sm80" or "sm90" for them

    @staticmethod
    def installed() -> Attention:
        """Returns those of this package."""
        import flash_attn_deterministic as package

        def path(*args: Any, **kwargs: Any) -> str:
            return package.explain(package.flash_attn_func, *args, **kwargs).path

        return Attention(
            package.flash_attn_func,
            package.flash_attn_varlen_func,
            package.flash_attn_with_kvcache,
            path,
        )
