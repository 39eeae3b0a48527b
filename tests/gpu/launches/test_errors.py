"""Bad inputs on a GPU: refused before anything is launched, naming the argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flash_attn_deterministic import (
    FlashAttnError,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

from tests.gpu.attention import attend, make_qkv, skip_unless_built

pytestmark = pytest.mark.gpu

Change = Callable[..., dict[str, Any]]


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a head dim of 264 out of one of 64."""
    return tensor.repeat(1, 1, 1, 5)[..., :264].contiguous()


BAD_CALLS: dict[str, tuple[type[Exception], str, Change]] = {
    "float32": (TypeError, "q", lambda q, k, v: {"q": q.float(), "k": k.float(), "v": v.float()}),
    "k-other-dtype": (TypeError, "k", lambda q, k, v: {"k": k.half()}),
    "v-other-dtype": (TypeError, "v", lambda q, k, v: {"v": v.half()}),
    "q-on-cpu": (ValueError, "k", lambda q, k, v: {"q": q.cpu()}),
    "k-on-cpu": (ValueError, "k", lambda q, k, v: {"k": k.cpu()}),
    "v-on-cpu": (ValueError, "v", lambda q, k, v: {"v": v.cpu()}),
    "q-rank-3": (ValueError, "q", lambda q, k, v: {"q": q[0]}),
    "k-rank-3": (ValueError, "k", lambda q, k, v: {"k": k[0]}),
    "v-rank-5": (ValueError, "v", lambda q, k, v: {"v": v[None]}),
    "heads-dont-divide": (ValueError, "k", lambda q, k, v: {"q": q[:, :, :3]}),
    "no-kv-heads": (ValueError, "k", lambda q, k, v: {"k": k[:, :, :0], "v": v[:, :, :0]}),
    "head-dim-264": (
        ValueError,
        "q",
        lambda **qkv: {name: wide(t) for name, t in qkv.items()},
    ),
    "head-dim-0": (
        ValueError,
        "q",
        lambda q, k, v: {"q": q[..., :0], "k": k[..., :0], "v": v[..., :0]},
    ),
    "k-other-head-dim": (ValueError, "k", lambda q, k, v: {"k": k[..., :32]}),
    "v-other-length": (ValueError, "v", lambda q, k, v: {"v": v[:, 1:]}),
    "k-other-batch": (ValueError, "k", lambda q, k, v: {"k": k[:1], "v": v[:1]}),
    "empty-batch": (ValueError, "q", lambda q, k, v: {"q": q[:0], "k": k[:0], "v": v[:0]}),
    "scale-nan": (ValueError, "softmax_scale", lambda q, k, v: {"softmax_scale": math.nan}),
    "scale-inf": (ValueError, "softmax_scale", lambda q, k, v: {"softmax_scale": math.inf}),
    "scale-zero": (ValueError, "softmax_scale", lambda q, k, v: {"softmax_scale": 0.0}),
    "scale-negative": (ValueError, "softmax_scale", lambda q, k, v: {"softmax_scale": -0.125}),
    "dropout-1": (ValueError, "dropout_p", lambda q, k, v: {"dropout_p": 1.0}),
    "dropout-negative": (ValueError, "dropout_p", lambda q, k, v: {"dropout_p": -0.1}),
    "window-float": (TypeError, "window_size", lambda q, k, v: {"window_size": (8.0, 0)}),
    "split-size": (ValueError, "split_size", lambda q, k, v: {"split_size": 100}),
    "alibi-on-cpu": (
        ValueError,
        "alibi_slopes",
        lambda q, k, v: {"alibi_slopes": torch.ones(4)},
    ),
    "alibi-shape": (
        ValueError,
        "alibi_slopes",
        lambda q, k, v: {"alibi_slopes": torch.ones(2, device="cuda")},
    ),
}


def inputs() -> dict[str, torch.Tensor]:
    skip_unless_built(64, "bf16")
    return dict(zip("qkv", make_qkv((2, 16, 4, 64), nheads_k=2), strict=True))


def assert_still_works() -> None:
    """A kernel that had run on bad memory would have left the context unusable."""
    torch.cuda.synchronize()
    good = inputs()
    out, _ = attend(good["q"], good["k"], good["v"])
    assert out.isfinite().all()


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call(name: str) -> None:
    error, argument, change = BAD_CALLS[name]
    good = inputs()
    with pytest.raises(error, match=rf"^{argument}: ") as caught:
        flash_attn_func(**{**good, **change(**good)})
    assert isinstance(caught.value, FlashAttnError)
    assert_still_works()


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


# Of two sequences of 16 tokens: what is wrong, and the argument that the message names.
BAD_PACKED_CALLS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "starts-list": (TypeError, "cu_seqlens_q", {"cu_seqlens_q": [0, 16, 32]}),
    "starts-on-cpu": (ValueError, "cu_seqlens_k", {"cu_seqlens_k": torch.zeros(3).int()}),
    "starts-int64": (TypeError, "cu_seqlens_q", {"cu_seqlens_q": torch.zeros(3).long()}),
    "other-batch": (ValueError, "cu_seqlens_k", {"cu_seqlens_k": torch.zeros(2).int()}),
    "no-sequence": (ValueError, "cu_seqlens_q", {"cu_seqlens_q": torch.zeros(1).int()}),
    "longest-negative": (ValueError, "max_seqlen_q", {"max_seqlen_q": -1}),
    "longest-float": (TypeError, "max_seqlen_k", {"max_seqlen_k": 16.0}),
    "used-other-batch": (ValueError, "seqused_k", {"seqused_k": torch.ones(3).int()}),
    "leftpad-int64": (TypeError, "leftpad_k", {"leftpad_k": torch.zeros(2).long()}),
    "table-without-pages": (ValueError, "k", {"block_table": torch.zeros(2, 1).int()}),
}


