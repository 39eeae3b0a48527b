"""The attention under test: ours, torch's, FlashAttention-3, or any function by its name."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...errors import ArgumentError
from ..named import find_callable
from . import fa3

# Takes q (batch, seqlen_q, nheads, head_dim), k and v (batch, seqlen_k, nheads_k, head_dim) in
# bfloat16, `causal` (the mask is aligned to the bottom right corner) and, where `lengths` is set,
# `seqlens_k` (batch,), int32: how many keys of each sequence count. Returns out like q.
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Attention:
    """One attention in one setting."""

    name: str  # as in --attention
    setting: str  # "default", or what was done to make it deterministic
    version: str  # of what it comes from
    attend: Attend  # the call
    lengths: bool = False  # whether it takes seqlens_k
    gradients: bool = True  # whether it has a backward
    # what its calls run in
    inside: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


DEFAULT = "default"
NAMES = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math", "flex", "fa3")


class UnavailableError(Exception):
    """An attention cannot run on this machine; the message says why."""


def find(name: str, device: str) -> list[Attention]:
    """Returns an attention in its settings: the default, then the best deterministic one.

    Args:
        name: one of NAMES, MODULE:FUNCTION, also of the working directory, or FILE.py:FUNCTION.
        device: "cpu" or "cuda".

    Raises:
        ArgumentError: there is no such name, module or function.
        UnavailableError: it cannot run here.
    """
    if name in _BACKENDS:
        return _sdpa(name, device)
    if name == "flex":
        return _flex()
    if name == "fa3":
        return _fa3(device)
    if ":" in name:
        return [_function(name)]
    raise ArgumentError(
        f"--attention: expected {', '.join(NAMES)} or MODULE:FUNCTION, separated by commas, got "
        f"{name!r}"
    )


def ours() -> Attention:
    """Returns this package's attention, in its default mode."""
    from ... import flash_attn_func, flash_attn_with_kvcache

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, seqlens_k: Tensor | None = None
    ) -> Tensor:
        if seqlens_k is None:
            return flash_attn_func(q, k, v, causal=causal)
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=seqlens_k, causal=causal)

    return Attention("ours", DEFAULT, _version("flash-attn-deterministic"), attend, lengths=True)


