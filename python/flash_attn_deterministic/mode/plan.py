"""The plan of a call: which kernels run, and how the work is divided, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._checks.kernels import instance_problem
from .._ops.schemas import FAMILIES, PATHS
from ..errors import UnsupportedError
from ..info.build_info import build_info


@dataclass(frozen=True)
class BackwardPlan:
    """How the backward of a call is carried out. No bit of a deterministic one depends on it.

    Args:
        family: as in Plan.
        block_m: query rows to a tile.
        block_n: keys to a tile.
        whole_heads: whether a thread block works on all keys of a head, one block after another.
        in_turns: whether thread blocks wait for each other, to add to dq in one order.
        heads_in_flight: heads, of all sequences, whose key blocks run at the same time.
    """

    family: str
    block_m: int
    block_n: int
    whole_heads: bool
    in_turns: bool
    heads_in_flight: int


@dataclass(frozen=True)
class Plan:
    """How a call is carried out. Its bits depend on split_size and block_n, on nothing else here.

    Args:
        family: "sm80": the kernels for every supported GPU; "sm90": those for compute capability
            9.0 (Hopper), of calls that they cover; "reference": plain torch, on CPUs. The
            environment variable FLASH_ATTENTION_FAMILY, read in each call, overrides the choice:
            "sm80" runs those kernels on Hopper too, "sm90" runs Hopper's wherever they can run. The
            plan assumes contiguous tensors: others may run in the other family.
        path: "one-cta": one thread block walks over all splits of its rows; "parts": one thread
            block per split, then a kernel that merges the parts; "few-rows": the same for up to 16
            queries, where the heads of a group share a thread block; "scores-first": a kernel for
            all scores, then one for the rest, whose thread blocks take 32 columns of a split each.
        block_m: query rows per thread block.
        block_n: keys that a thread block processes at a time.
        split_size: tokens per split of the call or the mode; 0: one split.
        num_splits: splits of the longest sequence.
        tokens_per_split: tokens of a whole split; with one split, those of the longest sequence.
        launches: how often the kernels are launched; more launches need less scratch memory.
        scratch_bytes: memory besides inputs and outputs.
        backward: the plan of the backward; None on CPUs, for wheels without its kernels, and for
            calls without one.
        residual_bytes: memory for the rounding error of out, kept until the backward; 0 unless the
            mode has keep_residual and the call gets a backward.
    """

    family: str
    path: str
    block_m: int
    block_n: int
    split_size: int
    num_splits: int
    tokens_per_split: int
    launches: int
    scratch_bytes: int
    backward: BackwardPlan | None = None
    residual_bytes: int = 0


@dataclass(frozen=True)
class Request:
    """The properties of a call that its plan depends on.

    Lengths are those of the longest sequence, or an upper bound; page_size 0: no pages.
    deterministic_bwd is None for calls without a backward.
    """

    device: torch.device
    dtype: torch.dtype
    batch: int
    nheads: int
    nheads_k: int
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    window: tuple[int, int]
    has_alibi: bool
    has_softcap: bool
    has_dropout: bool
    packed: bool
    page_size: int
    cache_index: bool
    split_size: int
    deterministic: bool
    deterministic_bwd: bool | None = None
    residual_bytes: int = 0


def plan(request: Request) -> Plan:
    """Returns the plan of a call.

    Raises:
        UnsupportedError: the mode is not enabled, and the tensors are not on a CUDA device: the
            order of additions is then the kernels' choice.
    """
    if request.device.type == "cuda":
        return _cuda_plan(request)
    if not request.deterministic:
        raise UnsupportedError(
            "explain: without the deterministic mode, only calls on a CUDA device have a plan; "
            "call it inside deterministic_mode()"
        )
    tile = build_info().tile(request.head_dim)
    split_size = request.split_size
    several = 0 < split_size < request.seqlen_k
    return Plan(
        family="reference",
        path="one-cta",
        block_m=tile.block_m,
        block_n=tile.block_n,
        split_size=split_size,
        num_splits=-(-request.seqlen_k // split_size) if several else 1,
        tokens_per_split=split_size if several else request.seqlen_k,
        launches=1,
        scratch_bytes=0,
        residual_bytes=request.residual_bytes,
    )


def _cuda_plan(request: Request) -> Plan:
    numbers = torch.ops.flash_attn_deterministic.plan(
        *_shared_arguments(request),
        request.page_size,
        request.cache_index,
        request.residual_bytes > 0,
        request.split_size,
        request.deterministic,
    )
    family, path, block_m, num_splits, tokens, launches, scratch = numbers
    return Plan(
        family=FAMILIES[family],
        path=PATHS[path],
        block_m=block_m,
        block_n=build_info().tile(request.head_dim).block_n,
        split_size=request.split_size,
        num_splits=num_splits,
        tokens_per_split=tokens if num_splits > 1 else request.seqlen_k,
        launches=launches,
        scratch_bytes=scratch,
        backward=_backward_plan(request),
        residual_bytes=request.residual_bytes,
    )


def _backward_plan(request: Request) -> BackwardPlan | None:
    held = not instance_problem(request.dtype, request.head_dim, "bwd")
    if request.deterministic_bwd is None or not held:
        return None
    family, *numbers = torch.ops.flash_attn_deterministic.bwd_plan(
        *_shared_arguments(request), request.deterministic_bwd
    )
    if family < 0:  # the GPU has too little shared memory for the backward
        return None
    return BackwardPlan(FAMILIES[family], *numbers)


def _shared_arguments(request: Request) -> tuple[Any, ...]:
    """Returns the leading arguments of both ops that plan."""
    return (
        torch.empty(0, dtype=request.dtype, device=request.device),
        request.batch,
        request.seqlen_q,
        request.seqlen_k,
        request.nheads,
        request.nheads_k,
        request.head_dim,
        *request.window,
        request.has_alibi,
        request.has_softcap,
        request.has_dropout,
        request.packed,
    )
