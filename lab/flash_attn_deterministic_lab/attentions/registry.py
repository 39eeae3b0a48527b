"""The names of all attentions, and functions of one's own."""

from __future__ import annotations

import dataclasses
import inspect
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend

from ..errors import ArgumentError
from ..shared.commands import variable
from . import fa3, flashmla, others, ours, torchs
from .attention import FLOAT32, GRADIENTS, OPTIONS, Attention
from .named import find_callable
from .served import SUFFIX, served

_BOTH = ("cuda", "cpu")


def _takes(words: str) -> frozenset[str]:
    return frozenset((GRADIENTS, *words.split()))


_OURS_TAKES = _takes(
    "alibi_slopes block_table dropout_p packed scale seqlens_k softcap split_size window"
)
_FA3_TAKES = _takes("block_table packed scale seqlens_k softcap window")
_FA4_TAKES = _takes("packed scale softcap window")
_FLASH_TAKES = _takes(f"{FLOAT32} scale")  # of torch's flash kernels
_MASK_TAKES = _takes(f"{FLOAT32} scale mask seqlens_k")
_FLEX_TAKES = _takes(f"{FLOAT32} scale seqlens_k")
_ours = partial(
    Attention, takes=_OURS_TAKES, distribution="flash-attn-deterministic", devices=_BOTH
)
_fa2 = partial(Attention, takes=_OURS_TAKES - {"split_size"}, distribution="flash-attn")
_fa3 = partial(Attention, takes=_FA3_TAKES, distribution="flash-attn-3")
_fa4 = partial(Attention, takes=_FA4_TAKES, distribution="flash-attn-4")
_flashinfer = partial(
    Attention, takes=frozenset({"block_table", "packed", "scale", "seqlens_k"}),
    distribution="flashinfer-python",
)  # fmt: skip
_flex = partial(Attention, takes=_FLEX_TAKES, devices=_BOTH, inside=torchs.flex_settings)


def _sdpa(name: str, title: str, backend: SDPBackend | None, takes: frozenset[str] = _MASK_TAKES,
          **more: Any) -> tuple[Attention, Attention]:  # fmt: skip
    """Returns a backend in its default setting, and with torch's deterministic algorithms."""
    plain = Attention(
        name, title, partial(torchs.sdpa, backend), takes, deterministic=f"{name}-deterministic",
        chunk_mask=torchs.masks_chunks(backend), **more,
    )  # fmt: skip
    return plain, dataclasses.replace(
        plain, name=plain.deterministic, title=f"{title}, deterministic", deterministic="",
        bench=False, inside=torchs.deterministic_torch,
    )  # fmt: skip


