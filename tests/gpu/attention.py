"""What the GPU tests share: inputs, the call under test, exact references, comparison of bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from flash_attn_deterministic import flash_attn_func
from flash_attn_deterministic.build_info import Tile, build_info

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Of the bit checks: even and padded kernels, small and large tiles.
BIT_CONFIGS = (
    (64, "bf16"),
    (64, "fp16"),
    (80, "bf16"),
    (128, "bf16"),
    (128, "fp16"),
    (256, "bf16"),
)
HEAD_DIMS = (32, 36, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)

_REFERENCE_SCORES = 2**26  # float64 scores in flight: 512 MiB a matrix

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def each_config(configs: Sequence[tuple[int, str]]) -> pytest.MarkDecorator:
    """Runs a test with each head_dim and dtype."""
    names = [f"d{head_dim}-{dtype}" for head_dim, dtype in configs]
    return pytest.mark.parametrize(("head_dim", "dtype"), configs, ids=names)


def is_built(head_dim: int, dtype: str, direction: str = "fwd") -> bool:
    """Returns whether the installed wheel holds a kernel; direction is "fwd" or "bwd"."""
    wanted = (direction, dtype, build_info().kernel_head_dim(head_dim))
    return any((i.direction, i.dtype, i.head_dim) == wanted for i in build_info().instances)


def skip_unless_built(head_dim: int, dtype: str, direction: str = "fwd") -> None:
    """Skips the running test if the installed wheel lacks the kernel."""
    if not is_built(head_dim, dtype, direction):
        pytest.skip(f"this wheel holds no {direction} kernel for {dtype} and head_dim {head_dim}")


def make_qkv(
    shape: tuple[int, int, int, int],
    seqlen_k: int | None = None,
    nheads_k: int | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Tensors:
    """Draws q of a shape (batch, seqlen_q, nheads, head_dim), and k and v to go with it."""
    batch, seqlen_q, nheads, head_dim = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(seqlen: int, heads: int) -> torch.Tensor:
        size = (batch, seqlen, heads, head_dim)
        return torch.randn(size, generator=generator, device="cuda", dtype=dtype)

    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    nheads_k = nheads if nheads_k is None else nheads_k
    return draw(seqlen_q, nheads), draw(seqlen_k, nheads_k), draw(seqlen_k, nheads_k)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls the function under test.

    Returns:
        out and softmax_lse.
    """
    out, softmax_lse, _ = flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, return_attn_probs=True
    )
    return out, softmax_lse


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by its definition, in float64.

    Returns:
        out (batch, seqlen_q, nheads, head_dim) and lse (batch, nheads, seqlen_q), both float64;
        rows without a visible key: 0 and +inf.
    """
    batch, seqlen_q, nheads, _ = q.shape
    seqlen_k, nheads_k = k.shape[1], k.shape[2]
    group = nheads // nheads_k
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((batch, nheads, seqlen_q), math.inf, dtype=torch.float64, device=q.device)
    if seqlen_k == 0:
        return out, lse
    rows = max(1, _REFERENCE_SCORES // (group * seqlen_k))
    key = torch.arange(seqlen_k, device=q.device)
    for b in range(batch):
        for head_k in range(nheads_k):
            heads = slice(head_k * group, (head_k + 1) * group)
            keys = k[b, :, head_k].double()
            values = v[b, :, head_k].double()
            for begin in range(0, seqlen_q, rows):
                chunk = slice(begin, min(begin + rows, seqlen_q))
                scores = q[b, chunk, heads].double().transpose(0, 1) @ keys.T * softmax_scale
                if causal:
                    row = torch.arange(chunk.start, chunk.stop, device=q.device)
                    hidden = key > row[:, None] + seqlen_k - seqlen_q
                    scores.masked_fill_(hidden, -math.inf)
                chunk_lse = scores.logsumexp(-1)
                empty = chunk_lse == -math.inf
                probs = torch.exp(scores - chunk_lse.masked_fill(empty, 0.0)[..., None])
                out[b, chunk, heads] = (probs @ values).transpose(0, 1)
                lse[b, heads, chunk] = chunk_lse.masked_fill(empty, math.inf)
    return out, lse


def torch_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by the flash backend of torch's scaled_dot_product_attention.

    The op itself is called: its causal mask is aligned to the bottom right, as ours, where the
    function above it takes a top-left one. Heads of k and v are repeated, and a head dim that is
    no multiple of 8 is padded, as that function does.

    Returns:
        out (batch, seqlen_q, nheads, head_dim) and lse (batch, nheads, seqlen_q).
    """
    head_dim, group = q.shape[3], q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    q, k, v = (torch.nn.functional.pad(t, (0, -head_dim % 8)).transpose(1, 2) for t in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, scale=softmax_scale
    )
    return out.transpose(1, 2)[..., :head_dim], lse[..., : q.shape[2]]


@dataclass(frozen=True)
class Errors:
    """Distance of a result from the exact one."""

    largest: float
    rmse: float
    lse: float

    @property
    def finite(self) -> bool:
        """Returns whether no error is infinite."""
        return all(map(math.isfinite, (self.largest, self.rmse, self.lse)))


