from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from flash_attn_deterministic import flash_attn_func
from flash_attn_deterministic.checks.tensors import check_alike
from flash_attn_deterministic.errors import ArgumentError, UnsupportedDeviceError


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


GOOD = _tensor(2, 5, 4, 64)
SHORT_K = _tensor(2, 7, 2, 64)


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


class _Elsewhere:
    """A tensor on a device that this machine does not have."""

    dtype = torch.bfloat16
    device = torch.device("mps", 0)


def test_other_device_types_are_refused() -> None:
    tensor = _Elsewhere()
    with pytest.raises(UnsupportedDeviceError, match=r"q: expected .* got one on mps:0"):
        check_alike(tensor, ())  # type: ignore[arg-type]


# --- ALiBi slopes ---


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=["heads", "batch-heads"])
def test_slopes_made_in_a_graph_with_symbolic_sizes(shape: tuple[int, ...]) -> None:
    def call(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, k, alibi_slopes=torch.ones(shape))

    compiled: Any = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(GOOD, SHORT_K), call(GOOD, SHORT_K))
    torch.compiler.reset()
