"""What users expect of an op of torch: autocast, vmap, export, checkpoints, determinism."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import all_equal, bits_equal
from calls import CALLS, int32, normal, qkv_call
from flash_attn_deterministic import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn_deterministic.errors import DtypeError, UnsupportedError
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

DENSE = [name for name in CALLS if "varlen" not in name and "kvcache" not in name]
INPUTS = ("q", "k", "v", "qkv", "kv")


# --- autocast -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CALLS if "kvcache" not in name])
def test_autocast_casts_float32(name: str) -> None:
    call = CALLS[name](32)
    wide = {n: x.float().requires_grad_() for n, x in call.arguments.items() if n in INPUTS}
    with pytest.raises(DtypeError):
        call(**wide)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(**wide)
    assert bits_equal(out.detach(), call())
    out.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in wide.values())


def test_autocast_casts_all_of_a_mixed_call() -> None:
    call = qkv_call()
    with torch.autocast("cpu", torch.bfloat16):
        out = call(k=call.arguments["k"].float())
        half = {n: call.arguments[n].half() for n in "qkv"}
        assert call(**half).dtype == torch.float16  # as without autocast
    assert bits_equal(out, call())


# --- vmap ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_dim", [0, 2])
@pytest.mark.parametrize("name", DENSE)
def test_vmap_is_a_loop(name: str, in_dim: int) -> None:
    calls = [CALLS[name](20) for _ in range(3)]
    names = [n for n in calls[0].arguments if n in INPUTS]
    for number, call in enumerate(calls):
        call.arguments |= {n: call.arguments[n] + number for n in names}
    leaves = [
        torch.stack([call.arguments[n] for call in calls], in_dim).requires_grad_() for n in names
    ]
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0])

    def one(*tensors: torch.Tensor) -> Any:
        return calls[0](**dict(zip(names, tensors, strict=True)), alibi_slopes=slopes)

    found = torch.func.vmap(one, in_dim)(*leaves)
    expected = torch.stack([call(alibi_slopes=slopes) for call in calls])
    assert bits_equal(found.detach(), expected)
    dout = normal(*found.shape)
    by_vmap = torch.autograd.grad(found, leaves, dout)
    loop = torch.stack([one(*(leaf.select(in_dim, i) for leaf in leaves)) for i in range(3)])
    by_loop = torch.autograd.grad(loop, leaves, dout)
    assert all_equal(by_vmap, by_loop)


def test_vmap_of_some_tensors() -> None:
    call = qkv_call()
    q = torch.stack([call.arguments["q"]] * 2)
    slopes = torch.rand(2, 2, 4)
    found = torch.func.vmap(lambda q, s: call(q=q, alibi_slopes=s))(q, slopes)
    assert bits_equal(found, torch.stack([call(alibi_slopes=s) for s in slopes]))


@pytest.mark.parametrize("name", [name for name in CALLS if name not in DENSE])
def test_vmap_of_packed_sequences_and_caches_is_refused(name: str) -> None:
    call = CALLS[name](32)
    first = next(iter(call.arguments))
    with pytest.raises(UnsupportedError, match=r"torch\.func\.vmap: there is no rule for"):
        torch.func.vmap(lambda x: call(**{first: x}))(torch.stack([call.arguments[first]] * 2))


def test_vmap_with_dropout_is_refused() -> None:
    call = qkv_call()
    with pytest.raises(UnsupportedError, match=r"torch\.func\.vmap: expected dropout_p 0.0"):
        torch.func.vmap(lambda q: call(q=q, dropout_p=0.1), randomness="same")(
            torch.stack([call.arguments["q"]] * 2)
        )


# --- export, checkpoints ------------------------------------------------------------------------


class Attention(torch.nn.Module):
    """A parameter before attention."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(32, dtype=torch.bfloat16))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attends."""
        return flash_attn_func(q * self.weight, k, v, causal=True)


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_export_with_dynamic_shapes(strict: bool) -> None:
    batch, q_len, k_len = (torch.export.Dim(name, min=1, max=64) for name in ("b", "q", "k"))
    shapes = ({0: batch, 1: q_len}, {0: batch, 1: k_len}, {0: batch, 1: k_len})
    example = normal(2, 5, 4, 32), normal(2, 9, 2, 32), normal(2, 9, 2, 32)
    module = Attention()
    exported = torch.export.export(module, example, dynamic_shapes=shapes, strict=strict).module()
    for sizes in ((3, 7, 11), (2, 20, 4)):
        b, m, n = sizes
        inputs = normal(b, m, 4, 32), normal(b, n, 2, 32), normal(b, n, 2, 32, seed=1)
        out = exported(*inputs)
        assert bits_equal(out.detach(), module(*inputs).detach())
    out.sum().backward()  # an exported program can be trained
    assert [p.grad is not None for p in exported.parameters()] == [True]


