"""Bad inputs on a GPU: refused before anything is launched, naming the argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu.attention import attend, make_qkv, skip_unless_built

pytestmark = pytest.mark.gpu

Change = Callable[..., dict[str, Any]]


def inputs() -> dict[str, torch.Tensor]:
    skip_unless_built(64, "bf16")
    return dict(zip("qkv", make_qkv((2, 16, 4, 64), nheads_k=2), strict=True))


def assert_still_works() -> None:
    """A kernel that had run on bad memory would have left the context unusable."""
    torch.cuda.synchronize()
    good = inputs()
    out, _ = attend(good["q"], good["k"], good["v"])
    assert out.isfinite().all()


# What a function would pass on as it is: tests/unit/interface/test_mistakes.py, on a GPU, too.
BAD_OP_CALLS: dict[str, Change] = {
    "v-rank-5": lambda q, k, v: {"v": v[None]},
    "head-dim-36": lambda **qkv: {n: t[..., :36].contiguous() for n, t in qkv.items()},
    "scale-nan": lambda q, k, v: {"softmax_scale": math.nan},
    "scale-inf": lambda q, k, v: {"softmax_scale": -math.inf},
    "scale-zero": lambda q, k, v: {"softmax_scale": 0.0},
}


@pytest.mark.parametrize("name", BAD_OP_CALLS)
def test_bad_op_call(name: str) -> None:
    """The op checks for itself: it can be called past the Python functions."""
    arguments: dict[str, Any] = {
        **inputs(),
        "alibi_slopes": None,
        "rng_state": None,
        "dropout_p": 0.0,
        "softmax_scale": 0.125,
        "window_left": -1,
        "window_right": 0,
        "softcap": 0.0,
        "split_size": 2048,
        "deterministic": True,
        "deterministic_bwd": True,
    }
    arguments.update(BAD_OP_CALLS[name](**inputs()))
    with pytest.raises(RuntimeError, match=r"\b(q|k|v|softmax_scale): expected"):
        torch.ops.flash_attn_deterministic.fwd(**arguments)
    assert_still_works()


BAD_BACKWARD_CALLS: dict[str, tuple[str, Change]] = {
    "dout-other-dtype": ("dout", lambda dout, **rest: {"dout": dout.half()}),
    "dout-on-cpu": ("dout", lambda dout, **rest: {"dout": dout.cpu()}),
    "dout-other-shape": ("dout", lambda dout, **rest: {"dout": dout[:, 1:]}),
    "dout-rank-3": ("dout", lambda dout, **rest: {"dout": dout[0]}),
    "out-other-shape": ("out", lambda out, **rest: {"out": out[:, :, :2]}),
    "lse-other-dtype": ("softmax_lse", lambda softmax_lse,
        **rest: {"softmax_lse": softmax_lse.half()}),
    "lse-transposed": ("softmax_lse", lambda softmax_lse,
        **rest: {"softmax_lse": softmax_lse.transpose(1, 2)}),
    "lse-other-shape": ("softmax_lse", lambda softmax_lse,
        **rest: {"softmax_lse": softmax_lse[..., :3].contiguous()}),
    "dropout-without-state": ("rng_state", lambda **rest: {"dropout_p": 0.1}),
    "state-on-cpu": ("rng_state", lambda **rest: {"dropout_p": 0.1,
        "rng_state": torch.tensor([1, 2])}),
    "state-of-one": ("rng_state", lambda **rest: {"dropout_p": 0.1,
        "rng_state": torch.tensor([1], device="cuda")}),
    "seeds-of-others": ("rng_state", lambda **rest: {"dropout_p": 0.1,
        "rng_state": torch.zeros(3, 1).long().cuda()}),
    "seeds-in-rows": ("rng_state", lambda **rest: {"dropout_p": 0.1,
        "rng_state": torch.zeros(1, 2).long().cuda()}),
    "dropout-1": ("dropout_p", lambda **rest: {"dropout_p": 1.0}),
    "scale-zero": ("softmax_scale", lambda **rest: {"softmax_scale": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BACKWARD_CALLS)
def test_bad_backward_op_call(name: str) -> None:
    skip_unless_built(64, "bf16", "bwd")
    argument, change = BAD_BACKWARD_CALLS[name]
    qkv = inputs()
    out, softmax_lse = attend(qkv["q"], qkv["k"], qkv["v"])
    good: dict[str, Any] = {
        "dout": torch.ones_like(out),
        **qkv,
        "out": out,
        "softmax_lse": softmax_lse,
        "alibi_slopes": None,
        "rng_state": None,
        "dropout_p": 0.0,
        "softmax_scale": 0.125,
        "window_left": -1,
        "window_right": -1,
        "softcap": 0.0,
        "deterministic": True,
    }
    with pytest.raises(RuntimeError, match=rf"\b{argument}: expected"):
        torch.ops.flash_attn_deterministic.bwd(**{**good, **change(**good)})
    assert_still_works()
