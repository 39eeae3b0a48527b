"""Launches do not depend on what other host threads, earlier failures or large grids leave behind.

The ops are called past autograd, so that every launch comes from the thread that the test means.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flash_attn_deterministic import explain, flash_attn_func, flash_attn_with_kvcache
from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.gpu.attention import assert_same, attend, make_qkv, same_bits, skip_unless_built

pytestmark = pytest.mark.gpu

OPS = torch.ops.flash_attn_deterministic
HEAD_DIM = pytest.mark.parametrize("head_dim", [64, 128, 256], ids=lambda d: f"d{d}")
MAX_GRID_Y = 65_535

Outputs = tuple[torch.Tensor, torch.Tensor]


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, split_size: int) -> Outputs:
    """Calls the op of the dense forward, without a mask."""
    scale = q.shape[3] ** -0.5
    out, softmax_lse = OPS.fwd(q, k, v, None, None, 0.0, scale, -1, -1, 0.0, split_size, True, True)
    return out, softmax_lse


# --- threads ------------------------------------------------------------------------------------


@pytest.fixture
def _frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@HEAD_DIM
@pytest.mark.usefixtures("_frequent_switches")
def test_threads_that_need_other_amounts_of_shared_memory(head_dim: int) -> None:
    """One kernel, with the state of several splits in shared memory and without.

    Were its limit set anew before each launch, a thread that needs less would lower it between
    another thread's setting and its launch, which then fails.
    """
    skip_unless_built(head_dim, "bf16")
    seqlen, calls = 128, 6000
    q, k, v = make_qkv((64, seqlen, 8, head_dim))
    expected = {}
    for split_size in (0, 64):
        plan = explain(flash_attn_func, q, k, v, split_size=split_size)
        assert plan.path == "one-cta"
        assert plan.num_splits == (1 if split_size == 0 else 2)
        expected[split_size] = forward(q, k, v, split_size)
    torch.cuda.synchronize()
    start = threading.Barrier(4)
    failures: list[str] = []

    def work(split_size: int) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
        try:
            with torch.cuda.stream(stream):
                start.wait()
                for _ in range(calls):
                    last = forward(q, k, v, split_size)
                stream.synchronize()
            assert_same(last, expected[split_size])
        except Exception as error:
            failures.append(f"split_size {split_size}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(size,)) for size in (0, 64, 0, 64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- counters -----------------------------------------------------------------------------------

# Schedule, shape of q, seqlen_k, nheads_k, split_size. Each has a counter in each launch: of row
# blocks, which are more than SMs here, or parts that CTAs have taken, or of parts that are done.
COUNTERS: dict[str, tuple[str, tuple[int, int, int, int], int, int, int]] = {
    "row-blocks": ("family=sm90", (8, 1100, 16, 64), 1100, 16, 0),
    "row-blocks-of-splits": ("family=sm90", (8, 1100, 16, 64), 1100, 16, 256),
    "parts": ("family=sm90,path=parts", (3, 300, 16, 128), 3000, 4, 256),
    **{f"done-{seqlen_q}-d{head_dim}": ("path=scores_first", (3, seqlen_q, 8, head_dim),
        3000, 2, 256) for seqlen_q in (1, 3) for head_dim in (64, 80, 128, 256)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "shape", "seqlen_k", "nheads_k", "split_size"), COUNTERS.values(), ids=COUNTERS
)
def test_counters_belong_to_one_launch(
    schedule: str, shape: tuple[int, int, int, int], seqlen_k: int, nheads_k: int, split_size: int
) -> None:
    """Cleared inside each, also in a replayed graph, and not shared by four streams at once."""
    skip_unless_built(shape[3], "bf16")
    q, k, v = make_qkv(shape, seqlen_k, nheads_k)

    def run() -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=True, split_size=split_size)

    with device_override(schedule):
        expected = run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for _ in range(20):
            captured.fill_(float("nan"))
            graph.replay()
            assert_same((captured,), (expected,), ("out",))
        streams = [torch.cuda.Stream() for _ in range(4)]  # type: ignore[no-untyped-call, unused-ignore]
        torch.cuda.synchronize()
        results = []
        for stream in streams * 10:
            with torch.cuda.stream(stream):
                results.append(run())
        torch.cuda.synchronize()
    for result in results:
        assert_same((result,), (expected,), ("out",))


# --- several launches ---------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "shape", "seqlen_k", "nheads_k", "split_size"), [
    *(pytest.param("family=sm90,path=parts", (3, 400, 8, head_dim), 16_000, 2, 128,
        id=f"parts-d{head_dim}") for head_dim in (64, 128, 256)),
    pytest.param("path=few_rows", (96, 2, 16, 64), 16_384, 4, 64, id="few-rows"),
    pytest.param("path=scores_first", (96, 2, 16, 64), 16_384, 4, 64, id="scores-first"),
])  # fmt: skip
def test_several_launches(
    schedule: str, shape: tuple[int, int, int, int], seqlen_k: int, nheads_k: int, split_size: int
) -> None:
    """More scratch than one launch may take: a call of the same sequence, often, is cut."""
    skip_unless_built(shape[3], "bf16")
    one = make_qkv((1, *shape[1:]), seqlen_k, nheads_k)
    often = [t.expand(shape[0], *t.shape[1:]) for t in one]
    options: dict[str, Any] = {"causal": True, "split_size": split_size}
    expected = flash_attn_func(*one, **options, return_attn_probs=True)[:2]
    with device_override(schedule):
        plan = explain(flash_attn_func, *often, **options)
        assert plan.path == schedule.rpartition("=")[2].replace("_", "-")
        assert plan.launches > 1
        assert plan.scratch_bytes <= 2**26
        out, softmax_lse, _ = flash_attn_func(*often, **options, return_attn_probs=True)
    for index in (0, 1, shape[0] // 2, shape[0] - 1):
        own = slice(index, index + 1)
        assert_same((out[own], softmax_lse[own]), expected)


# --- a failed call before a good one ------------------------------------------------------------

_CAPTURE_MODE_RELAXED = 2
_CAPTURE_UNSUPPORTED = 900  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
_CAPTURE_INVALIDATED = 901


@HEAD_DIM
def test_a_failed_runtime_call_does_not_fail_the_next_launch(head_dim: int) -> None:
    """The error of one call must not be found, and thrown, behind the next kernel's launch.

    The backward begins by clearing its counters. On a stream whose capture has been invalidated
    that fails before any kernel is launched. The driver's interface is used for the capture, as
    torch's allocator need not know of it: its memory is there since the first call.
    """
    for direction in ("fwd", "bwd"):
        skip_unless_built(head_dim, "bf16", direction)
    driver = ctypes.CDLL("libcuda.so.1")
    q, k, v = make_qkv((1, 70, 2, head_dim))
    expected = forward(q, k, v, 0)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    handle = ctypes.c_void_p(stream.cuda_stream)

    def backward() -> None:
        scale = head_dim**-0.5
        out, lse = expected
        OPS.bwd(q, q, k, v, out, lse, None, None, 0.0, scale, -1, -1, 0.0, True)

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        backward()
        stream.synchronize()
        assert driver.cuStreamBeginCapture_v2(handle, _CAPTURE_MODE_RELAXED) == 0
        assert driver.cuStreamSynchronize(handle) == _CAPTURE_UNSUPPORTED
        with pytest.raises(RuntimeError, match=r"(?i)capture"):
            backward()
        graph = ctypes.c_void_p()
        assert driver.cuStreamEndCapture(handle, ctypes.byref(graph)) == _CAPTURE_INVALIDATED
        assert_same(forward(q, k, v, 0), expected)
    torch.cuda.synchronize()
    assert_same(attend(q, k, v), expected)


# --- grids of append_kv -------------------------------------------------------------------------


def append(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, old: int, rotary: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Appends all but the first `old` keys to a cache that holds those.

    Returns:
        out, softmax_lse, and what lies in the cache afterwards.
    """
    k_cache, v_cache = torch.zeros_like(k), torch.zeros_like(v)
    k_cache[:, :old], v_cache[:, :old] = k[:, :old], v[:, :old]
    out, softmax_lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k[:, old:].contiguous(),
        v[:, old:].contiguous(),
        rotary_cos=rotary,
        rotary_sin=rotary,
        cache_seqlens=torch.tensor([old] * len(q), dtype=torch.int32, device="cuda"),
        causal=True,
        return_softmax_lse=True,
    )
    return out, softmax_lse, k_cache, v_cache


