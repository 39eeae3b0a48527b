"""Checks before or after the op, and the way to the op. A fake op refuses calls as CUDA ops do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from attention_cases import make_inputs
from bits import bits_equal
from calls import (
    Call,
    int32,
    kvcache_call,
    kvpacked_call,
    normal,
    qkv_call,
    qkvpacked_call,
    varlen_call,
    varlen_kvpacked_call,
    varlen_qkvpacked_call,
)
from flash_attn_deterministic import interface
from flash_attn_deterministic._checks import kvcache as kvcache_checks
from flash_attn_deterministic._checks import tensors
from flash_attn_deterministic._checks import varlen as varlen_checks
from flash_attn_deterministic._ops import autograd, dispatch
from flash_attn_deterministic.errors import FlashAttnError
from flash_attn_deterministic.interface import _call, kvcache
from torch.utils._python_dispatch import TorchDispatchMode

CALLS: dict[str, Callable[[], Call]] = {
    "flash_attn_func": qkv_call,
    "flash_attn_qkvpacked_func": qkvpacked_call,
    "flash_attn_kvpacked_func": kvpacked_call,
    "flash_attn_varlen_func": varlen_call,
    "flash_attn_varlen_qkvpacked_func": varlen_qkvpacked_call,
    "flash_attn_varlen_kvpacked_func": varlen_kvpacked_call,
    "flash_attn_with_kvcache": kvcache_call,
}
names = pytest.mark.parametrize("name", CALLS)


@pytest.fixture
def op_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats CPU tensors as those of a CUDA device."""

    class Cuda(torch.Tensor):
        is_cuda = True

    def on_cpu(rank: int, q: Any, *others: Any) -> bool:
        return (
            isinstance(q, torch.Tensor)
            and not dispatch.needs_dispatcher(q, *others)
            and on_cuda(rank, q.as_subclass(Cuda))
        )

    on_cuda = _call.op_checks
    monkeypatch.setattr(_call, "needs_dispatcher", lambda *tensors: False)
    for module in (_call, kvcache):
        monkeypatch.setattr(module, "op_checks", on_cpu)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes every op refuse its calls; collects their names."""
    called = []

    def run(name: str, arguments: tuple[Any, ...], through_dispatcher: bool) -> NoReturn:
        called.append(name)
        raise RuntimeError("refused by the op")

    for module in (_call, kvcache):
        monkeypatch.setattr(module, "run", run)
    return called


def other(**changes: Any) -> dict[str, Any]:
    return changes


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "k-no-tensor": ("flash_attn_func", other(k=[[1.0]])),
    "v-none": ("flash_attn_func", other(v=None)),
    "q-none": ("flash_attn_func", other(q=None)),
    "q-rank": ("flash_attn_func", other(q=normal(5, 4, 32))),
    "q-dtype": ("flash_attn_func", other(q=normal(2, 5, 4, 32, dtype=torch.float32))),
    "k-head-dim": ("flash_attn_func", other(k=normal(2, 9, 2, 30), v=normal(2, 9, 2, 30))),
    "q-head-dim-0": ("flash_attn_func", other(q=normal(2, 5, 4, 0))),
    "q-head-dim-264": ("flash_attn_func", other(q=normal(2, 5, 4, 264))),
    "k-heads": ("flash_attn_func", other(k=normal(2, 9, 3, 32))),
    "v-shape": ("flash_attn_func", other(v=normal(2, 8, 2, 32))),
    "slopes-shape": ("flash_attn_func", other(alibi_slopes=torch.ones(3))),
    "slopes-number": ("flash_attn_func", other(alibi_slopes=1.0)),
    "slopes-dropout": ("flash_attn_func", other(alibi_slopes=1.0, dropout_p=0.5)),
    "causal-scale": ("flash_attn_func", other(causal=0.125)),
    "window-floats": ("flash_attn_func", other(window_size=(1.0, 2.0))),
    "qkv-none": ("flash_attn_qkvpacked_func", other(qkv=None)),
    "qkv-rank": ("flash_attn_qkvpacked_func", other(qkv=normal(7, 3, 4, 32))),
    "qkv-parts": ("flash_attn_qkvpacked_func", other(qkv=normal(2, 7, 2, 4, 32))),
    "qkv-slopes": ("flash_attn_qkvpacked_func", other(alibi_slopes=torch.ones(3))),
    "kv-parts": ("flash_attn_kvpacked_func", other(kv=normal(2, 9, 3, 2, 32))),
    "kv-heads": ("flash_attn_kvpacked_func", other(kv=normal(2, 9, 2, 3, 32))),
    "kv-list": ("flash_attn_kvpacked_func", other(kv=[[1.0]])),
    "starts-of-qkv": ("flash_attn_varlen_qkvpacked_func", other(cu_seqlens=[0, 3, 8])),
    "longest-of-qkv": ("flash_attn_varlen_qkvpacked_func", other(max_seqlen=5.0)),
    "parts-of-kv": ("flash_attn_varlen_kvpacked_func", other(kv=normal(16, 3, 2, 32))),
    "starts-list": ("flash_attn_varlen_func", other(cu_seqlens_q=[0, 3, 3, 8])),
    "starts-dtype": ("flash_attn_varlen_func", other(cu_seqlens_k=torch.tensor([0, 5, 7, 16]))),
    "longest-float": ("flash_attn_varlen_func", other(max_seqlen_q=5.0)),
    "longest-negative": ("flash_attn_varlen_func", other(max_seqlen_k=-1)),
    "seqused-shape": ("flash_attn_varlen_func", other(seqused_k=int32(1))),
    "table-list": ("flash_attn_varlen_func", other(block_table=[[0]])),
    "cache-shape": ("flash_attn_with_kvcache", other(v_cache=normal(1, 3, 2, 32))),
    "lengths-shape": ("flash_attn_with_kvcache", other(cache_seqlens=int32(1))),
    "lengths-too-long": ("flash_attn_with_kvcache", other(cache_seqlens=10**6)),
    "new-alone": ("flash_attn_with_kvcache", other(k=normal(2, 1, 2, 32), v=None)),
}


_QKV = "q", "k", "v"
META = [
    *(("flash_attn_func", n) for n in (*_QKV, "alibi_slopes")),
    ("flash_attn_qkvpacked_func", "alibi_slopes"),
    *(("flash_attn_kvpacked_func", n) for n in ("q", "kv")),
    *(
        ("flash_attn_varlen_func", n)
        for n in (*_QKV, "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "alibi_slopes")
    ),
    ("flash_attn_varlen_qkvpacked_func", "cu_seqlens"),
    ("flash_attn_varlen_kvpacked_func", "cu_seqlens_k"),
    *(("flash_attn_with_kvcache", n) for n in ("k_cache", "cache_seqlens")),
]


def error_of(call: Callable[[], Any]) -> FlashAttnError:
    with pytest.raises(FlashAttnError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(("name", "changes"), WRONG.values(), ids=WRONG)
def test_refusal_has_the_message_of_our_checks(
    name: str, changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    call = CALLS[name]()
    expected = error_of(lambda: call(**changes))
    request.getfixturevalue("op_checks")
    request.getfixturevalue("refused")
    found = error_of(lambda: call(**changes))
    assert (type(found), str(found)) == (type(expected), str(expected))
    assert found.__context__ is None


@pytest.mark.parametrize(("name", "argument"), META)
@pytest.mark.usefixtures("op_checks")
def test_one_tensor_on_the_meta_device_is_refused(name: str, argument: str) -> None:
    call = CALLS[name]()
    tensor = call.arguments.get(argument)
    if tensor is None:
        tensor = torch.ones(4) if argument == "alibi_slopes" else int32(1, 1, 1)
    with pytest.raises(FlashAttnError, match=r"on (the )?(meta|cpu)"):
        call(**{argument: tensor.to("meta")})


@names
@pytest.mark.usefixtures("op_checks")
def test_error_of_the_op_if_our_checks_find_nothing(name: str, refused: list[str]) -> None:
    with pytest.raises(RuntimeError, match="refused by the op"):
        CALLS[name]()()
    assert len(refused) == 1


@names
@pytest.mark.usefixtures("op_checks")
def test_valid_call_skips_our_checks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = CALLS[name]()()
    for module, check in (
        (tensors, "check_dense"),
        (tensors, "check_packed"),
        (tensors, "check_alibi"),
        (varlen_checks, "check_varlen"),
        (kvcache_checks, "check_cache"),
    ):
        monkeypatch.setattr(module, check, lambda *arguments: pytest.fail("checked"))
    assert bits_equal(CALLS[name]()(), expected)


@pytest.mark.usefixtures("op_checks")
def test_lengths_that_are_no_ints_are_checked_first() -> None:
    call = varlen_call()
    assert bits_equal(call(max_seqlen_q=torch.tensor(5)), call())
    message = "max_seqlen_q: expected 0 to 1073741823 tokens, got -1"
    with pytest.raises(FlashAttnError, match=message):
        call(max_seqlen_q=torch.tensor(-1))


@pytest.mark.usefixtures("op_checks")
def test_wrong_call_with_dropout_draws_no_seed() -> None:
    state = torch.get_rng_state()
    error_of(lambda: qkv_call()(v=normal(2, 8, 2, 32), dropout_p=0.5))
    assert torch.equal(torch.get_rng_state(), state)


def test_checks_are_left_to_cuda_ops_only() -> None:
    q, k, v = make_inputs(2, 5, 9, 4, 2, 32, torch.bfloat16)
    assert not _call.op_checks(4, q, k, v)
    assert not _call.op_checks(4, q.to("meta"), k, v)
    assert not _call.op_checks(4, None, k, v)


# --- The way to the op --------------------------------------------------------------------------


@pytest.fixture
def by_dispatcher(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Sends calls through torch's dispatcher, where torch.library's autograd kernel runs."""

    def switch() -> None:
        for module in (_call, kvcache, autograd):
            monkeypatch.setattr(module, "needs_dispatcher", lambda *tensors: True)

    return switch


