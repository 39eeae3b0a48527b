"""What a call over ranks is, checked and with all defaults filled in."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass, fields

from .passes import Numbers


@dataclass(frozen=True)
class CallSpec:
    """The numbers of a call, the same on all ranks.

    Args:
        group: name of the process group.
        order: of the tokens; in ORDERS.
        ulysses_degree: ranks over which heads are divided; 0: the planner chooses.
        heads_k: KV heads computed at a time; 0: the planner chooses.
        backward: whether an input requires a gradient.
        softmax_scale: factor of q k^T.
        window_left: keys that a row sees before its position; -1: no limit.
        window_right: likewise after it.
        softcap: 0.0: none.
        split_size: tokens per split; 0: one split.
        deterministic: whether the forward is.
        deterministic_bwd: whether the backward is.
    """

    group: str
    order: str
    ulysses_degree: int
    heads_k: int
    backward: bool
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    split_size: int
    deterministic: bool
    deterministic_bwd: bool

    @property
    def numbers(self) -> Numbers:
        """Returns what the attention ops take besides the mask."""
        return Numbers(
            self.softmax_scale,
            self.softcap,
            self.split_size,
            self.deterministic,
            self.deterministic_bwd,
        )

    def text(self) -> str:
        """Returns the spec as a string: an argument of ops that torch.compile keeps constant."""
        values = (getattr(self, name) for name in _NAMES)
        return _BETWEEN.join([f"{value!r}" for value in values])

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def read(text: str) -> CallSpec:
        """Returns the spec of a string."""
        return CallSpec(*map(ast.literal_eval, text.split(_BETWEEN)))


_BETWEEN = "; "
_NAMES = tuple(field.name for field in fields(CallSpec))
