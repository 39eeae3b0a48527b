"""One case, on the ranks of its groups."""

from __future__ import annotations

import datetime
import functools
from typing import Any

import torch
import torch.distributed as dist

from ... import distributed, interface
from ...errors import FlashAttnError
from ..contract.call import DTYPES, Tensors, cumulative
from ..shared.bits import difference
from .cases import Case

NAMES = ("out", "softmax_lse", "dq", "dk", "dv")
TIMEOUT = datetime.timedelta(seconds=600)  # of each collective


@functools.cache
def group_of(size: int) -> Any:
    """Returns the group of the first ranks; all ranks of the world have to call this."""
    return dist.new_group(list(range(size)), timeout=TIMEOUT)


def try_case(case: Case, device: str) -> dict[str, str] | None:
    """Computes a case on one device and over ranks.

    Returns, for each result that differs on this rank, where; None on ranks that have no part.
    """
    group = group_of(case.ranks)
    if dist.get_rank() >= case.ranks:
        return None
    tensors = _draw(case, device)
    expected = _expected(case, tensors, group)
    starts = _starts(case, device)
    cut: dict[str, Any] = {"group": group, "order": case.order}

    def shard(name: str, whole: torch.Tensor) -> torch.Tensor:
        of_keys = name in ("k", "v", "dk", "dv")
        cu_seqlens = starts[of_keys] if starts else None
        dim = whole.dim() - 1 if name == "softmax_lse" else whole.dim() - 3
        return distributed.shard(whole, dim, cu_seqlens=cu_seqlens, **cut)

    parts = {name: shard(name, whole) for name, whole in tensors.items()}
    chosen = {"ulysses_degree": case.degree, "heads_k_stride": case.heads_k}
    found = _results(distributed, case, parts, starts, {**cut, **chosen})
    differing = {}
    for name in NAMES:
        unlike = difference(shard(name, expected[name]), found[name])
        if unlike is not None:
            differing[name] = unlike.words
    return differing


def _results(
    functions: Any, case: Case, tensors: Tensors, starts: list[torch.Tensor], cut: dict[str, Any]
) -> Tensors:
    """Calls the functions of a module, and its backward."""
    leaves = [tensors[name].detach().requires_grad_() for name in ("q", "k", "v")]
    options = {"return_attn_probs": True, **case.options, **cut}
    with torch.enable_grad():
        if starts:
            lengths = (max(case.lengths_q), max(case.lengths_k))
            results = functions.flash_attn_varlen_func(*leaves, *starts, *lengths, **options)
        else:
            results = functions.flash_attn_func(*leaves, **options)
    out, softmax_lse, _ = results
    gradients = torch.autograd.grad(out, leaves, tensors["dout"])
    return dict(zip(NAMES, (out.detach(), softmax_lse, *gradients), strict=True))


def _draw(case: Case, device: str) -> Tensors:
    generator = torch.Generator().manual_seed(case.seed)
    tensors = {}
    for name, lengths, heads in (
        ("q", case.lengths_q, case.nheads),
        ("k", case.lengths_k, case.nheads_k),
        ("v", case.lengths_k, case.nheads_k),
        ("dout", case.lengths_q, case.nheads),
    ):
        tokens = (sum(lengths),) if case.packed else (len(lengths), lengths[0])
        drawn = torch.randn((*tokens, heads, case.head_dim), generator=generator)
        tensors[name] = drawn.to(device, DTYPES[case.dtype])
    return tensors


def _starts(case: Case, device: str) -> list[torch.Tensor]:
    """Returns cu_seqlens of q and k; nothing for a dense call."""
    if not case.packed:
        return []
    return [cumulative(one, torch.device(device)) for one in (case.lengths_q, case.lengths_k)]


def _expected(case: Case, tensors: Tensors, group: Any) -> Tensors:
    """Returns the results of one device: the first rank computes them, and sends them to all.

    Raises:
        FlashAttnError: on every rank, if the first one cannot compute them.
    """
    q, k = tensors["q"], tensors["k"]
    lse_shape = (q.shape[-2], q.shape[0]) if case.packed else (q.shape[0], q.shape[2], q.shape[1])
    expected = {
        "out": torch.empty_like(q),
        "softmax_lse": q.new_empty(lse_shape, dtype=torch.float32),
        "dq": torch.empty_like(q),
        "dk": torch.empty_like(k),
        "dv": torch.empty_like(k),
    }
    problem: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            results = _results(interface, case, tensors, _starts(case, str(q.device)), {})
            expected = {name: result.contiguous() for name, result in results.items()}
        except FlashAttnError as error:
            problem = [error]
    dist.broadcast_object_list(problem, group=group, group_src=0)
    if problem[0] is not None:
        raise problem[0]
    for name in NAMES:
        dist.broadcast(expected[name], group=group, group_src=0)
    return expected
