"""The ops, called with what the public functions and their backwards call them with."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import bits_equal
from calls import CALLS, PAGES, READ_ONLY, Call, Recorder, int32, normal, paged_call
from flash_attn_deterministic import deterministic_mode, flash_attn_func
from flash_attn_deterministic.distributed.ops import CallSpec
from flash_attn_deterministic.errors import ArgumentError, ArgumentTypeError, MissingInstanceError
from flash_attn_deterministic.ops import cuda, library
from flash_attn_deterministic.schemas import BACKWARD, FORWARD, SUMS, argument_names
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = torch.ops.flash_attn_deterministic
Arguments = tuple[Any, ...]
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
LOCAL: dict[str, Any] = {"causal": False, "window_size": (3, 2), "softcap": 5.0}
LOCAL_DROPOUT = {**LOCAL, "dropout_p": 0.25, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.06])}
MAX = {"return_max_logits": True}
MAKERS: dict[str, Callable[..., Call]] = {**CALLS, "paged": paged_call}
NO_BACKWARD = {"seqused_k", "leftpad_k", "block_table", "k_cache"}
DENSE = "flash_attn_func"
VARLEN = "flash_attn_varlen_func"
CACHE = "flash_attn_with_kvcache"
# Name, function and changes of its call.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in MAKERS},
    **{f"{name}-dropout": (name, LOCAL_DROPOUT) for name in CALLS if name != CACHE},
    "dense-no-keys": (DENSE, {name: normal(2, 0, 2, 32) for name in "kv"}),
    "dense-no-queries": (DENSE, {"q": normal(2, 0, 4, 32)}),
    "dense-narrow-v": (DENSE, {"v": normal(2, 9, 2, 24)}),
    "dense-transposed": (DENSE, {
        name: normal(2, heads, 9, 32, seed=heads).transpose(1, 2)
        for name, heads in {"q": 4, "k": 2, "v": 2}.items()
    }),
    **{f"{name}-sinks": (name, {"learnable_sink": SINKS}) for name in (DENSE, VARLEN, CACHE)},
    **{f"{name}-max": (name, MAX) for name in (DENSE, VARLEN)},
    "varlen-used": (VARLEN, {"seqused_k": int32(4, 0, 9)}),
    "varlen-leftpad": (VARLEN, {"leftpad_k": int32(1, 0, 2)}),
    "cache-read-only": (CACHE, READ_ONLY),
    "cache-index": (CACHE, {"cache_batch_idx": int32(1, 0)}),
    "cache-leftpad": (CACHE, {**LOCAL, "cache_leftpad": int32(1, 0)}),
    "cache-paged": (CACHE, PAGES),
}  # fmt: skip
KEPT = [name for name in FORMS if name in CALLS or name.endswith(("-max", "-dropout"))]


@functools.cache
def recorded(form: str, keep_residual: bool = False) -> list[tuple[str, Arguments]]:
    """The ops that a call and its backward run, and their arguments."""
    name, changes = FORMS[form]
    call = MAKERS[name](32)
    call.arguments |= changes
    leaves = {} if NO_BACKWARD & call.arguments.keys() else call.leaves()
    with deterministic_mode(split_size=64, keep_residual=keep_residual), Recorder() as recorder:
        found = call(**leaves, **call.lse())[:2]
        if leaves:
            torch.autograd.grad(found, list(leaves.values()), [torch.ones_like(x) for x in found])
    return [
        (op, tuple(x.detach() if "bwd" in op and torch.is_tensor(x) else x for x in arguments))
        for op, arguments in recorder.calls
    ]


forms = pytest.mark.parametrize(
    "ops",
    [
        *(pytest.param(functools.partial(recorded, form), id=form) for form in FORMS),
        *(pytest.param(functools.partial(recorded, f, True), id=f"{f}-residual") for f in KEPT),
    ],
)
Ops = Callable[[], list[tuple[str, Arguments]]]


def op(name: str) -> Any:
    return getattr(OPS, name).default


def place_of(name: str, argument: str) -> int:
    return argument_names(name).index(argument)


# torch 2.15's own check looks at the gradients of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@forms
def test_ops_pass_opcheck(ops: Ops) -> None:
    for name, arguments in ops():
        torch.library.opcheck(op(name), arguments)
        assert torch.Tag.pt2_compliant_tag in op(name).tags


def test_ops_of_sums_pass_opcheck() -> None:
    _, (_, arguments) = recorded(VARLEN)
    torch.library.opcheck(op("varlen_bwd_sums"), arguments)
    sums = torch.ones(16, 2, 32)
    torch.library.opcheck(op("finish_key_sums"), (sums, sums, normal(16, 2, 32), 0.125, 0.0, 0.0))


def test_every_op_was_met() -> None:
    met = {name for form in FORMS for name, _ in recorded(form)}
    met |= {name for form in KEPT for name, _ in recorded(form, True)}
    assert met == {*FORWARD, *BACKWARD, *SUMS} - {"varlen_bwd_sums", "finish_key_sums"}


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_names_of_arguments(name: str) -> None:
    assert argument_names(name) == tuple(argument.name for argument in op(name)._schema.arguments)


@forms
def test_fake_tensors_have_the_layout_and_stay_on_their_device(ops: Ops) -> None:
    for name, arguments in ops():
        real = op(name)(*(x.clone() if torch.is_tensor(x) else x for x in arguments))
        with FakeTensorMode():
            fakes = (
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
                if torch.is_tensor(x)
                else x
                for x in arguments
            )
            fake = op(name)(*fakes)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (real, fake)), strict=True):
            assert a.is_contiguous()
            assert b.device.type == "cuda"
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("form", CALLS)
def test_op_checks_the_split_size(form: str) -> None:
    name, arguments = recorded(form)[0]
    place = place_of(name, "split_size")
    with pytest.raises(ArgumentError, match=r"split_size: .* the nearest valid: 64 and 128"):
        op(name)(*arguments[:place], 100, *arguments[place + 1 :])


# Without any tensor, torch does not know whose kernel to call: qkv is the only one.
@pytest.mark.parametrize("form", [name for name in CALLS if name != "flash_attn_qkvpacked_func"])
def test_op_names_a_missing_tensor(form: str) -> None:
    """torch passes None on as a tensor that is not there."""
    for name, arguments in recorded(form):
        kinds = [str(argument.type) for argument in op(name)._schema.arguments]
        place = kinds.index("Tensor")
        with pytest.raises(ArgumentTypeError, match=r"\w+: expected a torch.Tensor, got NoneType"):
            op(name)(*arguments[:place], None, *arguments[place + 1 :])


# --- CUDA ---------------------------------------------------------------------------------------


@pytest.mark.skipif(library.kernels_missing == "", reason="the CUDA kernels are loaded")
@forms
def test_error_of_a_cuda_call_without_kernels(ops: Ops) -> None:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for name, arguments in ops():
        with pytest.raises(MissingInstanceError, match=r"no CUDA kernels: .*; install the release"):
            op(name).redispatch(keys, *arguments)


class _Library:
    """Records what is registered in a torch.library.Library."""

    def __init__(self) -> None:
        self.functions: dict[str, Any] = {}

    def impl(self, name: str, function: Any, key: str) -> None:
        assert key == "CUDA"
        self.functions[name] = function


def test_error_of_an_op_that_the_library_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "has_kernel", lambda name: name == "fwd")
    library = _Library()
    cuda.register_missing(library, "")
    assert set(library.functions) == {*FORWARD, *BACKWARD, *SUMS} - {"fwd"}
    with pytest.raises(
        MissingInstanceError, match="the wheel's library does not implement varlen_fwd; install"
    ):
        library.functions["varlen_fwd"]()


def test_cpu_torch_loads_no_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("loaded"))
    assert "built without CUDA" in cuda.load(Path(__file__))


def test_reason_of_a_wheel_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "the wheel holds no kernels" in cuda.load(tmp_path / "_C.so")


def test_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    broken = tmp_path / "_C.so"
    broken.write_bytes(b"not a library")
    reason = cuda.load(broken)
    assert re.search(r"_C\.so does not load into torch .* needs torch >= 2\.10 \(", reason)
    monkeypatch.setattr(cuda, "has_kernel", lambda name: False)
    library = _Library()
    cuda.register_missing(library, reason)
    with pytest.raises(MissingInstanceError, match=r"no CUDA kernels: .*_C\.so does not load"):
        library.functions["varlen_fwd"]()


def test_compiler_does_not_trace_the_reference() -> None:
    """Under a dispatch mode torch.compile skips the call of the op, and would trace into the op."""
    from torch.utils.flop_counter import FlopCounterMode

    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    q = normal(1, 3, 1, 32)
    compiled: Any = torch.compile(flash_attn_func, backend=backend)
    with FlopCounterMode(display=False):
        compiled(q, q, q)
    assert bits_equal(compiled(q, q, q), flash_attn_func(q, q, q))
    assert [each for each in graphs if "flash_attn_deterministic.fwd" not in str(each)] == []


# --- The ops of several ranks, on one -----------------------------------------------------------


def sequence_call(packed: bool, group: str) -> tuple[Arguments, Arguments]:
    """q, k and v, and the other arguments of sequence_fwd."""
    q, k, v = (normal(2, n, h, 32, seed=n) for n, h in ((5, 4), (9, 2), (9, 2)))
    starts: Arguments = (None, None)
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        starts = (int32(0, 5, 10), int32(0, 9, 18))
    spec = CallSpec(group, "contiguous", 0, 0, True, False, 0.125, -1, 0, 0.0, 64, True, True)
    return (q, k, v), (*starts, *spec)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_ops_of_ranks_pass_opcheck(packed: bool, one_rank: str) -> None:
    qkv, call = sequence_call(packed, one_rank)
    torch.library.opcheck(OPS.sequence_fwd.default, (*qkv, None, *call))
    out, softmax_lse = OPS.sequence_fwd(*qkv, None, *call)
    torch.library.opcheck(OPS.sequence_bwd.default, (out, *qkv, out, softmax_lse, *call, -1))
    leaves = [x.clone().requires_grad_() for x in qkv]
    torch.library.opcheck(OPS.sequence_fwd.default, (*leaves, None, *call))
