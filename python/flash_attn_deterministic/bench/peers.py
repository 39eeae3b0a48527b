"""The implementations that are timed. Each returns a call for a problem, or raises the reason."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from .problem import Problem, Shape

Forward = Callable[[], torch.Tensor]
Result = tuple[torch.Tensor, ...]
Call = Callable[[], Result]


class Unavailable(Exception):
    """A peer cannot run a problem here; the message says why."""


@dataclass(frozen=True)
class Peer:
    """An implementation."""

    name: str  # for --peers and the tables
    title: str  # for people
    # returns a call that computes out, (batch, seqlen_q, nheads, head_dim)
    forward: Callable[[Problem], Forward]
    devices: tuple[str, ...] = ("cuda",)  # where it runs
    backward: bool = True  # whether it has gradients

    def call(self, problem: Problem) -> Call:
        """Returns what to time: it computes out, or for a backward or a step dq, dk and dv.

        Raises:
            Unavailable: with the reason; any other exception counts as one too.
        """
        device = problem.q.device.type
        if device not in self.devices:
            raise Unavailable(f"does not run on {device}")
        forward = self.forward(problem)
        if problem.shape.kind not in ("backward", "step"):
            return lambda: (forward(),)
        if not self.backward:
            raise Unavailable("has no backward")
        leaves = (problem.q, problem.k, problem.v)
        if problem.shape.kind == "step":
            return lambda: torch.autograd.grad(forward(), leaves, problem.dout)
        out = forward()
        return lambda: torch.autograd.grad(out, leaves, problem.dout, retain_graph=True)


def _ours(problem: Problem, deterministic: Literal["never"] | None = None) -> Forward:
    from .. import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

    shape, starts, q, k, v = problem.shape, problem.cu_seqlens, problem.q, problem.k, problem.v
    mask: dict[str, Any] = {"causal": shape.causal, "window_size": (shape.window, -1)}
    if starts is not None:
        lengths = (starts, starts, shape.seqlen, shape.seqlen)
        return lambda: flash_attn_varlen_func(
            q, k, v, *lengths, deterministic=deterministic, **mask
        )
    if shape.kind == "decode":
        return lambda: flash_attn_with_kvcache(q, k, v, **mask)
    return lambda: flash_attn_func(q, k, v, deterministic=deterministic, **mask)


def _check_plain(shape: Shape) -> None:
    """Raises for shapes that are not timed on this peer, though it may support them."""
    if shape.lengths or shape.window >= 0 or (shape.seqlen_q and shape.seqlen_q != shape.seqlen):
        raise Unavailable("is timed without packed sequences, windows and cross attention only")


def _sdpa(problem: Problem, backend: SDPBackend | None = None) -> Forward:
    shape = problem.shape
    if shape.lengths:
        raise Unavailable("takes no packed sequences")
    if shape.window >= 0:
        raise Unavailable("has no windows")
    q, k, v = (t.transpose(1, 2) for t in (problem.q, problem.k, problem.v))
    mask: Any = None
    if shape.causal and shape.queries != shape.seqlen:
        if backend != SDPBackend.FLASH_ATTENTION:
            raise Unavailable("its causal mask is aligned to the top left corner")
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(shape.queries, shape.seqlen)

    def call() -> torch.Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=shape.causal and mask is None,
                enable_gqa=shape.nheads != shape.nheads_k,
            )
        return out.transpose(1, 2)

    return call


def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Else the ninth shape would meet the limit of recompilations, and run without compilation.
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _flex(problem: Problem) -> Forward:
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask

    _check_plain(problem.shape)
    q, k, v = (t.transpose(1, 2) for t in (problem.q, problem.k, problem.v))
    mask = None
    if problem.shape.causal:
        mask = create_block_mask(
            lambda batch, head, row, key: row >= key,
            None,
            None,
            q.shape[2],
            k.shape[2],
            device=str(q.device),
        )
    flex = _compiled_flex()
    shared = problem.shape.nheads != problem.shape.nheads_k

    def call() -> torch.Tensor:
        out: torch.Tensor = flex(q, k, v, block_mask=mask, enable_gqa=shared)
        return out.transpose(1, 2)

    # Compiled here, with a backward that leaves what the forward saved: it is timed many times.
    with config.patch(donated_buffer=False):
        call()
    return call


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} cannot be imported ({error})") from error


def _flash_attn(problem: Problem) -> Forward:
    _check_plain(problem.shape)
    module = _installed("flash_attn")
    q, k, v, causal = problem.q, problem.k, problem.v, problem.shape.causal
    if problem.shape.kind == "decode":
        return lambda: module.flash_attn_with_kvcache(q, k, v, causal=causal)
    return lambda: module.flash_attn_func(q, k, v, causal=causal)


def _packing(problem: Problem) -> dict[str, Any]:
    """Returns FlashAttention-3's and -4's arguments for packed sequences."""
    starts, longest = problem.cu_seqlens, problem.shape.seqlen
    if starts is None:
        return {}
    return {
        **{"cu_seqlens_q": starts, "cu_seqlens_k": starts},
        **{"max_seqlen_q": longest, "max_seqlen_k": longest},
    }


def _fa3(problem: Problem, num_splits: int = 0, deterministic: bool = False) -> Forward:
    from ..verify.scoreboard import fa3

    try:
        fa3.load()
    except ImportError as error:
        raise Unavailable(str(error)) from error
    shape, q, k, v = problem.shape, problem.q, problem.k, problem.v
    options: dict[str, Any] = {"num_splits": num_splits, "deterministic": deterministic}
    options |= _packing(problem)
    if shape.window >= 0:
        options |= {"window_size_left": shape.window, "window_size_right": 0}
    return lambda: fa3.attend(q, k, v, causal=shape.causal, **options)


def _fa4(problem: Problem, deterministic: bool = False) -> Forward:
    module = _installed("flash_attn.cute")
    shape, starts, q, k, v = problem.shape, problem.cu_seqlens, problem.q, problem.k, problem.v
    options: dict[str, Any] = {"causal": shape.causal, "deterministic": deterministic}
    options |= _packing(problem)
    if shape.window >= 0:
        options["window_size"] = (shape.window, 0)
    function = module.flash_attn_func if starts is None else module.flash_attn_varlen_func

    def call() -> torch.Tensor:
        result = function(q, k, v, **options)
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out

    call()  # compiles the kernel
    return call


_WORKSPACE_BYTES = 256 * 2**20
_PAGE = 16


def _flashinfer(problem: Problem) -> Forward:
    _check_plain(problem.shape)
    module = _installed("flashinfer")
    shape, device = problem.shape, problem.q.device
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    heads = (shape.nheads, shape.nheads_k, shape.head_dim)
    counts = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
    if shape.kind == "decode":
        if shape.seqlen % _PAGE:
            raise Unavailable(f"expected a multiple of {_PAGE} keys, got {shape.seqlen}")
        pages = shape.seqlen // _PAGE
        cache = tuple(
            t.reshape(shape.batch * pages, _PAGE, *t.shape[2:]) for t in (problem.k, problem.v)
        )
        decode = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        decode.plan(
            counts * pages,
            torch.arange(shape.batch * pages, dtype=torch.int32, device=device),
            torch.full((shape.batch,), _PAGE, dtype=torch.int32, device=device),
            *heads,
            _PAGE,
            q_data_type=problem.q.dtype,
            kv_data_type=problem.q.dtype,
        )
        return lambda: decode.run(problem.q[:, 0], cache).unsqueeze(1)
    prefill = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    starts = counts * shape.seqlen
    prefill.plan(starts, starts, *heads, causal=shape.causal, q_data_type=problem.q.dtype)
    q, k, v = (t.flatten(0, 1) for t in (problem.q, problem.k, problem.v))
    return lambda: prefill.run(q, k, v).view(problem.q.shape)


_partial = functools.partial
_FLASH, _CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
OURS = Peer("ours", "flash-attn-deterministic", _ours, ("cuda", "cpu"))
PEERS = (
    OURS,
    Peer("sdpa-flash", "torch SDPA, flash", _partial(_sdpa, backend=_FLASH)),
    Peer("sdpa-cudnn", "torch SDPA, cuDNN", _partial(_sdpa, backend=_CUDNN)),
    Peer("sdpa", "torch SDPA, default", _sdpa, ("cpu",)),
    Peer("flex", "torch FlexAttention, compiled", _flex, ("cuda", "cpu")),
    Peer("flash_attn", "flash_attn", _flash_attn),
    Peer("fa3", "FlashAttention-3", _fa3),
    Peer("fa4", "FlashAttention-4", _fa4),
    Peer("flashinfer", "FlashInfer", _flashinfer, backward=False),
)
_ATOMICS = "flash-attn-deterministic, atomics in the backward"
_FA3_DETERMINISTIC = _partial(_fa3, num_splits=1, deterministic=True)
_FA4_DETERMINISTIC = _partial(_fa4, deterministic=True)
# The same libraries in other settings, which run only if they are named.
VARIANTS = (
    Peer("ours-atomics", _ATOMICS, _partial(_ours, deterministic="never")),
    Peer("fa3-one-split", "FlashAttention-3, num_splits=1", _partial(_fa3, num_splits=1)),
    Peer("fa3-deterministic", "FlashAttention-3, deterministic", _FA3_DETERMINISTIC),
    Peer("fa4-deterministic", "FlashAttention-4, deterministic", _FA4_DETERMINISTIC),
)
