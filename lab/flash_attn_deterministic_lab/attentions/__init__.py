"""Every attention that can be measured, by name: what it takes, where it runs, how it is called."""

from __future__ import annotations

from .attention import Attention, Packed
from .registry import ATTENTIONS, find_attention, settings_of

__all__ = ["ATTENTIONS", "Attention", "Packed", "find_attention", "settings_of"]