@pytest.mark.parametrize("name", BAD_PACKED_CALLS)
def test_bad_packed_call(name: str) -> None:
    error, argument, change = BAD_PACKED_CALLS[name]
    if not name.endswith("on-cpu"):
        change = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in change.items()}
    good: dict[str, Any] = {n: x.flatten(0, 1) for n, x in inputs().items()}
    good |= {"cu_seqlens_q": int32(0, 16, 32), "cu_seqlens_k": int32(0, 16, 32)}
    good |= {"max_seqlen_q": 16, "max_seqlen_k": 16}
    with pytest.raises(error, match=rf"^{argument}: ") as caught:
        flash_attn_varlen_func(**{**good, **change})
    assert isinstance(caught.value, FlashAttnError)
    assert_still_works()


BAD_CACHE_CALLS: dict[str, tuple[type[Exception], str, Change]] = {
    "v-cache-other-length": (ValueError, "v_cache", lambda **qkv: {"v_cache": qkv["v"][:, 1:]}),
    "cache-of-one": (ValueError, "k_cache", lambda q, k, v: {"k_cache": k[:1], "v_cache": v[:1]}),
    "rows-not-aligned": (
        ValueError,
        "k_cache",
        lambda q, k, v: {"k_cache": torch.cat((k, k), -1)[..., 1:65]},
    ),
    "lengths-other-batch": (ValueError, "cache_seqlens", lambda **_: {"cache_seqlens": int32(1)}),
    "length-too-long": (ValueError, "cache_seqlens", lambda **_: {"cache_seqlens": 17}),
    "new-k-alone": (ValueError, "v", lambda q, k, v: {"k": k[:, :1]}),
    "new-without-lengths": (
        ValueError,
        "cache_seqlens",
        lambda q, k, v: {"k": k[:, :1], "v": v[:, :1], "cache_seqlens": None},
    ),
    "new-longer-than-cache": (
        ValueError,
        "k",
        lambda q, k, v: {"k": k.repeat(1, 2, 1, 1), "v": v.repeat(1, 2, 1, 1)},
    ),
    "rotary-without-new": (
        ValueError,
        "rotary_cos",
        lambda q, k, v: {"rotary_cos": q[0, :, 0, :16], "rotary_sin": q[0, :, 0, :16]},
    ),
    "leftpad-and-pages": (
        ValueError,
        "cache_leftpad",
        lambda q, k, v: {"block_table": int32(0, 1)[:, None], "cache_leftpad": int32(0, 0)},
    ),
}


@pytest.mark.parametrize("name", BAD_CACHE_CALLS)
def test_bad_cache_call(name: str) -> None:
    error, argument, change = BAD_CACHE_CALLS[name]
    qkv = inputs()
    good = {"q": qkv["q"], "k_cache": qkv["k"], "v_cache": qkv["v"], "cache_seqlens": int32(3, 5)}
    before = qkv["k"].clone()
    with pytest.raises(error, match=rf"^{argument}: ") as caught:
        flash_attn_with_kvcache(**{**good, **change(**qkv)})
    assert isinstance(caught.value, FlashAttnError)
    assert torch.equal(qkv["k"].view(torch.int16), before.view(torch.int16))
    assert_still_works()


BAD_OP_CALLS: dict[str, Change] = {
    "float32": lambda q, k, v: {"q": q.float(), "k": k.float(), "v": v.float()},
    "k-other-dtype": lambda q, k, v: {"k": k.half()},
    "k-on-cpu": lambda q, k, v: {"k": k.cpu()},
    "v-on-cpu": lambda q, k, v: {"v": v.cpu()},
    "q-rank-3": lambda q, k, v: {"q": q[0]},
    "v-rank-5": lambda q, k, v: {"v": v[None]},
    "heads-dont-divide": lambda q, k, v: {"q": q[:, :, :3]},
    "no-heads": lambda q, k, v: {"q": q[:, :, :0]},
    "no-kv-heads": lambda q, k, v: {"k": k[:, :, :0], "v": v[:, :, :0]},
    "head-dim-264": lambda **qkv: {name: wide(t) for name, t in qkv.items()},
    "head-dim-36": lambda **qkv: {n: t[..., :36].contiguous() for n, t in qkv.items()},
    "k-shorter-head-dim": lambda q, k, v: {"k": k[..., :32]},
    "v-other-length": lambda q, k, v: {"v": v[:, 1:]},
    "k-other-batch": lambda q, k, v: {"k": k[:1], "v": v[:1]},
    "empty-batch": lambda q, k, v: {"q": q[:0], "k": k[:0], "v": v[:0]},
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
    "lse-other-dtype": (
        "softmax_lse",
        lambda softmax_lse, **rest: {"softmax_lse": softmax_lse.half()},
    ),
    "lse-transposed": (
        "softmax_lse",
        lambda softmax_lse, **rest: {"softmax_lse": softmax_lse.transpose(1, 2)},
    ),
    "lse-other-shape": (
        "softmax_lse",
        lambda softmax_lse, **rest: {"softmax_lse": softmax_lse[..., :3].contiguous()},
    ),
    "dropout-without-state": ("rng_state", lambda **rest: {"dropout_p": 0.1}),
    "state-on-cpu": (
        "rng_state",
        lambda **rest: {"dropout_p": 0.1, "rng_state": torch.tensor([1, 2])},
    ),
    "state-of-one": (
        "rng_state",
        lambda **rest: {"dropout_p": 0.1, "rng_state": torch.tensor([1], device="cuda")},
    ),
    "dropout-1": ("dropout_p", lambda **rest: {"dropout_p": 1.0}),
    "scale-zero": ("softmax_scale", lambda **rest: {"softmax_scale": 0.0}),
}


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