@pytest.mark.parametrize("rotates", [False, True], ids=["plain", "rotary"])
def test_append_more_heads_than_a_grid_is_high(rotates: bool) -> None:
    """Heads of keys, values and rotated queries together are more than gridDim.y can be."""
    skip_unless_built(64, "bf16")
    nheads = MAX_GRID_Y // 3 + 1000 if rotates else MAX_GRID_Y // 2 + 1000
    assert (3 if rotates else 2) * nheads > MAX_GRID_Y
    q, k, v = make_qkv((1, 2, nheads, 64), seqlen_k=8)
    rotary = make_qkv((1, 8, 1, 16))[0].reshape(8, 16) if rotates else None
    out, softmax_lse, k_cache, v_cache = append(q, k, v, 6, rotary)
    assert same_bits(v_cache, v)
    if not rotates:
        assert same_bits(k_cache, k)
        assert_same((out, softmax_lse), attend(q, k, v, causal=True))
    parts = []
    step = nheads // 4 + 1
    for begin in range(0, nheads, step):
        heads = slice(begin, begin + step)
        parts.append(append(q[:, :, heads], k[:, :, heads], v[:, :, heads], 6, rotary))
    for name, dim, whole, some in zip(
        ("out", "softmax_lse", "k_cache", "v_cache"),
        (2, 1, 2, 2),
        (out, softmax_lse, k_cache, v_cache),
        zip(*parts, strict=True),
        strict=True,
    ):
        assert_same((whole,), (torch.cat(some, dim=dim),), (name,))


@pytest.mark.parametrize(
    ("shape", "seqlen_k", "old"),
    [((2, 1, 2, 64), MAX_GRID_Y + 1000, 100), ((MAX_GRID_Y + 1000, 1, 1, 64), 4, 3)],
    ids=["tokens", "sequences"],
)
def test_append_more_than_a_grid_is_high(
    shape: tuple[int, int, int, int], seqlen_k: int, old: int
) -> None:
    skip_unless_built(64, "bf16")
    q, k, v = make_qkv(shape, seqlen_k=seqlen_k)
    out, softmax_lse, k_cache, v_cache = append(q, k, v, old, None)
    assert same_bits(k_cache, k)
    assert same_bits(v_cache, v)
    assert_same((out, softmax_lse), attend(q, k, v, causal=True))
