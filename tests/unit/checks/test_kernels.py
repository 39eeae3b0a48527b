"""Whether the wheel holds a kernel for a call and code for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from attention_cases import make_inputs
from flash_attn_deterministic import flash_attn_func
from flash_attn_deterministic.build_info import Instance, build_info
from flash_attn_deterministic.checks import kernels
from flash_attn_deterministic.errors import MissingInstanceError, UnsupportedDeviceError

CUDA = torch.device("cuda", 0)
Pretend = Callable[..., None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretend]:
    """Fakes the contents of a wheel and one GPU."""

    def change(
        capability: tuple[int, int] = (9, 0),
        architectures: tuple[str, ...] = ("80-real", "90-real"),
        instances: tuple[Instance, ...] = (Instance("fwd", "bf16", 64),),
    ) -> None:
        info = replace(build_info(), architectures=architectures, instances=instances)
        monkeypatch.setattr(kernels, "build_info", lambda: info)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")

    caches = (kernels.instance_problem, kernels.device_problem)
    for cache in caches:
        cache.cache_clear()
    yield change
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("head_dim", [33, 40, 64])
def test_call_that_the_wheel_can_run(head_dim: int, pretend: Pretend) -> None:
    pretend()
    kernels.check_kernels(CUDA, torch.bfloat16, head_dim)


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
def test_missing_instance_lists_the_held_ones(
    dtype: torch.dtype, head_dim: int, message: str, pretend: Pretend
) -> None:
    pretend()
    with pytest.raises(MissingInstanceError, match=message):
        kernels.check_kernels(CUDA, dtype, head_dim)


def test_kernels_of_two_families_are_listed_once(pretend: Pretend) -> None:
    pretend(instances=tuple(Instance("fwd", "bf16", 64, one) for one in ("sm80", "sm90")))
    with pytest.raises(MissingInstanceError, match="it holds: bf16 64; install"):
        kernels.check_kernels(CUDA, torch.bfloat16, 128)


def test_instances_of_another_direction_do_not_count(pretend: Pretend) -> None:
    pretend(instances=(Instance("bwd", "bf16", 64),))
    with pytest.raises(MissingInstanceError, match="it holds: none"):
        kernels.check_kernels(CUDA, torch.bfloat16, 64)


def test_backward_needs_its_own_instance(pretend: Pretend) -> None:
    pretend()
    kernels.check_kernels(CUDA, torch.bfloat16, 64)
    with pytest.raises(MissingInstanceError, match=r"no backward kernel for bf16 .* holds: none"):
        kernels.check_kernels(CUDA, torch.bfloat16, 64, "bwd")
    pretend(instances=(Instance("bwd", "bf16", 64),))
    kernels.instance_problem.cache_clear()
    kernels.check_kernels(CUDA, torch.bfloat16, 64, "bwd")


@pytest.mark.parametrize("capability", [(7, 5), (10, 0)], ids=["7.5", "10.0"])
def test_unsupported_gpu_is_named_with_the_held_architectures(
    capability: tuple[int, int], pretend: Pretend
) -> None:
    pretend(capability=capability)
    expected = (
        rf"cuda:0 \(GPU 0\) has compute capability {capability[0]}\.{capability[1]}; this wheel "
        "holds code for 80-real, 90-real"
    )
    with pytest.raises(UnsupportedDeviceError, match=expected):
        kernels.check_kernels(CUDA, torch.bfloat16, 64)


def test_a_device_is_queried_once(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend()
    kernels.check_kernels(CUDA, torch.bfloat16, 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: pytest.fail("again"))
    kernels.check_kernels(CUDA, torch.bfloat16, 64)


def test_cpu_needs_no_kernel(pretend: Pretend) -> None:
    pretend(architectures=(), instances=())
    q, k, v = make_inputs()
    assert flash_attn_func(q, k, v).shape == q.shape
