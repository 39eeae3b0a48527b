"""Hopper's wgmma gives the bits of mma.sync, on which the equality of the two families rests.

The kernels of wgmma.cu run the same chains of products both ways, through the wrappers that the
sm90 family uses. They are compiled here, by an nvcc that is at hand.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.attention import DTYPES
from tests.gpu.nvcc import compiled, find_nvcc

pytestmark = pytest.mark.gpu

SOURCE = Path(__file__).with_name("wgmma.cu")
COUNT = 64  # products side by side
# By mma.sync, or by wgmma with the first operand in shared memory or in registers.
WAYS = ("mma.sync", "shared", "registers")

# What operands are made of normal numbers.
DRAWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "wide": lambda x: x * torch.exp2(torch.randint_like(x, -12, 12)),
    "offset": lambda x: x + 4,
    "softmax": lambda x: torch.exp(x - 4).clamp(max=1),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is an instruction of compute capability 9.0 alone")
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc here to compile wgmma.cu; set CUDACXX")
    return compiled(nvcc, SOURCE, tmp_path_factory.mktemp("wgmma"), "90a")


def run(
    library: ctypes.CDLL,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    transposed: bool,
    way: str,
) -> torch.Tensor:
    """c + a b for each of the products; a (count, 64, k), c and the result (count, 64, columns).

    b: (count, columns, k); transposed: (count, k, columns). way: one of WAYS.
    """
    out = torch.empty_like(c)
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (a, b, c, out))
    sizes = (ctypes.c_int(n) for n in (a.shape[2], a.shape[0], c.shape[2], WAYS.index(way)))
    flags = (ctypes.c_bool(flag) for flag in (transposed, a.dtype == torch.bfloat16))
    torch.cuda.synchronize()  # the kernels run on a stream of their own
    assert library.run_products(*pointers, *sizes, *flags) == 0
    return out


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("k", [64, 256])
@pytest.mark.parametrize(("columns", "transposed", "way"), [
    pytest.param(64, False, "shared", id="qk-64"),
    pytest.param(128, False, "shared", id="qk-128"),
    pytest.param(64, False, "registers", id="qk-64-registers"),
    pytest.param(128, False, "registers", id="qk-128-registers"),
    pytest.param(32, True, "registers", id="pv-32"),
    pytest.param(64, True, "registers", id="pv-64"),
    pytest.param(96, True, "registers", id="pv-96"),
    pytest.param(128, True, "registers", id="pv-128"),
    pytest.param(192, True, "registers", id="pv-192"),
    pytest.param(256, True, "registers", id="pv-256"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_wgmma_equals_mma_sync(
    dtype: str, columns: int, transposed: bool, way: str, k: int, drawn: str, library: ctypes.CDLL
) -> None:
    torch.manual_seed(columns + k)
    shape = (COUNT, k, columns) if transposed else (COUNT, columns, k)
    a, b = (
        DRAWN[drawn](torch.randn(size, device="cuda")).to(DTYPES[dtype])
        for size in ((COUNT, 64, k), shape)
    )
    c = torch.randn(COUNT, 64, columns, device="cuda")
    wgmma, mma_sync = (
        run(library, a, b, c, transposed=transposed, way=each) for each in (way, "mma.sync")
    )
    # Both are products: the wrong layout of both would be equal too.
    exact = c.double() + a.double() @ (b if transposed else b.mT).double()
    scale = c.double().abs() + a.double().abs() @ (b if transposed else b.mT).double().abs()
    assert bool(((wgmma.double() - exact).abs() <= 1e-4 * scale).all())
    different = wgmma.view(torch.int32) != mma_sync.view(torch.int32)
    assert int(different.sum()) == 0
