"""The ops, called directly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import make_inputs
from bits import bits_equal
from calls import int32, normal
from flash_attn_deterministic import flash_attn_func
from flash_attn_deterministic.distributed.ops import CallSpec
from flash_attn_deterministic.errors import ArgumentError, ArgumentTypeError, MissingInstanceError
from flash_attn_deterministic.ops import cuda, library
from flash_attn_deterministic.schemas import BACKWARD, FORWARD, SUMS, argument_names
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = torch.ops.flash_attn_deterministic
TREE = (64, True)
CAUSAL = (0.125, -1, 0, 0.0)
LOCAL = (0.125, 3, 2, 5.0)
RNG = torch.tensor([123, 456])
Arguments = tuple[Any, ...]


def fwd(
    seqlen_q: int = 5,
    seqlen_k: int = 9,
    scores: Arguments = CAUSAL,
    dropout_p: float = 0.0,
) -> Arguments:
    qkv = make_inputs(2, seqlen_q, seqlen_k, 4, 2, 32)
    rng_state = RNG if dropout_p else None
    return (*qkv, None, rng_state, dropout_p, *scores, *TREE, True)


def varlen_fwd(
    scores: Arguments = CAUSAL, dropout_p: float = 0.0, **given: torch.Tensor
) -> Arguments:
    optional = ("seqused_k", "leftpad_k", "block_table", "alibi_slopes")
    page = (4, 16) if "block_table" in given else (16,)
    return (
        normal(8, 4, 32),
        normal(*page, 2, 32, seed=1),
        normal(*page, 2, 32, seed=2),
        int32(0, 3, 3, 8),
        int32(0, 5, 7, 16),
        *(given.get(name) for name in optional),
        RNG if dropout_p else None,
        5,
        9,
        dropout_p,
        *scores,
        *TREE,
        True,
    )


def bwd(*arguments: Any, **options: Any) -> Arguments:
    """Arguments of the backward of a call of fwd."""
    call = fwd(*arguments, **options)
    out, softmax_lse = OPS.fwd(*call)
    return (torch.ones_like(out), *call[:3], out, softmax_lse, *call[3:10], True)


def varlen_bwd(**options: Any) -> Arguments:
    """Arguments of the backward of a call of varlen_fwd."""
    call = varlen_fwd(**options)
    out, softmax_lse = OPS.varlen_fwd(*call)
    return (torch.ones_like(out), *call[:3], out, softmax_lse, *call[3:5], *call[8:17], True)


def qkvpacked_fwd(
    scores: Arguments = CAUSAL, dropout_p: float = 0.0, with_q: bool = False
) -> Arguments:
    """Arguments of the op on one tensor of q, k and v, or on q and one of k and v."""
    packed = (normal(2, 5, 4, 32), normal(2, 9, 2, 2, 32, seed=1)) if with_q else (None, QKV_PACKED)
    return (*packed, None, RNG if dropout_p else None, dropout_p, *scores, *TREE, True)


def varlen_qkvpacked_fwd(
    scores: Arguments = CAUSAL, dropout_p: float = 0.0, with_q: bool = False
) -> Arguments:
    """The same for packed sequences; the last tokens belong to none."""
    packed = (normal(8, 4, 32), normal(16, 2, 2, 32, seed=1)) if with_q else (None, QKV_PACKED[0])
    starts = (int32(0, 3, 3, 7), int32(0, 5, 7, 15)) if with_q else (int32(0, 3, 6),) * 2
    random = (SLOPES, RNG if dropout_p else None)
    return (*packed, *starts, *random, 4, 8, dropout_p, *scores, *TREE, True)


def qkvpacked_bwd(**options: Any) -> Arguments:
    """Arguments of the backward of a call of qkvpacked_fwd."""
    call = qkvpacked_fwd(**options)
    out, softmax_lse = OPS.qkvpacked_fwd(*call)
    return (torch.ones_like(out), *call[:2], out, softmax_lse, *call[2:9], True)


def varlen_qkvpacked_bwd(**options: Any) -> Arguments:
    """Arguments of the backward of a call of varlen_qkvpacked_fwd."""
    call = varlen_qkvpacked_fwd(**options)
    out, softmax_lse = OPS.varlen_qkvpacked_fwd(*call)
    return (torch.ones_like(out), *call[:2], out, softmax_lse, *call[2:13], True)


def kvcache_fwd(scores: Arguments = CAUSAL, paged: bool = False, **given: Any) -> Arguments:
    cache = (6, 16) if paged else (3, 20)
    optional = {
        "cache_seqlens": int32(9, 4),
        "block_table": int32(5, 0, 1, 3).reshape(2, 2) if paged else None,
        **given,
    }
    names = "k v cache_seqlens rotary_cos rotary_sin cache_batch_idx cache_leftpad block_table"
    return (
        normal(2, 3, 4, 32),
        normal(*cache, 2, 32, seed=1),
        normal(*cache, 2, 32, seed=2),
        *(optional.get(name) for name in [*names.split(), "alibi_slopes"]),
        *scores,
        True,
        *TREE,
    )


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
QKV_PACKED = normal(2, 7, 3, 4, 32)
NEW: dict[str, Any] = {"k": normal(2, 3, 2, 32, seed=3), "v": normal(2, 3, 2, 32, seed=4)}
ROTARY: dict[str, Any] = {"rotary_cos": normal(32, 8, seed=5), "rotary_sin": normal(32, 8, seed=6)}
CASES = [
    pytest.param("fwd", fwd(), id="fwd-causal"),
    pytest.param("fwd", fwd(scores=LOCAL), id="fwd-local"),
    pytest.param("fwd", (*fwd(), SINKS), id="fwd-sinks"),
    pytest.param("varlen_fwd", (*varlen_fwd(), SINKS), id="varlen-sinks"),
    pytest.param("kvcache_fwd", (*kvcache_fwd(), SINKS), id="kvcache-sinks"),
    pytest.param("fwd", fwd(3, 0), id="fwd-no-keys"),
    pytest.param("fwd", fwd(0, 3), id="fwd-no-queries"),
    pytest.param("fwd", fwd(dropout_p=0.25), id="fwd-dropout"),
    pytest.param("varlen_fwd", varlen_fwd(), id="varlen"),
    pytest.param(
        "varlen_fwd",
        varlen_fwd(LOCAL, seqused_k=int32(4, 0, 9), alibi_slopes=SLOPES),
        id="varlen-used",
    ),
    pytest.param("varlen_fwd", varlen_fwd(leftpad_k=int32(1, 0, 2)), id="varlen-leftpad"),
    pytest.param(
        "varlen_fwd", varlen_fwd(block_table=int32(2, 0, 3).reshape(3, 1)), id="varlen-paged"
    ),
    pytest.param("varlen_fwd", varlen_fwd(dropout_p=0.25), id="varlen-dropout"),
    pytest.param("qkvpacked_fwd", qkvpacked_fwd(), id="qkvpacked"),
    pytest.param("qkvpacked_fwd", qkvpacked_fwd(LOCAL, dropout_p=0.25, with_q=True), id="kvpacked"),
    pytest.param("varlen_qkvpacked_fwd", varlen_qkvpacked_fwd(), id="varlen-qkvpacked"),
    pytest.param(
        "varlen_qkvpacked_fwd",
        varlen_qkvpacked_fwd(LOCAL, dropout_p=0.25, with_q=True),
        id="varlen-kvpacked",
    ),
    *(
        pytest.param(f"{name}_with_residual", arguments, id=f"{name}-residual")
        for name, arguments in {
            "fwd": fwd(dropout_p=0.25),
            "varlen_fwd": varlen_fwd(dropout_p=0.25),
            "qkvpacked_fwd": qkvpacked_fwd(dropout_p=0.25),
            "varlen_qkvpacked_fwd": varlen_qkvpacked_fwd(dropout_p=0.25),
        }.items()
    ),
    *(
        pytest.param(f"{name}_with_row_max{residual}", arguments, id=f"{name}-row-max{residual}")
        for name, arguments in {"fwd": fwd(), "varlen_fwd": varlen_fwd()}.items()
        for residual in ("", "_with_residual")
    ),
    pytest.param("kvcache_fwd", kvcache_fwd(), id="kvcache-read-only"),
    pytest.param(
        "kvcache_fwd", kvcache_fwd(**NEW, cache_batch_idx=int32(2, 0)), id="kvcache-append"
    ),
    pytest.param("kvcache_fwd", kvcache_fwd(LOCAL, **NEW, **ROTARY), id="kvcache-rotary"),
    pytest.param("kvcache_fwd", kvcache_fwd(paged=True, **NEW, **ROTARY), id="kvcache-paged"),
    pytest.param("kvcache_fwd", kvcache_fwd(cache_leftpad=int32(1, 0)), id="kvcache-leftpad"),
]
BACKWARD_CASES = [
    pytest.param("bwd", bwd(), id="bwd-causal"),
    pytest.param("bwd", bwd(scores=LOCAL, dropout_p=0.25), id="bwd-local-dropout"),
    *(
        pytest.param(
            name, (*call(), torch.zeros(shape, dtype=torch.bfloat16)), id=f"{name}-residual"
        )
        for name, call, shape in (
            ("bwd", bwd, (2, 5, 4, 32)),
            ("varlen_bwd", varlen_bwd, (8, 4, 32)),
            ("qkvpacked_bwd", qkvpacked_bwd, (2, 7, 4, 32)),
        )
    ),
    pytest.param("bwd", (*bwd(), None, torch.ones(2, 4, 5)), id="bwd-dlse"),
    pytest.param("varlen_bwd", (*varlen_bwd(), None, torch.ones(4, 8)), id="varlen-bwd-dlse"),
    pytest.param("bwd", bwd(3, 0), id="bwd-no-keys"),
    pytest.param("bwd", bwd(0, 3), id="bwd-no-queries"),
    pytest.param("varlen_bwd", varlen_bwd(), id="varlen-bwd"),
    pytest.param(
        "varlen_bwd",
        varlen_bwd(scores=LOCAL, dropout_p=0.25, alibi_slopes=SLOPES),
        id="varlen-bwd-local-dropout",
    ),
    pytest.param("qkvpacked_bwd", qkvpacked_bwd(), id="qkvpacked-bwd"),
    pytest.param("qkvpacked_bwd", qkvpacked_bwd(with_q=True), id="kvpacked-bwd"),
    pytest.param(
        "varlen_qkvpacked_bwd", varlen_qkvpacked_bwd(dropout_p=0.25), id="varlen-qkvpacked-bwd"
    ),
    pytest.param(
        "varlen_qkvpacked_bwd", varlen_qkvpacked_bwd(with_q=True), id="varlen-kvpacked-bwd"
    ),
]
ALL_CASES = CASES + BACKWARD_CASES
KEY_SUMS = (torch.ones(16, 2, 32), torch.ones(16, 2, 32))
ROWS = (*(normal(2, 5, 4, 32, seed=n) for n in (1, 2)), torch.ones(2, 4, 5), SINKS)
PACKED_ROWS = (*(normal(8, 4, 32, seed=n) for n in (1, 2)), torch.ones(4, 8), SINKS)
SUMS_CASES = [
    pytest.param("sink_bwd", (*ROWS, None, 0), id="sink-bwd"),
    pytest.param(
        "sink_bwd",
        (*ROWS, None, 0, torch.zeros(2, 5, 4, 32, dtype=torch.bfloat16), torch.ones(2, 4, 5)),
        id="sink-bwd-residual-dlse",
    ),
    pytest.param("sink_bwd", (*PACKED_ROWS, int32(0, 3, 3, 7), 4), id="sink-bwd-packed"),
    pytest.param("varlen_bwd_sums", varlen_bwd(), id="sums"),
    pytest.param(
        "finish_key_sums", (*KEY_SUMS, normal(16, 2, 32), 0.125, 0.0, 0.0), id="finish-sums"
    ),
]


def op(name: str) -> Any:
    return getattr(OPS, name).default


@pytest.mark.parametrize(("name", "arguments"), ALL_CASES + SUMS_CASES)
def test_op_passes_opcheck(name: str, arguments: Arguments) -> None:
    torch.library.opcheck(op(name), arguments)
    assert torch.Tag.pt2_compliant_tag in op(name).tags


def test_every_op_has_a_case() -> None:
    met = {str(case.values[0]) for case in ALL_CASES + SUMS_CASES}
    assert met == {*FORWARD, *BACKWARD, *SUMS}


# torch 2.15's own check looks at the gradients of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("fwd", fwd(), id="fwd"),
        pytest.param("fwd", fwd(scores=LOCAL, dropout_p=0.25), id="fwd-local-dropout"),
        pytest.param("fwd", (*fwd()[:2], normal(2, 9, 2, 24), *fwd()[3:]), id="fwd-narrow-v"),
        pytest.param("varlen_fwd", varlen_fwd(), id="varlen_fwd"),
        pytest.param("fwd", (*fwd(), SINKS.clone().requires_grad_()), id="fwd-sinks"),
        pytest.param(
            "varlen_fwd", (*varlen_fwd(), SINKS.clone().requires_grad_()), id="varlen-sinks"
        ),
        pytest.param("fwd_with_residual", fwd(), id="fwd-residual"),
        pytest.param("varlen_fwd_with_residual", varlen_fwd(), id="varlen_fwd-residual"),
        pytest.param("fwd_with_row_max", fwd(), id="fwd-row-max"),
        pytest.param("varlen_fwd_with_row_max_with_residual", varlen_fwd(), id="varlen-both"),
        pytest.param("qkvpacked_fwd_with_residual", qkvpacked_fwd(), id="qkvpacked-residual"),
        pytest.param(
            "varlen_fwd", varlen_fwd(dropout_p=0.25, alibi_slopes=SLOPES), id="varlen_fwd-dropout"
        ),
        pytest.param("qkvpacked_fwd", qkvpacked_fwd(dropout_p=0.25), id="qkvpacked"),
        pytest.param("qkvpacked_fwd", qkvpacked_fwd(with_q=True), id="kvpacked"),
        pytest.param("varlen_qkvpacked_fwd", varlen_qkvpacked_fwd(), id="varlen-qkvpacked"),
        pytest.param(
            "varlen_qkvpacked_fwd", varlen_qkvpacked_fwd(with_q=True), id="varlen-kvpacked"
        ),
    ],
)
def test_op_passes_opcheck_with_gradients(name: str, arguments: Arguments) -> None:
    count = 2 if "qkvpacked" in name else 3
    wanted = (None if x is None else x.clone().requires_grad_() for x in arguments[:count])
    torch.library.opcheck(op(name), (*wanted, *arguments[count:]))


@pytest.mark.parametrize("name", ["fwd", "bwd"])
def test_op_passes_opcheck_on_strided_inputs(name: str) -> None:
    q, k, v = (x.transpose(1, 2) for x in make_inputs(2, 4, 4, 5, 5, 32))
    arguments: Arguments = (q, k, v, None, None, 0.0, *CAUSAL, *TREE, True)
    if name == "bwd":
        arguments = (q, q, k, v, *OPS.fwd(*arguments), None, None, 0.0, *CAUSAL, True)
    torch.library.opcheck(op(name), arguments)


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_names_of_arguments(name: str) -> None:
    assert argument_names(name) == tuple(argument.name for argument in op(name)._schema.arguments)


def test_outputs_are_contiguous_and_like_the_meta_kernels() -> None:
    q, k, v = (x.transpose(1, 2) for x in make_inputs(2, 4, 4, 5, 5, 32))
    options: Arguments = (None, None, 0.0, *CAUSAL)
    meta = [x.to("meta") for x in (q, k, v)]
    real, fake = OPS.fwd(q, k, v, *options, *TREE, True), OPS.fwd(*meta, *options, *TREE, True)
    real += OPS.bwd(q, q, k, v, *real, *options, True)
    fake += OPS.bwd(meta[0], *meta, *fake, *options, True)
    for a, b in zip(real, fake, strict=True):
        assert a.is_contiguous()
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize(("name", "arguments"), ALL_CASES)
def test_fake_tensors_stay_on_their_device(name: str, arguments: Arguments) -> None:
    real = op(name)(*(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments))
    with FakeTensorMode():
        fakes = (
            torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, torch.Tensor) else x
            for x in arguments
        )
        for a, b in zip(real, op(name)(*fakes), strict=True):
            assert b.device.type == "cuda"
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_op_checks_the_split_size(name: str, arguments: Arguments) -> None:
    place = [argument.name for argument in op(name)._schema.arguments].index("split_size")
    with pytest.raises(ArgumentError, match=r"split_size: .* the nearest valid: 64 and 128"):
        op(name)(*arguments[:place], 100, *arguments[place + 1 :])


# Without any tensor, torch does not know whose kernel to call.
SOME_LEFT = [case for case in ALL_CASES if case.id != "qkvpacked"]


@pytest.mark.parametrize(("name", "arguments"), SOME_LEFT)
def test_op_names_a_missing_tensor(name: str, arguments: Arguments) -> None:
    """torch passes None on as a tensor that is not there."""
    kinds = [str(argument.type) for argument in op(name)._schema.arguments]
    place = kinds.index("Tensor")
    with pytest.raises(ArgumentTypeError, match=r"\w+: expected a torch.Tensor, got NoneType"):
        op(name)(*arguments[:place], None, *arguments[place + 1 :])


# --- CUDA ---------------------------------------------------------------------------------------


@pytest.mark.skipif(library.kernels_missing == "", reason="the CUDA kernels are loaded")
@pytest.mark.parametrize(("name", "arguments"), ALL_CASES)
def test_error_of_a_cuda_call_without_kernels(name: str, arguments: Arguments) -> None:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
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
        library.functions["varlen_fwd"](*varlen_fwd())


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
        library.functions["varlen_fwd"](*varlen_fwd())


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
    spec = CallSpec(group, "contiguous", 0, 0, True, False, *CAUSAL, 64, True, True)
    return (q, k, v), (*starts, *spec)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_ops_of_ranks_pass_opcheck(packed: bool, one_rank: str) -> None:
    qkv, call = sequence_call(packed, one_rank)
    torch.library.opcheck(OPS.sequence_fwd.default, (*qkv, None, *call))
    out, softmax_lse = OPS.sequence_fwd(*qkv, None, *call)
    torch.library.opcheck(OPS.sequence_bwd.default, (out, *qkv, out, softmax_lse, *call, -1))
    leaves = [x.clone().requires_grad_() for x in qkv]
    torch.library.opcheck(OPS.sequence_fwd.default, (*leaves, None, *call))
