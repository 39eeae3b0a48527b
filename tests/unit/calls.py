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


def _call(function: Callable[..., Any], **arguments: Any) -> Call:
    return Call(function, arguments)


def _tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Normal numbers of some shapes, different ones of the same."""
    return [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def qkv_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_func."""
    keys = (2, 9, NHEADS_K, head_dim)
    q, k, v = _tensors((2, 5, NHEADS, head_dim), keys, keys)
    return _call(package.flash_attn_func, q=q, k=k, v=v, causal=True)


def qkvpacked_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_qkvpacked_func."""
    qkv = normal(2, 7, 3, NHEADS, head_dim)
    return _call(package.flash_attn_qkvpacked_func, qkv=qkv, causal=True)


def kvpacked_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_kvpacked_func."""
    q, kv = normal(2, 5, NHEADS, head_dim), normal(2, 9, 2, NHEADS_K, head_dim)
    return _call(package.flash_attn_kvpacked_func, q=q, kv=kv, causal=True)


def varlen_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_varlen_func, with a sequence that has no queries."""
    keys = (16, NHEADS_K, head_dim)
    q, k, v = _tensors((8, NHEADS, head_dim), keys, keys)
    starts = {"cu_seqlens_q": int32(0, 3, 3, 8), "cu_seqlens_k": int32(0, 5, 7, 16)}
    longest = {"max_seqlen_q": 5, "max_seqlen_k": 9}
    return _call(package.flash_attn_varlen_func, q=q, k=k, v=v, **starts, **longest, causal=True)


def paged_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_varlen_func, with a block table."""
    call, pages = varlen_call(head_dim), (4, PAGE, NHEADS_K, head_dim)
    k, v = (normal(*pages, seed=seed) for seed in (1, 2))
    table = int32(2, 0, 3).reshape(3, 1)
    return Call(call.function, {**call.arguments, "k": k, "v": v, "block_table": table})


def varlen_qkvpacked_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_varlen_qkvpacked_func."""
    qkv, starts = normal(8, 3, NHEADS, head_dim), int32(0, 3, 8)
    function = package.flash_attn_varlen_qkvpacked_func
    return _call(function, qkv=qkv, cu_seqlens=starts, max_seqlen=5, causal=True)


def varlen_kvpacked_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_varlen_kvpacked_func."""
    arguments = varlen_call(head_dim).arguments
    kv = torch.stack([arguments.pop("k"), arguments.pop("v")], dim=1)
    return _call(package.flash_attn_varlen_kvpacked_func, **arguments, kv=kv)


def kvcache_call(head_dim: int = HEAD_DIM) -> Call:
    """flash_attn_with_kvcache, which appends to its cache."""
    names = ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin")
    cache, new = (2, 20, NHEADS_K, head_dim), (2, 3, NHEADS_K, head_dim)
    tensors = _tensors((2, 3, NHEADS, head_dim), cache, cache, new, new, (20, 8), (20, 8))
    given = dict(zip(names, tensors, strict=True))
    return _call(package.flash_attn_with_kvcache, **given, cache_seqlens=int32(9, 4), causal=True)


# Changes of kvcache_call: keys in pages, and nothing that is appended.
PAGES: dict[str, Any] = {
    "k_cache": normal(4, 16, 2, 32), "v_cache": normal(4, 16, 2, 32),
    "block_table": int32(0, 1, 2, 3).reshape(2, 2), "rotary_cos": None, "rotary_sin": None,
}  # fmt: skip
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
