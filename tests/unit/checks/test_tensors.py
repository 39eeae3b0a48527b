from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import (
    Call,
    int32,
    kvcache_call,
    kvpacked_call,
    qkv_call,
    qkvpacked_call,
    varlen_call,
)
from flash_attn_deterministic import flash_attn_func
from flash_attn_deterministic.checks.tensors import check_alike
from flash_attn_deterministic.errors import (
    ArgumentError,
    ArgumentTypeError,
    DtypeError,
    FlashAttnError,
    MissingInstanceError,
    UnsupportedDeviceError,
)


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


GOOD = _tensor(2, 5, 4, 64)
SHORT_K = _tensor(2, 7, 2, 64)


@pytest.mark.parametrize(
    ("q", "k", "v", "error", "message"),
    [
        pytest.param(
            [[1.0]], GOOD, GOOD, ArgumentTypeError, r"q: expected a torch\.Tensor, got list",
            id="q-no-tensor",
        ),
        pytest.param(
            GOOD, GOOD, None, ArgumentTypeError, r"v: expected a torch\.Tensor, got NoneType",
            id="v-no-tensor",
        ),
        pytest.param(
            GOOD, _tensor(2, 5, 64), GOOD, ArgumentError,
            r"k: expected 4 dimensions \(batch, seqlen, nheads, head_dim\), got shape \(2, 5, 64\)",
            id="k-rank-3",
        ),
        pytest.param(
            GOOD.float(), GOOD, GOOD, DtypeError,
            r"q: expected dtype torch\.float16 or torch\.bfloat16, got torch\.float32",
            id="q-float32",
        ),
        pytest.param(
            GOOD.double(), GOOD.double(), GOOD.double(), DtypeError, r"q: .* got torch\.float64",
            id="all-float64",
        ),
        pytest.param(
            GOOD, GOOD.half(), GOOD, DtypeError,
            r"k: expected torch\.bfloat16, the dtype of q, got torch\.float16",
            id="k-other-dtype",
        ),
        pytest.param(
            GOOD, GOOD, GOOD.float(), DtypeError, r"v: expected torch\.bfloat16.*float32",
            id="v-other-dtype",
        ),
        pytest.param(
            GOOD, GOOD.to("meta"), GOOD, ArgumentError,
            r"k: expected a tensor on cpu, the device of q, got one on meta",
            id="k-other-device",
        ),
        pytest.param(
            GOOD, GOOD, GOOD.to("meta"), ArgumentError, r"v: expected a tensor on cpu.* on meta",
            id="v-other-device",
        ),
        pytest.param(
            _tensor(0, 5, 4, 64), _tensor(0, 5, 4, 64), _tensor(0, 5, 4, 64), ArgumentError,
            r"q: expected a batch of at least 1, got shape \(0, 5, 4, 64\)",
            id="empty-batch",
        ),
        pytest.param(
            _tensor(2, 5, 4, 0), _tensor(2, 5, 4, 0), _tensor(2, 5, 4, 0), ArgumentError,
            r"q: expected a head_dim of 1 to 256, got 0",
            id="head-dim-0",
        ),
        pytest.param(
            _tensor(2, 5, 4, 257), _tensor(2, 5, 4, 257), _tensor(2, 5, 4, 257), ArgumentError,
            r"q: expected a head_dim of 1 to 256, got 257",
            id="head-dim-257",
        ),
        pytest.param(
            _tensor(2, 5, 0, 64), GOOD, GOOD, ArgumentError,
            r"q: expected at least 1 head, got shape \(2, 5, 0, 64\)",
            id="no-heads",
        ),
        pytest.param(
            GOOD, _tensor(2, 5, 0, 64), _tensor(2, 5, 0, 64), ArgumentError,
            r"k: expected a number of heads that divides the 4 heads of q, got 0",
            id="no-heads-k",
        ),
        pytest.param(
            GOOD, _tensor(2, 5, 3, 64), _tensor(2, 5, 3, 64), ArgumentError,
            r"k: expected a number of heads that divides the 4 heads of q, got 3",
            id="heads-dont-divide",
        ),
        pytest.param(
            GOOD, _tensor(2, 5, 8, 64), _tensor(2, 5, 8, 64), ArgumentError,
            r"k: expected a number of heads that divides the 4 heads of q, got 8",
            id="more-heads-k",
        ),
        pytest.param(
            GOOD, _tensor(3, 5, 4, 64), _tensor(3, 5, 4, 64), ArgumentError,
            r"k: expected shape \(2, seqlen_k, nheads_k, 64\).* got \(3, 5, 4, 64\)",
            id="k-batch",
        ),
        pytest.param(
            GOOD, _tensor(2, 5, 4, 32), _tensor(2, 5, 4, 32), ArgumentError,
            r"k: expected shape \(2, seqlen_k, nheads_k, 64\).* got \(2, 5, 4, 32\)",
            id="k-head-dim",
        ),
        pytest.param(
            GOOD, SHORT_K, _tensor(2, 6, 2, 64), ArgumentError,
            r"v: expected shape \(2, 7, 2, 64\), the shape of k, got \(2, 6, 2, 64\)",
            id="v-seqlen",
        ),
        pytest.param(
            GOOD, SHORT_K, _tensor(2, 7, 4, 64), ArgumentError,
            r"v: expected shape \(2, 7, 2, 64\), the shape of k, got \(2, 7, 4, 64\)",
            id="v-heads",
        ),
    ],
)  # fmt: skip
def test_wrong_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    error: type[FlashAttnError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        flash_attn_func(q, k, v)


def _jagged() -> torch.Tensor:
    parts = [GOOD[0], SHORT_K[0].repeat(1, 2, 1)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


OTHER_LAYOUTS = {
    "jagged": (_jagged, "a nested tensor of layout torch.jagged; pass its values"),
    "nested": (
        lambda: torch.nested.nested_tensor([GOOD[0], GOOD[0]]),
        "a nested tensor of layout torch.strided; pass its values",
    ),
    "sparse": (lambda: GOOD.to_sparse(), "one of layout torch.sparse_coo; convert it with"),
    "mkldnn": (lambda: GOOD.to_mkldnn(), "one of layout torch._mkldnn; convert it with"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("place", ["q", "k", "v"])
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_other_layouts_are_refused(layout: str, place: str) -> None:
    make, message = OTHER_LAYOUTS[layout]
    tensors: dict[str, Any] = {"q": GOOD, "k": GOOD, "v": GOOD, place: make()}
    with pytest.raises(
        ArgumentError, match=rf"{place}: expected .* torch\.strided, got {re.escape(message)}"
    ):
        flash_attn_func(**tensors)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        pytest.param(varlen_call, {"cu_seqlens_q": int32(0, 3, 3, 8).to_sparse()}, id="lengths"),
        pytest.param(qkv_call, {"alibi_slopes": torch.ones(4).to_sparse()}, id="slopes"),
        pytest.param(qkvpacked_call, {"qkv": GOOD.to_sparse()}, id="qkv"),
        pytest.param(kvcache_call, {"k_cache": torch.zeros(2, 20, 2, 32).to_sparse()}, id="cache"),
    ],
)
def test_other_layouts_are_refused_everywhere(
    make: Callable[[], Call], changes: dict[str, Any]
) -> None:
    (name,) = changes
    with pytest.raises(ArgumentError, match=rf"{name}: expected .* layout torch\.strided"):
        make()(**changes)


class _Elsewhere:
    """A tensor on a device that this machine does not have."""

    dtype = torch.bfloat16
    device = torch.device("mps", 0)


def test_other_device_types_are_refused() -> None:
    tensor = _Elsewhere()
    with pytest.raises(UnsupportedDeviceError, match=r"q: expected .* got one on mps:0"):
        check_alike(tensor, ())  # type: ignore[arg-type]


def test_errors_are_built_in_errors_too() -> None:
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(DtypeError, TypeError)
    assert issubclass(UnsupportedDeviceError, RuntimeError)
    assert issubclass(MissingInstanceError, RuntimeError)


# --- ALiBi slopes, and q, k and v in one tensor -------------------------------------------------


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=["nheads", "batch-nheads"])
def test_valid_alibi_slopes(shape: tuple[int, ...]) -> None:
    assert qkv_call()(alibi_slopes=torch.ones(shape)).shape == (2, 5, 4, 32)


@pytest.mark.parametrize(
    ("slopes", "error", "message"),
    [
        pytest.param(0.5, ArgumentTypeError, r"expected a torch\.Tensor or None", id="no-tensor"),
        pytest.param(
            torch.ones(4).half(), DtypeError, r"expected dtype torch\.float32", id="dtype",
        ),
        pytest.param(
            torch.ones(2), ArgumentError,
            r"\(nheads,\) = \(4,\) or \(batch, nheads\) = \(2, 4\), got \(2,\)", id="shape",
        ),
        pytest.param(torch.ones(4, 2), ArgumentError, r"got \(4, 2\)", id="transposed"),
        pytest.param(torch.ones(4, device="meta"), ArgumentError, "got one on meta", id="device"),
    ],
)  # fmt: skip
def test_wrong_alibi_slopes(slopes: Any, error: type[FlashAttnError], message: str) -> None:
    with pytest.raises(error, match=f"alibi_slopes: .*{message}"):
        qkv_call()(alibi_slopes=slopes)


@pytest.mark.parametrize(
    ("call", "changes", "error", "message"),
    [
        pytest.param(
            qkvpacked_call(), {"qkv": GOOD}, ArgumentError,
            r"qkv: expected 5 dimensions \(batch, seqlen, 3, nheads, head_dim\), got",
            id="qkv-rank",
        ),
        pytest.param(
            qkvpacked_call(), {"qkv": _tensor(2, 5, 2, 4, 64)}, ArgumentError,
            r"qkv: .* with 3 in its third dimension from the end", id="qkv-parts",
        ),
        pytest.param(
            qkvpacked_call(), {"qkv": _tensor(2, 5, 3, 4, 64).float()}, DtypeError,
            r"qkv: expected dtype", id="qkv-dtype",
        ),
        pytest.param(
            qkvpacked_call(), {"qkv": None}, ArgumentTypeError, "qkv: .* got NoneType", id="no-qkv",
        ),
        pytest.param(
            kvpacked_call(), {"kv": _tensor(2, 5, 3, 4, 32)}, ArgumentError,
            r"kv: .* with 2 in its third dimension from the end", id="kv-parts",
        ),
        pytest.param(
            kvpacked_call(), {"kv": _tensor(2, 5, 2, 3, 32)}, ArgumentError,
            "kv: expected a number of heads that divides the 4 heads of q, got 3", id="kv-heads",
        ),
        pytest.param(
            kvpacked_call(), {"kv": _tensor(3, 5, 2, 2, 32)}, ArgumentError,
            "kv: expected shape .* with the batch and head_dim of q", id="kv-batch",
        ),
    ],
)  # fmt: skip
def test_wrong_packed_tensors(
    call: Call, changes: dict[str, Any], error: type[FlashAttnError], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=["heads", "batch-heads"])
def test_slopes_made_in_a_graph_with_symbolic_sizes(shape: tuple[int, ...]) -> None:
    def call(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, k, alibi_slopes=torch.ones(shape))

    compiled: Any = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(GOOD, SHORT_K), call(GOOD, SHORT_K))
    torch.compiler.reset()
