from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from attention_cases import make_inputs
from flash_attn_deterministic import _checks, flash_attn_func
from flash_attn_deterministic._build_info import Instance, build_info
from flash_attn_deterministic.errors import (
    ArgumentError,
    ArgumentTypeError,
    DtypeError,
    FlashAttnError,
    MissingInstanceError,
    UnsupportedDeviceError,
    UnsupportedError,
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


class _Elsewhere:
    """Stands for a tensor on a device that this machine does not have."""

    device = torch.device("mps", 0)


def test_other_device_types_are_refused() -> None:
    tensor = _Elsewhere()
    with pytest.raises(UnsupportedDeviceError, match=r"q: expected .* got one on mps:0"):
        _checks._check_devices(tensor, tensor, tensor)  # type: ignore[arg-type]


@pytest.mark.parametrize("softmax_scale", [math.nan, math.inf, -math.inf, 0, 0.0, -1.5])
def test_softmax_scale_is_positive_and_finite(softmax_scale: float) -> None:
    with pytest.raises(
        ArgumentError,
        match=f"softmax_scale: expected a positive, finite number, got {softmax_scale}",
    ):
        flash_attn_func(GOOD, GOOD, GOOD, softmax_scale=softmax_scale)


@pytest.mark.parametrize("softmax_scale", [torch.tensor(1.0), "1"], ids=["tensor", "str"])
def test_softmax_scale_is_a_number(softmax_scale: object) -> None:
    with pytest.raises(ArgumentTypeError, match="softmax_scale: expected a float or None, got"):
        flash_attn_func(GOOD, GOOD, GOOD, softmax_scale=softmax_scale)  # type: ignore[call-overload]


@pytest.mark.parametrize("softmax_scale", [1e-30, 0.125, 3])
def test_positive_scales_are_accepted(softmax_scale: float) -> None:
    assert flash_attn_func(GOOD, GOOD, GOOD, softmax_scale=softmax_scale).shape == GOOD.shape


def test_causal_is_a_flag() -> None:
    with pytest.raises(ArgumentTypeError, match="causal: expected a bool, got float"):
        flash_attn_func(GOOD, GOOD, GOOD, causal=0.125)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"dropout_p": 0.1}, r"dropout_p: .* supports 0\.0 only, got 0\.1", id="p"),
        pytest.param(
            {"window_size": (128, 0)},
            r"window_size: .* supports \(-1, -1\) only, got \(128, 0\)",
            id="window",
        ),
        pytest.param(
            {"window_size": (-1, 0)}, r"window_size: .* got \(-1, 0\)", id="window-causal"
        ),
        pytest.param({"softcap": 30.0}, r"softcap: .* supports 0\.0 only, got 30\.0", id="softcap"),
        pytest.param(
            {"alibi_slopes": torch.ones(4)},
            r"alibi_slopes: .* supports None only, got Tensor",
            id="alibi",
        ),
    ],
)
def test_unsupported_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        flash_attn_func(GOOD, GOOD, GOOD, **arguments)  # type: ignore[call-overload]
    assert isinstance(caught.value, NotImplementedError)


def test_errors_are_the_built_in_ones_too() -> None:
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(DtypeError, TypeError)
    assert issubclass(UnsupportedDeviceError, RuntimeError)
    assert issubclass(MissingInstanceError, RuntimeError)


# --- What this wheel and this machine hold ------------------------------------------------------

CUDA = torch.device("cuda", 0)
Pretend = Callable[..., None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretend]:
    """Pretends a wheel's contents and one GPU."""

    def change(
        capability: tuple[int, int] = (9, 0),
        architectures: tuple[str, ...] = ("80-real", "90-real"),
        instances: tuple[Instance, ...] = (Instance("fwd", "bf16", 64),),
    ) -> None:
        info = replace(build_info(), architectures=architectures, instances=instances)
        monkeypatch.setattr(_checks, "build_info", lambda: info)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")

    caches = (_checks._instance_problem, _checks.device_problem)
    for cache in caches:
        cache.cache_clear()
    yield change
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("head_dim", [33, 40, 64])
def test_call_that_the_wheel_can_run(head_dim: int, pretend: Pretend) -> None:
    pretend()
    _checks.check_kernels(CUDA, torch.bfloat16, head_dim)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "message"),
    [
        pytest.param(
            torch.float16, 64, r"for fp16 and head_dim 64 .* it holds: bf16 64;", id="dtype"
        ),
        pytest.param(
            torch.bfloat16, 72, r"head_dim 72 \(it would be bf16 96\); it holds: bf16 64",
            id="wider",
        ),
        pytest.param(
            torch.bfloat16, 32, r"head_dim 32 \(it would be bf16 32\); it holds", id="narrower"
        ),
    ],
)  # fmt: skip
def test_missing_instance_names_what_the_wheel_holds(
    dtype: torch.dtype, head_dim: int, message: str, pretend: Pretend
) -> None:
    pretend()
    with pytest.raises(MissingInstanceError, match=message):
        _checks.check_kernels(CUDA, dtype, head_dim)


def test_instances_of_another_direction_do_not_count(pretend: Pretend) -> None:
    pretend(instances=(Instance("bwd", "bf16", 64),))
    with pytest.raises(MissingInstanceError, match="it holds: none"):
        _checks.check_kernels(CUDA, torch.bfloat16, 64)


@pytest.mark.parametrize("capability", [(7, 5), (10, 0)])
def test_other_gpu_is_named_with_what_the_wheel_holds(
    capability: tuple[int, int], pretend: Pretend
) -> None:
    pretend(capability=capability)
    expected = (
        rf"cuda:0 \(GPU 0\) has compute capability {capability[0]}\.{capability[1]}; this wheel "
        "holds code for 80-real, 90-real"
    )
    with pytest.raises(UnsupportedDeviceError, match=expected):
        _checks.check_kernels(CUDA, torch.bfloat16, 64)


def test_a_device_is_looked_at_once(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend()
    _checks.check_kernels(CUDA, torch.bfloat16, 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: pytest.fail("again"))
    _checks.check_kernels(CUDA, torch.bfloat16, 64)


def test_cpu_needs_no_kernel(pretend: Pretend) -> None:
    pretend(architectures=(), instances=())
    q, k, v = make_inputs()
    assert flash_attn_func(q, k, v).shape == q.shape