def _version(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return distribution


@contextmanager
def _deterministic_torch() -> Iterator[None]:
    """torch.use_deterministic_algorithms, without an error where torch has no such algorithm."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


# scaled_dot_product_attention: its causal mask is aligned to the top left corner.

_BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}


def _sdpa(name: str, device: str) -> list[Attention]:
    if device == "cpu" and name not in ("sdpa-flash", "sdpa-math"):
        raise UnavailableError("torch has it for CUDA devices only")
    # torch's flash kernels take no mask but their own.
    masks = name != "sdpa-flash"
    sdpa: Any = functional.scaled_dot_product_attention

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, seqlens_k: Tensor | None = None
    ) -> Tensor:
        shared = q.shape[2] != k.shape[2]
        square = q.shape[1] == k.shape[1]
        mask: Any = None
        if seqlens_k is not None or (causal and not square and masks):
            mask = _mask(q, k, causal, seqlens_k)
        elif causal and not square:
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(q.shape[1], k.shape[1])
        with sdpa_kernel(_BACKENDS[name]):
            out: Tensor = sdpa(
                *(t.transpose(1, 2) for t in (q, k, v)),
                attn_mask=mask,
                is_causal=causal and mask is None,
                enable_gqa=shared,
            )
        return out.transpose(1, 2)

    version = f"torch {torch.__version__}"
    if name == "sdpa-cudnn":
        version += f", cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call, unused-ignore]
    default = Attention(name, DEFAULT, version, attend, masks)
    setting = "use_deterministic_algorithms"
    return [default, replace(default, setting=setting, inside=_deterministic_torch)]


def _mask(q: Tensor, k: Tensor, causal: bool, seqlens_k: Tensor | None) -> Tensor:
    """Returns (batch or 1, 1, seqlen_q, seqlen_k), bool: visible keys."""
    rows = torch.arange(q.shape[1], device=q.device)[:, None]
    keys = torch.arange(k.shape[1], device=q.device)
    lengths = torch.tensor([k.shape[1]], device=q.device) if seqlens_k is None else seqlens_k
    lengths = lengths.view(-1, 1, 1, 1)
    visible = (keys < lengths).expand(-1, 1, q.shape[1], -1)
    return visible & (keys <= rows + lengths - q.shape[1]) if causal else visible


@contextmanager
def _flex_settings() -> Iterator[None]:
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    # The first: a backward that is timed runs many times over what its forward saved. The second:
    # past the limit torch would run something else, uncompiled.
    with functorch.patch(donated_buffer=False), dynamo.patch(recompile_limit=64):
        yield


def _flex() -> list[Attention]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    compiled: Any = torch.compile(flex_attention)

    def mask(batch: int, seqlen_q: int, seqlen_k: int, causal: bool, seqlens_k: Tensor) -> Any:
        # Tensors, because each new number would be compiled in.
        ahead = seqlens_k - seqlen_q if causal else seqlens_k

        def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (key < seqlens_k[batch]) & (key <= row + ahead[batch])

        device = str(seqlens_k.device)
        return create_block_mask(visible, batch, None, seqlen_q, seqlen_k, device=device)

    @functools.lru_cache(maxsize=4)  # made once, as programs do: it takes longer than the call
    def causal_mask(batch: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> Any:
        lengths = torch.full((batch,), seqlen_k, dtype=torch.int32, device=device)
        return mask(batch, seqlen_q, seqlen_k, True, lengths)

    def make(options: dict[str, Any]) -> Attend:
        def attend(
            q: Tensor, k: Tensor, v: Tensor, causal: bool = False, seqlens_k: Tensor | None = None
        ) -> Tensor:
            sizes = q.shape[0], q.shape[1], k.shape[1]
            block_mask = None
            if seqlens_k is not None:
                block_mask = mask(*sizes, causal, seqlens_k)
            elif causal:
                block_mask = causal_mask(*sizes, q.device)
            out: Any = compiled(
                *(t.transpose(1, 2) for t in (q, k, v)),
                block_mask=block_mask,
                enable_gqa=q.shape[2] != k.shape[2],
                kernel_options=options or None,
            )
            result: Tensor = out.transpose(1, 2)
            return result

        return attend

    version = f"torch {torch.__version__}"
    # Decode has a kernel of its own, which cuts the keys by the number of CTAs, unless forbidden.
    forced = "FORCE_USE_FLEX_ATTENTION"
    default = Attention("flex", DEFAULT, version, make({}), True, inside=_flex_settings)
    return [default, replace(default, setting=forced, attend=make({forced: True}))]


def _fa3(device: str) -> list[Attention]:
    if device != "cuda":
        raise UnavailableError("it runs on CUDA devices only")
    try:
        source = fa3.load()
    except ImportError as error:
        raise UnavailableError(str(error)) from error

    def make(num_splits: int, deterministic: bool) -> Attend:
        options: dict[str, Any] = {"num_splits": num_splits, "deterministic": deterministic}

        def attend(
            q: Tensor, k: Tensor, v: Tensor, causal: bool = False, seqlens_k: Tensor | None = None
        ) -> Tensor:
            return fa3.attend(q, k, v, causal=causal, seqused_k=seqlens_k, **options)

        return attend

    version = _version(source)
    return [
        Attention("fa3", DEFAULT, version, make(0, False), lengths=True),
        Attention("fa3", "num_splits=1, deterministic", version, make(1, True), lengths=True),
    ]


def _function(name: str) -> Attention:
    function = find_callable(name, "--attention")
    try:
        lengths = "seqlens_k" in inspect.signature(function).parameters
    except ValueError:  # functions of extension modules may have no signature
        lengths = False

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, seqlens_k: Tensor | None = None
    ) -> Tensor:
        more = {} if seqlens_k is None else {"seqlens_k": seqlens_k}
        result: Any = function(q, k, v, causal=causal, **more)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    module = name.partition(":")[0]
    version = getattr(sys.modules.get(module), "__version__", "no version")
    return Attention(name, DEFAULT, f"{module} {version}", attend, lengths)
