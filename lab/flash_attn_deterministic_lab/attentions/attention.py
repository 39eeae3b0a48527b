"""One attention in one setting, and the one signature that all are called with."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from ..errors import UnavailableError

# What an attention may take besides q, k, v and causal, by the name of the argument, in words.
OPTIONS = {
    "alibi_slopes": "ALiBi",
    "block_table": "pages",
    "dropout_p": "dropout",
    "mask": "masks",
    "packed": "packed sequences",
    "scale": "a scale of its own",
    "seqlens_k": "lengths of keys",
    "softcap": "softcap",
    "split_size": "a size of splits",
    "window": "windows",
}
GRADIENTS, FLOAT32 = "gradients", "float32"  # flags beside them: a backward, tensors of float32
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Packed:
    """Where packed sequences begin, (batch + 1,) int32, and the longest one."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(cls, seqlens_q: Sequence[int], seqlens_k: Sequence[int], device: str) -> Packed:
        """Returns that of sequences of these lengths."""
        starts_q, starts_k = (
            torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=device)
            for each in (seqlens_q, seqlens_k)
        )
        return cls(starts_q, starts_k, max(seqlens_q), max(seqlens_k))

    @functools.cached_property
    def seqused_k(self) -> Tensor:
        """Returns the keys of each sequence, (batch,) int32, for calls that want lengths."""
        return self.cu_seqlens_k.diff()

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments that FlashAttention's functions have for it."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}


@dataclass(frozen=True)
class Attention:
    """One attention in one setting.

    A call takes q (batch, seqlen_q, nheads, head_dim), k and v (batch, seqlen_k, nheads_k,
    head_dim), `causal` (aligned to the bottom right corner), and of OPTIONS what `takes` names:
    scale; window, (left, right), -1 for no limit; softcap; alibi_slopes (nheads,); dropout_p; mask,
    bool or added to the scores; seqlens_k (batch,) int32; packed: tensors are (total, nheads,
    head_dim) then; block_table (batch, pages) int32: k and v are (pages, page size, nheads_k,
    head_dim) then. It returns out like q, of latent attention, whose v is k[..., :512], like v.
    """

    name: str  # on the command line
    title: str  # for people
    make: Callable[[], Function]  # imports it; raises UnavailableError
    takes: frozenset[str]  # names of OPTIONS, GRADIENTS, FLOAT32
    distribution: str = "torch"  # that it comes from
    devices: tuple[str, ...] = ("cuda",)  # where it runs
    bench: bool = True  # whether `bench` times it unasked
    chunk_mask: bool = True  # whether it has a causal mask of its own for chunks of the queries
    deterministic: str = ""  # its setting with most promises of equal bits, if another than this
    # what calls run in, backwards too
    inside: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, repr=False)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **options: Any
    ) -> Tensor:
        lacking = [OPTIONS[name] for name in options if name not in self.takes]
        if lacking:
            raise UnavailableError(f"{self.name} takes no {', '.join(lacking)}")
        if q.device.type not in self.devices:
            raise UnavailableError(f"{self.name} does not run on {q.device.type}")
        return self.function(q, k, v, causal=causal, **options)

    @functools.cached_property
    def function(self) -> Function:
        """What is called, imported; raises UnavailableError."""
        return self.make()

    @property
    def version(self) -> str:
        """Returns distribution and version that it comes from."""
        try:
            found = f"{self.distribution} {metadata.version(self.distribution)}"
        except metadata.PackageNotFoundError:
            return self.distribution
        if "cudnn" in self.name:
            found += f", cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call, unused-ignore]
        return found

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Runs the forward, and returns its backward, which can run again and again."""
        if GRADIENTS not in self.takes:
            raise UnavailableError(f"{self.name} has no backward")
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        with torch.enable_grad(), self.inside():
            out = self(*leaves, **options)

        def backward() -> tuple[Tensor, ...]:
            with self.inside():
                return torch.autograd.grad(out, leaves, dout, retain_graph=True)

        return backward