def errors(
    result: tuple[torch.Tensor, torch.Tensor], reference: tuple[torch.Tensor, torch.Tensor]
) -> Errors:
    """Compares (out, lse) with float64; a NaN is an infinite error.

    Of rows without a visible key only out counts.
    """
    out, lse = result
    exact_out, exact_lse = reference
    difference = (out.double() - exact_out).abs()
    lse_difference = torch.where(exact_lse.isfinite(), (lse.double() - exact_lse).abs(), 0.0)
    difference, lse_difference = (t.nan_to_num(math.inf) for t in (difference, lse_difference))
    return Errors(
        largest=float(difference.max()),
        rmse=float(difference.square().mean().sqrt()),
        lse=float(lse_difference.max()),
    )


@dataclass(frozen=True)
class Case:
    """A shape for the accuracy checks, its lengths in terms of the kernel's tile."""

    name: str
    seqlen_q: str
    seqlen_k: str
    batch: int
    nheads: int
    nheads_k: int

    def lengths(self, tile: Tile) -> tuple[int, int]:
        """Returns seqlen_q and seqlen_k for a tile."""
        return _length(self.seqlen_q, tile.block_m), _length(self.seqlen_k, tile.block_n)


def _length(text: str, block: int) -> int:
    named = {"tile-1": block - 1, "tile": block, "tile+1": block + 1}
    return named[text] if text in named else int(text)


ACCURACY_CASES = (
    Case("one-key", "1", "1", 2, 4, 4),
    Case("tile-minus-1", "tile-1", "tile-1", 2, 4, 4),
    Case("tile", "tile", "tile", 2, 4, 2),
    Case("tile-plus-1", "tile+1", "tile+1", 2, 4, 1),
    Case("1000-gqa", "1000", "1000", 2, 8, 2),
    Case("4096-mha", "4096", "4096", 1, 2, 2),
    Case("4096-gqa", "4096", "4096", 1, 8, 2),
    Case("decode-4096-mqa", "1", "4096", 2, 8, 1),
    Case("decode-1000-gqa", "1", "1000", 2, 8, 2),
    Case("chunk-of-4096", "tile+1", "4096", 2, 8, 2),
    Case("1000-of-4096-mqa", "1000", "4096", 1, 4, 1),
    Case("fewer-keys-gqa", "1000", "tile+1", 2, 8, 2),
    Case("one-key-for-many", "tile+1", "1", 2, 4, 2),
)


@dataclass(frozen=True)
class Measured:
    """Errors of both sides on one case."""

    ours: Errors
    torch: Errors


def measure_accuracy(
    case: Case, head_dim: int, dtype: str, causal: bool, softmax_scale: float | None = None
) -> Measured:
    """Runs one case with random inputs and compares both implementations with float64."""
    seqlen_q, seqlen_k = case.lengths(build_info().tile(head_dim))
    shape = (case.batch, seqlen_q, case.nheads, head_dim)
    q, k, v = make_qkv(shape, seqlen_k, case.nheads_k, dtype=DTYPES[dtype], seed=head_dim)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    reference = exact(q, k, v, scale, causal)
    return Measured(
        ours=errors(attend(q, k, v, scale, causal), reference),
        torch=errors(torch_flash(q, k, v, scale, causal), reference),
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Views floating-point numbers as integers: -0 differs from 0, a NaN equals itself."""
    integers = {2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(integers[tensor.element_size()])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns whether two tensors are equal bit for bit."""
    return left.dtype == right.dtype and torch.equal(bits(left), bits(right))


def assert_same(
    left: tuple[torch.Tensor, ...],
    right: tuple[torch.Tensor, ...],
    names: tuple[str, ...] = ("out", "softmax_lse"),
) -> None:
    """Asserts that two tuples of tensors, by default of a forward, are equal bit for bit."""
    for name, a, b in zip(names, left, right, strict=True):
        assert a.shape == b.shape, f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}"
        assert same_bits(a, b), f"{name}: {_describe(a, b)}"


def assert_same_in_a_graph(
    run: Callable[[], torch.Tensor], expected: torch.Tensor, replays: int
) -> None:
    """Asserts that each replay of a captured call writes all of its result, with the same bits."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(replays):
        captured.fill_(float("nan"))
        graph.replay()
        assert_same((captured,), (expected,), ("out",))


def assert_same_on_streams(run: Callable[[], torch.Tensor], expected: torch.Tensor) -> None:
    """Asserts that a call has the same bits on four streams that run at the same time."""
    streams = [torch.cuda.Stream() for _ in range(4)]  # type: ignore[no-untyped-call, unused-ignore]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(run())
    torch.cuda.synchronize()
    for result in results:
        assert_same((result,), (expected,), ("out",))


def _describe(left: torch.Tensor, right: torch.Tensor) -> str:
    if left.dtype != right.dtype:
        return f"dtypes {left.dtype} and {right.dtype}"
    different = bits(left) != bits(right)
    first = tuple(int(i) for i in different.nonzero()[0])
    return (
        f"{int(different.sum())} of {different.numel()} elements differ, the first at {first}: "
        f"{left[first].item()!r} and {right[first].item()!r}"
    )