class Packed(Attention):
    """The same of packed sequences."""

    def forward(self, q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any) -> torch.Tensor:  # type: ignore[override]
        """Attends."""
        longest = q.shape[0], k.shape[0]
        return flash_attn_varlen_func(q * self.weight, k, v, starts_q, starts_k, *longest)


class Cached(Attention):
    """The same over a cache."""

    def forward(self, q: Any, k: Any, v: Any, seqlens: Any) -> torch.Tensor:  # type: ignore[override]
        """Attends."""
        return flash_attn_with_kvcache(q * self.weight, k, v, cache_seqlens=seqlens)


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_export_of_packed_sequences_and_caches(strict: bool) -> None:
    rows, keys, batch = (torch.export.Dim(name, min=2, max=64) for name in ("q", "k", "b"))
    packed: Any = ({0: rows}, {0: keys}, {0: keys}, {0: batch}, {0: batch})
    cached: Any = ({0: batch}, {0: batch, 1: keys}, {0: batch, 1: keys}, {0: batch})
    one, two = normal(5, 4, 32), normal(9, 2, 32)
    many, cache = normal(2, 3, 4, 32), normal(2, 9, 2, 32)
    calls: list[tuple[Attention, Any, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = [
        (
            Packed(),
            packed,
            (one, two, two + 1, int32(0, 2, 5), int32(0, 4, 9)),
            (one[:4], two[:7], two[2:], int32(0, 1, 2, 4), int32(0, 4, 4, 7)),
        ),
        (
            Cached(),
            cached,
            (many, cache, cache + 1, int32(4, 6)),
            (normal(3, 3, 4, 32), normal(3, 12, 2, 32), normal(3, 12, 2, 32), int32(4, 6, 12)),
        ),
    ]
    for module, shapes, example, others in calls:
        exported = torch.export.export(
            module, example, dynamic_shapes=shapes, strict=strict
        ).module()
        assert bits_equal(exported(*others).detach(), module(*others).detach())


def _policy(saved: list[str], context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    if "flash_attn_deterministic" in str(op):
        saved.append(f"{op} {context.is_recompute}")
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_a_selective_checkpoint_can_keep_attention(compiles: bool) -> None:
    torch._dynamo.reset()
    saved: list[str] = []
    contexts = functools.partial(
        create_selective_checkpoint_contexts, functools.partial(_policy, saved)
    )

    def attend(x: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(x.sin(), x, x).cos()

    def run(x: torch.Tensor) -> Any:
        return checkpoint(attend, x, use_reentrant=False, context_fn=contexts)

    function: Callable[[torch.Tensor], Any] = run
    if compiles:
        function = torch.compile(run, fullgraph=True, backend="aot_eager")
    found, expected = (normal(1, 9, 2, 32).requires_grad_() for _ in range(2))
    function(found).sum().backward()
    attend(expected).sum().backward()  # type: ignore[no-untyped-call, unused-ignore]
    assert found.grad is not None
    assert expected.grad is not None
    assert bits_equal(found.grad, expected.grad)
    # Kept: the recomputation takes the result of the first run and asks for no other.
    assert saved or compiles
    assert [one for one in saved if one.startswith("flash_attn_deterministic.bwd")] == []
