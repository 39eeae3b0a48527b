"""The ops themselves, called past the public functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import make_inputs
from calls import int32, normal
from flash_attn_deterministic import _library
from flash_attn_deterministic._ops import cuda
from flash_attn_deterministic._ops.autograd import DIFFERENTIABLE
from flash_attn_deterministic.errors import (
    ArgumentError,
    LibraryError,
    MissingInstanceError,
    UnsupportedError,
)

OPS = torch.ops.flash_attn_deterministic
TREE = (64, True)
CAUSAL = (0.125, -1, 0, 0.0)
LOCAL = (0.125, 3, 2, 5.0)
Arguments = tuple[Any, ...]


def fwd(seqlen_q: int = 5, seqlen_k: int = 9, scores: Arguments = CAUSAL) -> Arguments:
    return (*make_inputs(2, seqlen_q, seqlen_k, 4, 2, 32), None, *scores, *TREE)


def varlen_fwd(scores: Arguments = CAUSAL, **given: torch.Tensor) -> Arguments:
    optional = ("seqused_k", "leftpad_k", "block_table", "alibi_slopes")
    page = (4, 16) if "block_table" in given else (16,)
    return (
        normal(8, 4, 32),
        normal(*page, 2, 32, seed=1),
        normal(*page, 2, 32, seed=2),
        int32(0, 3, 3, 8),
        int32(0, 5, 7, 16),
        *(given.get(name) for name in optional),
        5,
        9,
        *scores,
        *TREE,
    )


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


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
NEW: dict[str, Any] = {"k": normal(2, 3, 2, 32, seed=3), "v": normal(2, 3, 2, 32, seed=4)}
ROTARY: dict[str, Any] = {"rotary_cos": normal(32, 8, seed=5), "rotary_sin": normal(32, 8, seed=6)}
CASES = [
    pytest.param("fwd", fwd(), id="fwd-causal"),
    pytest.param("fwd", fwd(scores=LOCAL), id="fwd-local"),
    pytest.param("fwd", fwd(3, 0), id="fwd-no-keys"),
    pytest.param("fwd", fwd(0, 3), id="fwd-no-queries"),
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
    pytest.param("kvcache_fwd", kvcache_fwd(), id="kvcache-read-only"),
    pytest.param(
        "kvcache_fwd", kvcache_fwd(**NEW, cache_batch_idx=int32(2, 0)), id="kvcache-append"
    ),
    pytest.param("kvcache_fwd", kvcache_fwd(LOCAL, **NEW, **ROTARY), id="kvcache-rotary"),
    pytest.param("kvcache_fwd", kvcache_fwd(paged=True, **NEW, **ROTARY), id="kvcache-paged"),
    pytest.param("kvcache_fwd", kvcache_fwd(cache_leftpad=int32(1, 0)), id="kvcache-leftpad"),
]


def op(name: str) -> Any:
    return getattr(OPS, name).default


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_op_passes_opcheck(name: str, arguments: Arguments) -> None:
    torch.library.opcheck(op(name), arguments)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_op_passes_opcheck_where_a_gradient_is_wanted(name: str) -> None:
    arguments = fwd() if name == "fwd" else varlen_fwd()
    wanted = tuple(x.clone().requires_grad_() for x in arguments[:3])
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op(name), (*wanted, *arguments[3:]), test_utils=utils)
    with pytest.raises(UnsupportedError, match="has no backward"):
        op(name)(*wanted, *arguments[3:])[0].sum().backward()


def test_op_passes_opcheck_on_strided_inputs() -> None:
    q, k, v = (x.transpose(1, 2) for x in make_inputs(2, 4, 4, 5, 5, 32))
    torch.library.opcheck(OPS.fwd.default, (q, k, v, None, *CAUSAL, *TREE))


SCORES = "float softmax_scale, int window_left, int window_right, float softcap, "
OUTPUTS = "int split_size, bool deterministic) -> (Tensor out, Tensor softmax_lse)"


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        pytest.param("fwd", "Tensor? alibi_slopes, ", id="fwd"),
        pytest.param(
            "varlen_fwd",
            "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, Tensor? leftpad_k, "
            "Tensor? block_table, Tensor? alibi_slopes, SymInt max_seqlen_q, SymInt max_seqlen_k, ",
            id="varlen_fwd",
        ),
    ],
)
def test_schema(name: str, schema: str) -> None:
    assert str(op(name)._schema) == (
        f"flash_attn_deterministic::{name}(Tensor q, Tensor k, Tensor v, {schema}{SCORES}{OUTPUTS}"
    )
    assert torch.Tag.pt2_compliant_tag in op(name).tags


def test_schema_of_the_op_that_writes() -> None:
    assert str(op("kvcache_fwd")._schema) == (
        "flash_attn_deterministic::kvcache_fwd(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, "
        "Tensor? k, Tensor? v, Tensor? cache_seqlens, Tensor? rotary_cos, Tensor? rotary_sin, "
        "Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, "
        f"Tensor? alibi_slopes, {SCORES}bool rotary_interleaved, {OUTPUTS}"
    )
    assert op("kvcache_fwd")._schema.is_mutable
    assert torch.Tag.pt2_compliant_tag in op("kvcache_fwd").tags


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "float64"])
def test_outputs_are_contiguous_and_like_the_meta_kernels(dtype: torch.dtype) -> None:
    q, k, v = (x.transpose(1, 2) for x in make_inputs(2, 4, 4, 5, 5, 32, dtype))
    real = OPS.fwd(q, k, v, None, *CAUSAL, *TREE)
    fake = OPS.fwd(q.to("meta"), k.to("meta"), v.to("meta"), None, *CAUSAL, *TREE)
    for a, b in zip(real, fake, strict=True):
        assert a.is_contiguous()
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_meta_tensors_give_the_shapes(name: str, arguments: Arguments) -> None:
    real = op(name)(*(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments))
    meta = op(name)(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments))
    for a, b in zip(real, meta, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_op_checks_the_split_size(name: str, arguments: Arguments) -> None:
    with pytest.raises(ArgumentError, match=r"split_size: .* the nearest valid: 64 and 128"):
        op(name)(*arguments[:-2], 100, True)


# --- CUDA ---------------------------------------------------------------------------------------


@pytest.mark.skipif(_library.kernels_missing == "", reason="the CUDA kernels are loaded")
@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_cuda_call_without_kernels_says_why(name: str, arguments: Arguments) -> None:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(MissingInstanceError, match=r"no CUDA kernels: .*; install the release"):
        op(name).redispatch(keys, *arguments)


class _Library:
    """Stands for a torch.library.Library, and notes what is registered."""

    def __init__(self) -> None:
        self.functions: dict[str, Any] = {}

    def impl(self, name: str, function: Any, key: str) -> None:
        assert key == "CUDA"
        self.functions[name] = function


def test_op_that_the_loaded_library_lacks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "has_kernel", lambda name: name == "fwd")
    library = _Library()
    cuda.register_missing(library, "")
    assert set(library.functions) == {"varlen_fwd", "kvcache_fwd"}
    with pytest.raises(
        MissingInstanceError, match="the wheel's library does not implement varlen_fwd; install"
    ):
        library.functions["varlen_fwd"](*varlen_fwd())


def test_cpu_torch_loads_no_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("loaded"))
    assert "built without CUDA" in cuda.load(Path(__file__))


def test_wheel_without_kernels_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "the wheel holds no kernels" in cuda.load(tmp_path / "_C.so")


def test_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    broken = tmp_path / "_C.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(LibraryError, match=r"does not load into torch .* needs torch >= 2\.10"):
        cuda.load(broken)
