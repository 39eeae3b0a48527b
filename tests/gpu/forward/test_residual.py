"""keep_residual on the GPU: the same out, and the bits that the contract promises.

That dq is better is for `verify`'s accuracy to say.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flash_attn_deterministic import (
    deterministic_mode,
    explain,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    get_deterministic_mode,
    set_deterministic_mode,
)
from flash_attn_deterministic.reference import restored
from flash_attn_deterministic.verify.contract.call import Call
from flash_attn_deterministic.verify.contract.device_override import device_override
from flash_attn_deterministic.verify.exact import Definition

from tests.gpu.attention import (
    DTYPES,
    SCHEDULES,
    assert_contract,
    assert_same,
    each_config,
    make_qkv,
    named,
    pairwise,
    same_bits,
)
from tests.gpu.gradients import ALL_FEATURES, GRADIENTS, SEED, draw_call

pytestmark = pytest.mark.gpu

OPS = torch.ops.flash_attn_deterministic
HELD = named([(d, t) for d in (32, 40, 64, 96, 128, 192, 256) for t in DTYPES])
CONFIG = each_config(list(HELD.values()))
CONTRACT_FEATURES = ("full", "causal", "window", "everything", "sink")
NAMES = ("out", "softmax_lse", "residual", "out with gradients", *GRADIENTS)
SPLIT = {"one-split": 0, "splits-of-128": 128}


@pytest.fixture(autouse=True)
def _kept() -> Any:
    before = get_deterministic_mode()
    set_deterministic_mode(keep_residual=True)
    yield
    set_deterministic_mode(*before)


def results(call: Call) -> tuple[torch.Tensor, ...]:
    """out and the gradients."""
    leaves = [t.detach().requires_grad_() for t in (call.q, call.k, call.v)]
    torch.manual_seed(SEED)
    out: Any = flash_attn_func(*leaves, **call.keywords)
    return (out.detach(), *torch.autograd.grad(out, leaves, call.dout))


def kept(call: Call, split_size: int) -> tuple[torch.Tensor, ...]:
    """out, softmax_lse and the residual of the op."""
    options = call.options
    left, right = options.get("window_size", (-1, -1))
    state = torch.tensor([SEED, 7], device="cuda")
    found: tuple[torch.Tensor, ...] = OPS.fwd_with_residual(
        *(call.q, call.k, call.v, call.slopes, state, options.get("dropout_p", 0.0)),
        *(call.q.shape[-1] ** -0.5, left, 0 if options.get("causal") else right),
        *(options.get("softcap", 0.0), split_size, True, True),
    )
    return found


@pairwise(config=HELD, split_size=SPLIT, feature=list(ALL_FEATURES))
def test_out_stays(config: tuple[int, str], split_size: int, feature: str) -> None:
    call = draw_call(*config, feature, seqlen_q=333, seqlen_k=700)
    call = call.with_options(split_size=split_size)
    with_residual = results(call)
    with deterministic_mode(keep_residual=False):
        without = results(call)
    assert same_bits(with_residual[0], without[0])
    assert same_bits(with_residual[3], without[3])
    assert not same_bits(with_residual[1], without[1])


@CONFIG
def test_lse_stays(head_dim: int, dtype: str) -> None:
    call = draw_call(head_dim, dtype, "causal", seqlen_q=200, seqlen_k=150)  # rows without keys
    out, softmax_lse, residual = kept(call, 128)
    scores = (head_dim**-0.5, -1, 0, 0.0, 128, True, True)
    assert_same((out, softmax_lse), OPS.fwd(call.q, call.k, call.v, None, None, 0.0, *scores))
    assert (residual.shape, residual.dtype) == (out.shape, torch.bfloat16)
    assert not residual[:, :50].any()
    wanted = Definition(causal=True).forward(call.q, call.k, call.v).out
    step = torch.finfo(DTYPES[dtype]).eps * out.double().abs() / 2 + 2**-24
    assert bool((residual.double().abs() <= step).all())
    assert (restored(out, residual).double() - wanted).norm() < (out.double() - wanted).norm()


@pairwise(
    config=HELD,
    split_size=SPLIT,
    feature=(
        *("full", "causal", "window", "softcap", "alibi", "everything", "dropout"),
        "dropout-softcap",
    ),
    shape={"long": (300, 4), "short": (150, 4), "few-queries": (5, 8)},
)
def test_every_schedule_has_the_same_bits(
    config: tuple[int, str], split_size: int, feature: str, shape: tuple[int, int]
) -> None:
    call = draw_call(*config, feature, seqlen_q=shape[0], seqlen_k=700, nheads=shape[1])

    def run() -> tuple[torch.Tensor, ...]:
        return (*kept(call, split_size), *results(call.with_options(split_size=split_size)))

    expected = run()
    assert not expected[2].isnan().any()
    for schedule in SCHEDULES:
        with device_override(schedule):
            assert_same(run(), expected, NAMES)


@pytest.mark.parametrize("row", ["backward", "dropout"])
@CONFIG
def test_rows_of_the_contract(head_dim: int, dtype: str, row: str) -> None:
    """Repeats, batch, packing, groups of heads: with a residual, too."""
    sizes: dict[str, Any] = {"split": 128, "seqlen_q": (300,), "repeats": 5, "long_backward": 0}
    sizes |= {"backward_lengths": ((300, 300),), "features": CONTRACT_FEATURES}
    assert_contract(row, head_dim, dtype, **sizes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_qkvpacked_calls_have_the_bits_of_plain_ones(dtype: str) -> None:
    call = draw_call(64, dtype, "causal", nheads_k=4)
    qkv = torch.stack((call.q, call.k, call.v), 2).requires_grad_()
    out = flash_attn_qkvpacked_func(qkv, causal=True)
    (gradient,) = torch.autograd.grad(out, [qkv], call.dout)
    assert_same(gradient.unbind(2), tuple(call.gradients().values()), GRADIENTS)


def test_memory_is_what_explain_says() -> None:
    call = draw_call(64, "bf16", batch=4, seqlen_q=1024)
    held = {}
    for keep in (False, True):
        with deterministic_mode(keep_residual=keep):
            q = call.q.detach().requires_grad_()
            said = explain(flash_attn_func, q, call.k, call.v).residual_bytes
            gc.collect()
            before = torch.cuda.memory_allocated()
            out = flash_attn_func(q, call.k, call.v)
            held[keep] = torch.cuda.memory_allocated() - before
            del out
    assert held[True] - held[False] == said == 2 * call.q.numel()


@pytest.mark.parametrize("change", [
    pytest.param(lambda r: r.half(), id="dtype"),
    pytest.param(lambda r: r[:, 1:], id="shape"),
    pytest.param(lambda r: r.transpose(1, 2).contiguous().transpose(1, 2), id="strides"),
    pytest.param(lambda r: r.cpu(), id="device"),
])  # fmt: skip
def test_wrong_residual(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    q, k, v = make_qkv((2, 9, 4, 64))
    rest = (None, None, 0.0, 0.125, -1, -1, 0.0)
    out, lse, residual = OPS.fwd_with_residual(q, k, v, *rest, 0, True, True)
    with pytest.raises(RuntimeError, match="residual"):
        OPS.bwd(q, q, k, v, out, lse, *rest, True, change(residual))