@pytest.mark.parametrize("head_dim", [32, 20])
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_gradients_equal_those_of_the_dispatcher(
    name: str, head_dim: int, by_dispatcher: Callable[[], None]
) -> None:
    def gradients() -> tuple[torch.Tensor, ...]:
        call = CALLS[name](head_dim)  # type: ignore[call-arg]
        leaves = [call.arguments[n].requires_grad_() for n in "qkv"]
        out, softmax_lse, _ = call(return_attn_probs=True)
        assert out.requires_grad
        assert not softmax_lse.requires_grad
        out.sum().backward()
        return (out.detach(), *(leaf.grad for leaf in leaves))

    here = gradients()
    by_dispatcher()
    assert all(bits_equal(a, b) for a, b in zip(here, gradients(), strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@names
def test_no_graph_is_recorded_without_gradients(name: str, mode: Callable[[], Any]) -> None:
    call = CALLS[name]()
    for tensor in "qkv":
        if call.arguments.get(tensor) is not None and name != "flash_attn_with_kvcache":
            call.arguments[tensor].requires_grad_()
    with mode():
        out = call()
    assert out.grad_fn is None
    assert not out.requires_grad


def test_write_to_a_saved_tensor_raises() -> None:
    call = qkv_call()
    q = call.arguments["q"].requires_grad_()
    out = call()
    with torch.no_grad():
        q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts the package's ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "flash_attn_deterministic":
            self.ops.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_modes_see_the_ops() -> None:
    call = qkv_call()
    for name in "qkv":
        call.arguments[name].requires_grad_()
    with Counts() as counts:
        call().sum().backward()
    assert [name.split("::")[1] for name in counts.ops] == ["fwd", "bwd"]


def test_subclasses_see_the_op() -> None:
    seen = []

    class Seeing(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            run = super().__torch_function__
            return run(func, types, args, kwargs or {})  # type: ignore[no-untyped-call, unused-ignore]

    q, k, v = (t.as_subclass(Seeing) for t in make_inputs(2, 5, 9, 4, 2, 32, torch.bfloat16))
    interface.flash_attn_func(q, k, v)
    assert any("flash_attn_deterministic.fwd" in name for name in seen)


def test_needs_dispatcher() -> None:
    q = torch.ones(2)
    assert not dispatch.needs_dispatcher(q, torch.nn.Parameter(q), None)
    assert dispatch.needs_dispatcher(q, q.as_subclass(type("Own", (torch.Tensor,), {})))
    with Counts():
        assert dispatch.needs_dispatcher(q)
    with torch.device("cpu"):
        assert dispatch.needs_dispatcher(q)
    with torch.autograd.forward_ad.dual_level():
        assert dispatch.needs_dispatcher(q)
    seen = []
    torch.func.vmap(lambda x: seen.append(dispatch.needs_dispatcher(x)) or x)(q)  # type: ignore[func-returns-value]
    assert seen == [True]
