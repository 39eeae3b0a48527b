"""What the GPU tests share: inputs, the call under test, comparison of bits."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from flash_attn_deterministic import interface
from flash_attn_deterministic.checks.kernels import instance_problem
from flash_attn_deterministic.verify.contract import CHECKS, Attention, run_check, size_of
from flash_attn_deterministic.verify.contract.call import DTYPES as DTYPES
from flash_attn_deterministic.verify.shared.bits import bits as bits
from flash_attn_deterministic.verify.shared.bits import difference

# Any: the type checker can't match unpacked arguments.
flash_attn_func: Any = interface.flash_attn_func
flash_attn_varlen_func: Any = interface.flash_attn_varlen_func
flash_attn_with_kvcache: Any = interface.flash_attn_with_kvcache
# Of `device_override`: families and paths, which a call takes where they have a kernel for it.
SCHEDULES = (
    *("family=sm80", "family=sm80,path=parts", "family=sm90,path=one_cta"),
    *("family=sm90,path=parts", "path=few_rows", "path=scores_first"),
)
# Of the bit checks: even and padded kernels, small and large tiles.
BIT_CONFIGS = (
    (64, "bf16"),
    (64, "fp16"),
    (80, "bf16"),
    (128, "bf16"),
    (128, "fp16"),
    (256, "bf16"),
)
HEAD_DIMS = (32, 36, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def each_config(configs: Sequence[tuple[int, str]]) -> pytest.MarkDecorator:
    """Runs a test with each head_dim and dtype."""
    return pytest.mark.parametrize(("head_dim", "dtype"), configs, ids=named(configs))


def named(configs: Sequence[tuple[int, str]]) -> dict[str, tuple[int, str]]:
    """Head dims and dtypes as an axis of `pairwise`."""
    return {f"d{head_dim}-{dtype}": (head_dim, dtype) for head_dim, dtype in configs}


def pairwise(**axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Runs a test with choices in which every two values of two axes meet, not with all products.

    Args:
        **axes: values by argument; those of a mapping are named by its keys.
    """
    names = {n: list(a) if isinstance(a, Mapping) else list(map(str, a)) for n, a in axes.items()}
    values = {n: list(a.values()) if isinstance(a, Mapping) else list(a) for n, a in axes.items()}
    order = [*itertools.product(*(range(len(own)) for own in values.values()))]
    random.Random(0).shuffle(order)
    left = {pair for choice in order for pair in itertools.combinations(enumerate(choice), 2)}
    cases = []
    while left:
        best = max(
            order, key=lambda choice: len(left & {*itertools.combinations(enumerate(choice), 2)})
        )
        left -= {*itertools.combinations(enumerate(best), 2)}
        words = "-".join(own[i] for own, i in zip(names.values(), best, strict=True))
        picked = [own[i] for own, i in zip(values.values(), best, strict=True)]
        cases.append(pytest.param(*picked, id=words))
    return pytest.mark.parametrize(list(axes), cases)


def is_built(head_dim: int, dtype: str, direction: str = "fwd") -> bool:
    """Returns whether the installed wheel holds a kernel; direction is "fwd" or "bwd"."""
    return not instance_problem(DTYPES[dtype], head_dim, direction)


def skip_unless_built(head_dim: int, dtype: str, direction: str = "fwd") -> None:
    """Skips the running test if the installed wheel lacks the kernel."""
    if not is_built(head_dim, dtype, direction):
        pytest.skip(f"this wheel holds no {direction} kernel for {dtype} and head_dim {head_dim}")


def make_qkv(
    shape: tuple[int, int, int, int],
    seqlen_k: int | None = None,
    nheads_k: int | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Tensors:
    """Draws q of a shape (batch, seqlen_q, nheads, head_dim), and k and v to go with it."""
    batch, seqlen_q, nheads, head_dim = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(seqlen: int, heads: int) -> torch.Tensor:
        size = (batch, seqlen, heads, head_dim)
        return torch.randn(size, generator=generator, device="cuda", dtype=dtype)

    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    nheads_k = nheads if nheads_k is None else nheads_k
    return draw(seqlen_q, nheads), draw(seqlen_k, nheads_k), draw(seqlen_k, nheads_k)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls the function under test.

    Returns:
        out and softmax_lse.
    """
    out, softmax_lse, _ = flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, return_attn_probs=True
    )
    return out, softmax_lse


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns whether two tensors are equal bit for bit."""
    return left.dtype == right.dtype and torch.equal(bits(left), bits(right))


def assert_same(
    left: tuple[torch.Tensor, ...],
    right: tuple[torch.Tensor, ...],
    names: tuple[str, ...] = ("out", "softmax_lse"),
) -> None:
    """Asserts that two tuples of tensors, by default of a forward, are equal bit for bit."""
    for name, a, b in zip(names, left, right, strict=True):
        found = difference(a, b)
        assert found is None, f"{name}: {found.words}"


def scratch_of(run: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[tuple[torch.Tensor, ...], int]:
    """Runs a call twice; returns its results, and the bytes that the second took besides them."""
    results: tuple[torch.Tensor, ...] = ()
    taken = 0
    for _ in range(2):  # the first call loads the kernels
        results = ()
        gc.collect()  # what earlier tests left must not be freed in between
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = run()
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in results)
    return results, taken


def assert_contract(row: str, head_dim: int, dtype: str, **sizes: Any) -> None:
    """Runs a row of `verify`'s contract with one head dim and dtype, and sizes that differ."""
    skip_unless_built(head_dim, dtype)
    check = next(check for check in CHECKS if check.id == row)
    size = dataclasses.replace(size_of("cuda", quick=True), configs=((head_dim, dtype),), **sizes)
    outcome = run_check(check, size, Attention.installed())
    assert outcome.counter_example is None
    assert outcome.cases
