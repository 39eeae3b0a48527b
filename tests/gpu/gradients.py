"""What the tests of the backward share: a call that repeats its dropout, comparison of bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from flash_attn_deterministic.verify.contract.call import Attention, Call, Tensors, draw
from flash_attn_deterministic.verify.features import FEATURES as ALL
from flash_attn_deterministic.verify.features import options_of

from tests.gpu.attention import assert_same, skip_unless_built

# Sinks have a file of their own, seeds tests of their own.
_HERE = [name for name, options in ALL.items() if not {"sink", "seeds"} & options.keys()]
DROPOUT_FEATURES = [name for name in _HERE if "dropout" in name]
FEATURES = [name for name in _HERE if name not in (*DROPOUT_FEATURES, "residual")]
ALL_FEATURES = [*FEATURES, *DROPOUT_FEATURES]
GRADIENTS = ("dq", "dk", "dv")


SEED = 5  # of dropout


def repeating(seed: int = SEED) -> Attention:
    """The package's functions, which draw the same dropout mask in each call."""

    def seeded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            torch.manual_seed(seed)
            return function(*args, **kwargs)

        return call

    found = Attention.installed()
    return replace(found, dense=seeded(found.dense), varlen=seeded(found.varlen))


def results(call: Call) -> Tensors:
    """out and softmax_lse with the gradients."""
    return {**call(), **call.gradients()}


def draw_call(
    head_dim: int,
    dtype: str,
    feature: str = "full",
    *,
    batch: int = 2,
    seqlen_q: int = 333,
    seqlen_k: int | None = None,
    nheads: int = 4,
    nheads_k: int = 2,
    seed: int = 0,
) -> Call:
    """Draws a call with a feature of ALL_FEATURES; skips the test if the wheel can't run it."""
    skip_unless_built(head_dim, dtype)
    skip_unless_built(head_dim, dtype, "bwd")
    return draw(
        repeating(), (batch, seqlen_q, nheads, head_dim),
        seqlen_q if seqlen_k is None else seqlen_k, nheads_k,
        dtype=dtype, device="cuda", seed=seed, options=options_of(feature),
    )  # fmt: skip


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def assert_same_results(left: Tensors, right: Tensors) -> None:
    """Asserts that results of the same names are equal bit for bit."""
    assert left.keys() == right.keys()
    assert_same(tuple(left.values()), tuple(right[name] for name in left), tuple(left))
