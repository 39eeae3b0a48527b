"""A small call of each public function, on the CPU; other forms of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flash_attn_deterministic as package
import torch
from flash_attn_deterministic import interface
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

NHEADS, NHEADS_K, HEAD_DIM = 4, 2, 32
PAGE = 16
# Those that get gradients.
INPUTS = ("q", "k", "v", "qkv", "kv", "learnable_sink")


@dataclass
class Call:
    """A function with its arguments."""

    function: Callable[..., Any]
    arguments: dict[str, Any]

    def __call__(self, **changes: Any) -> Any:
        """Runs it with some arguments changed."""
        return self.function(**{**self.arguments, **changes})

    def lse(self) -> dict[str, bool]:
        """The name of the argument that returns softmax_lse."""
        name = "return_softmax_lse" if "k_cache" in self.arguments else "return_attn_probs"
        return {name: True}

    def leaves(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors that get gradients, which require them."""
        found = {n: x for n, x in self.arguments.items() if n in INPUTS and x is not None}
        return {name: x.clone().requires_grad_() for name, x in found.items()}


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def int32(*values: int) -> torch.Tensor:
    """A vector of lengths or indices."""
    return torch.tensor(values, dtype=torch.int32)


def qkv_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_func."""
    return Call(
        package.flash_attn_func,
        {
            "q": normal(2, 5, NHEADS, head_dim),
            "k": normal(2, 9, NHEADS_K, head_dim, seed=1),
            "v": normal(2, 9, NHEADS_K, head_dim, seed=2),
            "causal": True,
        },
    )


def qkvpacked_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_qkvpacked_func."""
    qkv = normal(2, 7, 3, NHEADS, head_dim)
    return Call(package.flash_attn_qkvpacked_func, {"qkv": qkv, "causal": True})


def kvpacked_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_kvpacked_func."""
    return Call(
        package.flash_attn_kvpacked_func,
        {
            "q": normal(2, 5, NHEADS, head_dim),
            "kv": normal(2, 9, 2, NHEADS_K, head_dim),
            "causal": True,
        },
    )


def varlen_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_varlen_func, with a sequence that has no queries."""
    return Call(
        package.flash_attn_varlen_func,
        {
            "q": normal(8, NHEADS, head_dim),
            "k": normal(16, NHEADS_K, head_dim, seed=1),
            "v": normal(16, NHEADS_K, head_dim, seed=2),
            "cu_seqlens_q": int32(0, 3, 3, 8),
            "cu_seqlens_k": int32(0, 5, 7, 16),
            "max_seqlen_q": 5,
            "max_seqlen_k": 9,
            "causal": True,
        },
    )


def paged_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_varlen_func, with a block table."""
    call = varlen_call(head_dim)
    return Call(
        call.function,
        {
            **call.arguments,
            "k": normal(4, PAGE, NHEADS_K, head_dim, seed=1),
            "v": normal(4, PAGE, NHEADS_K, head_dim, seed=2),
            "block_table": int32(2, 0, 3).reshape(3, 1),
        },
    )


def varlen_qkvpacked_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_varlen_qkvpacked_func."""
    return Call(
        package.flash_attn_varlen_qkvpacked_func,
        {
            "qkv": normal(8, 3, NHEADS, head_dim),
            "cu_seqlens": int32(0, 3, 8),
            "max_seqlen": 5,
            "causal": True,
        },
    )


def varlen_kvpacked_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_varlen_kvpacked_func."""
    arguments = varlen_call(head_dim).arguments
    kv = torch.stack([arguments.pop("k"), arguments.pop("v")], dim=1)
    return Call(package.flash_attn_varlen_kvpacked_func, {**arguments, "kv": kv})


def kvcache_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_with_kvcache, which appends to its cache."""
    return Call(
        package.flash_attn_with_kvcache,
        {
            "q": normal(2, 3, NHEADS, head_dim),
            "k_cache": normal(2, 20, NHEADS_K, head_dim, seed=1),
            "v_cache": normal(2, 20, NHEADS_K, head_dim, seed=2),
            "k": normal(2, 3, NHEADS_K, head_dim, seed=3),
            "v": normal(2, 3, NHEADS_K, head_dim, seed=4),
            "rotary_cos": normal(20, 8, seed=5),
            "rotary_sin": normal(20, 8, seed=6),
            "cache_seqlens": int32(9, 4),
            "causal": True,
        },
    )


# Changes of kvcache_call: keys in pages, and nothing that is appended.
PAGES: dict[str, Any] = {
    "k_cache": normal(4, 16, 2, 32),
    "v_cache": normal(4, 16, 2, 32),
    "block_table": int32(0, 1, 2, 3).reshape(2, 2),
    "rotary_cos": None,
    "rotary_sin": None,
}
READ_ONLY = {"k": None, "v": None, "rotary_cos": None, "rotary_sin": None}


CALLS: dict[str, Callable[..., Call]] = {
    "flash_attn_func": qkv_call,
    "flash_attn_qkvpacked_func": qkvpacked_call,
    "flash_attn_kvpacked_func": kvpacked_call,
    "flash_attn_varlen_func": varlen_call,
    "flash_attn_varlen_qkvpacked_func": varlen_qkvpacked_call,
    "flash_attn_varlen_kvpacked_func": varlen_kvpacked_call,
    "flash_attn_with_kvcache": kvcache_call,
}
assert set(CALLS) == set(interface.__all__)
DIFFERENTIABLE = [name for name in CALLS if name != "flash_attn_with_kvcache"]


def fresh(call: Call) -> Call:
    """The same call with copies of its tensors, for calls that write to them."""
    return Call(
        call.function,
        {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in call.arguments.items()},
    )


def unpacked(call: Call) -> Call:
    """The same call of the function with separate q, k and v."""
    arguments = dict(call.arguments)
    varlen = "varlen" in call.function.__name__
    packed = "qkv" if "qkv" in arguments else "kv"
    arguments.update(zip(packed, arguments.pop(packed).unbind(1 if varlen else 2), strict=True))
    for name in ("cu_seqlens", "max_seqlen"):
        if name in arguments:
            value = arguments.pop(name)
            arguments.update({f"{name}_q": value, f"{name}_k": value})
    return Call(package.flash_attn_varlen_func if varlen else package.flash_attn_func, arguments)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Keeps the calls of the package's ops: name and arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an op."""
        if func.namespace == "flash_attn_deterministic":
            self.calls.append((func._schema.name.split("::")[1], args))
        return func(*args, **(kwargs or {}))


def compiled(function: Any) -> Any:
    """A function compiled without graph breaks, as the first one of this process."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


class Counted:
    """A function compiled without graph breaks, which counts its compilations."""

    def __init__(self, function: Any, **options: Any) -> None:
        torch._dynamo.reset()
        self.backend: Any = CompileCounterWithBackend("aot_eager")  # type: ignore[no-untyped-call, unused-ignore]
        self.function: Any = torch.compile(
            function, fullgraph=True, backend=self.backend, **options
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        return self.function(*args, **kwargs)

    @property
    def count(self) -> int:
        """How often it was compiled."""
        return int(self.backend.frame_count)
