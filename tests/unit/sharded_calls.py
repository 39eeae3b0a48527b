"""What ranks run in tests/unit/ops/test_sharding.py; each returns whether bits are those of one."""

from __future__ import annotations

from typing import Any

import torch
from bits import bits_equal
from calls import int32, normal
from flash_attn_deterministic import interface
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

attention: Any = interface  # its functions, with DTensors too


def _compare(function: Any, tensors: list[torch.Tensor], placements: list[Any]) -> list[bool]:
    """Whether out and gradients of sharded tensors are those of whole ones, and out is sharded."""
    mesh = init_device_mesh("cpu", (2,))
    whole = [tensor.clone().requires_grad_() for tensor in tensors]
    parts = [
        distribute_tensor(tensor, mesh, [placement]).requires_grad_()
        for tensor, placement in zip(tensors, placements, strict=True)
    ]
    expected, found = function(*whole), function(*parts)
    assert isinstance(found, DTensor)
    dout = normal(*expected.shape, seed=9)
    of_whole: Any = expected
    of_parts: Any = found
    of_whole.backward(dout)
    of_parts.backward(distribute_tensor(dout, mesh, found.placements))
    pairs: list[Any] = [
        (found, expected),
        *((a.grad, b.grad) for a, b in zip(parts, whole, strict=True)),
    ]
    same = [bits_equal(a.full_tensor().detach(), b.detach()) for a, b in pairs]
    return [*same, found.placements[0].is_shard()]


def dense(dimension: int, dropout_p: float = 0.0) -> list[bool]:
    """flash_attn_func, sharded along a dimension; GQA."""
    q, k, v = (normal(2, n, h, 32, seed=n) for n, h in ((5, 4), (9, 2), (9, 2)))

    def call(*qkv: Any) -> Any:
        return attention.flash_attn_func(*qkv, dropout_p, causal=True)

    return _compare(call, [q, k, v], [Shard(dimension)] * 3)


def one_kv_head() -> list[bool]:
    """A head of keys that all ranks need: q alone is sharded."""
    tensors = [normal(2, 5, 4, 32), normal(2, 9, 1, 32), normal(2, 9, 1, 32, seed=2)]
    placements = [Shard(2), Replicate(), Replicate()]
    return _compare(lambda *qkv: attention.flash_attn_func(*qkv, causal=True), tensors, placements)


def packed(seqlens: bool) -> list[bool]:
    """qkv in one tensor; with seqlens packed sequences."""
    if not seqlens:
        qkv = normal(2, 7, 3, 4, 32)
        return _compare(attention.flash_attn_qkvpacked_func, [qkv], [Shard(3)])
    starts = int32(0, 3, 8)

    def call(q: Any, k: Any, v: Any) -> Any:
        here = starts
        if isinstance(q, DTensor):
            here = distribute_tensor(starts, q.device_mesh, [Replicate()])
        return attention.flash_attn_varlen_func(q, k, v, here, here, 5, 5, causal=True)

    q, k, v = (normal(8, h, 32, seed=h) for h in (4, 2, 2))
    return _compare(call, [q, k, v], [Shard(1)] * 3)


class Layer(torch.nn.Module):
    """Attention between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = torch.nn.Linear(32, 3 * 32, dtype=torch.bfloat16)
        self.after = torch.nn.Linear(32, 32, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, seqlen, 32) to the same."""
        qkv = self.before(x).unflatten(-1, (3, 2, 16))
        out: torch.Tensor = self.after(
            attention.flash_attn_qkvpacked_func(qkv, causal=True).flatten(2)
        )
        return out


def fsdp() -> list[bool]:
    """A layer under FSDP2: parameters sharded, gradients averaged over ranks of equal input."""
    whole, parts = Layer(), Layer()
    fully_shard(parts, mesh=init_device_mesh("cpu", (2,)))
    x = normal(2, 9, 32)
    expected, found = whole(x), parts(x)
    expected.sum().backward()
    found.sum().backward()
    same = [bits_equal(found.detach(), expected.detach())]
    for a, b in zip(parts.parameters(), whole.parameters(), strict=True):
        same.append(bits_equal(a.grad.full_tensor(), b.grad))  # type: ignore[union-attr, arg-type]
    return same