_ALL = (
    _ours("ours", "flash-attn-deterministic", ours.make),
    # Its kernels read these variables in each call; a path is taken where it can run.
    _ours("ours-sm80", "ours, kernels for every GPU", ours.make, bench=False, devices=("cuda",),
          inside=partial(variable, "FLASH_ATTENTION_FAMILY", "sm80")),
    *(
        _ours(f"ours-{path.replace('_', '-')}", f"ours, path {path.replace('_', '-')}", ours.make,
              bench=False, devices=("cuda",),
              inside=partial(variable, "FLASH_ATTENTION_TEST_DEVICE", f"path={path}"))
        for path in ("one_cta", "parts", "few_rows", "scores_first")
    ),
    _ours("ours-atomics", "ours, atomics in the backward",
          partial(ours.make, deterministic="never"), bench=False),
    _ours("ours+residual", "ours, O's residual", partial(ours.make, residual=True), bench=False),
    _ours("reference", "ours, the reference on the CPU", partial(ours.make, reference=True),
          bench=False),
    *_sdpa("sdpa", "torch SDPA, its choice", None, devices=_BOTH, bench=False),
    *_sdpa("sdpa-flash", "torch SDPA, flash", SDPBackend.FLASH_ATTENTION, _FLASH_TAKES,
           devices=_BOTH),
    *_sdpa("sdpa-cudnn", "torch SDPA, cuDNN", SDPBackend.CUDNN_ATTENTION),
    *_sdpa("sdpa-efficient", "torch SDPA, efficient", SDPBackend.EFFICIENT_ATTENTION, bench=False),
    *_sdpa("sdpa-math", "torch SDPA, math", SDPBackend.MATH, devices=_BOTH, bench=False),
    _flex("flex", "torch FlexAttention", torchs.flex, deterministic="flex-forced"),
    # Decode has a kernel of its own, which cuts the keys by the number of CTAs, unless forbidden.
    _flex("flex-forced", "FlexAttention, one kernel",
          partial(torchs.flex, FORCE_USE_FLEX_ATTENTION=True), bench=False),
    _fa2("flash_attn", "FlashAttention-2", others.flash_attn_2),
    _fa2("flash_attn-deterministic", "FlashAttention-2, deterministic",
         partial(others.flash_attn_2, True), bench=False),
    _fa3("fa3", "FlashAttention-3", fa3.flash_attn_3, deterministic="fa3-deterministic"),
    _fa3("fa3-one-split", "FlashAttention-3, one split", partial(fa3.flash_attn_3, 1)),
    _fa3("fa3-deterministic", "FlashAttention-3, one split, deterministic",
         partial(fa3.flash_attn_3, 1, True), bench=False),
    _fa4("fa4", "FlashAttention-4", others.flash_attn_4, deterministic="fa4-deterministic"),
    _fa4("fa4-deterministic", "FlashAttention-4, deterministic", partial(others.flash_attn_4, True),
         bench=False),
    Attention("flashmla", "FlashMLA", flashmla.flash_mla,
              frozenset({"block_table", "scale", "seqlens_k"}), "FlashMLA", bench=False),
    _flashinfer("flashinfer", "FlashInfer", others.flashinfer,
                deterministic="flashinfer-fixed-split"),
    _flashinfer("flashinfer-fixed-split", "FlashInfer, splits of 2,048",
                partial(others.flashinfer, 2048), bench=False),
)  # fmt: skip
ATTENTIONS = {attention.name: attention for attention in _ALL}
OURS = ATTENTIONS["ours"]


def find_attention(name: str, argument: str = "--attention") -> Attention:
    """Returns an attention by its name.

    Args:
        name: of ATTENTIONS; ours@TOKENS, splits of so many; NAME-served, called as servers do;
            MODULE:FUNCTION, also of the working directory, or FILE.py:FUNCTION.
        argument: what the user calls it, for messages.

    Raises:
        ArgumentError: there is no such name, module or function.
    """
    if name in ATTENTIONS:
        return ATTENTIONS[name]
    if name.removesuffix(SUFFIX) in ATTENTIONS:
        return served(ATTENTIONS[name.removesuffix(SUFFIX)])
    base, _, splits = name.partition("@")
    if base == OURS.name and splits.isdecimal():
        make = partial(ours.make, split_size=int(splits))
        return dataclasses.replace(OURS, name=name, title=f"ours, splits of {splits}", make=make)
    if ":" not in name:
        raise ArgumentError(
            f"{argument}: expected {', '.join(ATTENTIONS)} or MODULE:FUNCTION, got {name!r}"
        )
    return _own(name, find_callable(name, argument))


def settings_of(attention: Attention) -> list[Attention]:
    """Returns an attention, and its setting with most promises of equal bits where it has one."""
    other = attention.deterministic
    return [attention, *([ATTENTIONS[other]] if other else [])]


def _own(name: str, function: Any) -> Attention:
    """A function f(q, k, v, *, causal, ...): takes is what its signature names of OPTIONS."""
    try:
        named = set(inspect.signature(function).parameters)
    except ValueError:  # functions of extension modules may have no signature
        named = set()

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        result: Any = function(q, k, v, **options)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    takes = frozenset(named & OPTIONS.keys()) | {GRADIENTS, FLOAT32}
    return Attention(name, name, lambda: attend, takes, name.partition(":")[0], _BOTH)
