from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import make_inputs
from flash_attn_deterministic import _library
from flash_attn_deterministic.errors import LibraryError, MissingInstanceError

OPS = torch.ops.flash_attn_deterministic


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [
        pytest.param(5, 9, id="usual"),
        pytest.param(3, 0, id="no-keys"),
        pytest.param(0, 3, id="no-q"),
    ],
)
def test_op_passes_opcheck(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    q, k, v = make_inputs(2, seqlen_q, seqlen_k, 4, 2, 32)
    torch.library.opcheck(OPS.fwd.default, (q, k, v, 0.125, causal))


def test_op_passes_opcheck_on_strided_inputs() -> None:
    q, k, v = (x.transpose(1, 2) for x in make_inputs(2, 4, 4, 5, 5, 32))
    torch.library.opcheck(OPS.fwd.default, (q, k, v, 0.125, True))


def test_schema() -> None:
    assert str(OPS.fwd.default._schema) == (
        "flash_attn_deterministic::fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, "
        "bool causal) -> (Tensor out, Tensor softmax_lse)"
    )
    assert torch.Tag.pt2_compliant_tag in OPS.fwd.default.tags


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "float64"])
def test_outputs_are_contiguous_and_like_the_meta_kernels(dtype: torch.dtype) -> None:
    q, k, v = (x.transpose(1, 2) for x in make_inputs(2, 4, 4, 5, 5, 32, dtype))
    real = OPS.fwd(q, k, v, 0.125, False)
    fake = OPS.fwd(q.to("meta"), k.to("meta"), v.to("meta"), 0.125, False)
    for a, b in zip(real, fake, strict=True):
        assert a.is_contiguous()
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_import_stays_light() -> None:
    script = (
        "import sys, torch; before = set(sys.modules); import flash_attn_deterministic;"
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "flash_attn_deterministic.interface" in loaded
    assert [name for name in loaded if not name.startswith("flash_attn_deterministic")] == []


def test_cuda_op_exists_with_or_without_kernels() -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("flash_attn_deterministic::fwd", "CUDA")


@pytest.mark.skipif(_library.kernels_missing == "", reason="the CUDA kernels are loaded")
def test_cuda_call_without_kernels_says_why() -> None:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(MissingInstanceError, match=r"no CUDA kernels: .*; install the release"):
        OPS.fwd.default.redispatch(keys, *make_inputs(), 0.125, False)


def test_cpu_torch_loads_no_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("loaded"))
    assert "built without CUDA" in _library._load_kernels(Path(__file__))


def test_wheel_without_kernels_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "the wheel holds no kernels" in _library._load_kernels(tmp_path / "_C.so")


def test_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    broken = tmp_path / "_C.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(LibraryError, match=r"does not load into torch .* needs torch >= 2\.10"):
        _library._load_kernels(broken)
