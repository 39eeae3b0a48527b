"""How the backward is run: streams, graphs, compilers, memory, sizes, and that it always ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic import deterministic_mode, flash_attn_func, flash_attn_varlen_func
from torch.utils.checkpoint import checkpoint

from tests.gpu.attention import bits, same_bits
from tests.gpu.gradients import (
    FEATURES,
    GradientCall,
    Gradients,
    assert_same_gradients,
    draw_call,
    int32,
)

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[3]
HEAD_DIM = pytest.mark.parametrize("head_dim", [64, 128, 256], ids=lambda d: f"d{d}")
CAUSAL = pytest.mark.parametrize("feature", ["full", "causal"])
OPS = torch.ops.flash_attn_deterministic


@pytest.fixture
def deterministic_torch() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_nothing_waits_forever() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.backward.no_deadlock"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"still running; it had reached: {expired.output!r}")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "done"


@pytest.mark.parametrize("feature", ["full", "causal", "everything"])
@HEAD_DIM
def test_cuda_graph_of_a_training_step(head_dim: int, feature: str) -> None:
    calls = [draw_call(head_dim, "bf16", feature, seed=seed) for seed in (0, 1)]
    expected = [call() for call in calls]
    first = calls[0]
    static = replace(first, **{n: getattr(first, n).clone() for n in ("q", "k", "v", "dout")})
    if first.slopes is not None:
        static = replace(static, slopes=first.slopes.clone())
    leaves = [t.requires_grad_() for t in (static.q, static.k, static.v)]

    def step() -> Gradients:
        q, k, v = leaves
        out = flash_attn_func(q, k, v, alibi_slopes=static.slopes, **static.options)
        dq, dk, dv = torch.autograd.grad(out, leaves, static.dout)
        return dq, dk, dv

    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for index in (1, 0, 0, 1):
        with torch.no_grad():
            for name in ("q", "k", "v", "dout", "slopes"):
                if getattr(static, name) is not None:
                    getattr(static, name).copy_(getattr(calls[index], name))
        for gradient in result:
            gradient.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_gradients(result, expected[index])


@HEAD_DIM
def test_other_stream(head_dim: int) -> None:
    call = draw_call(head_dim, "bf16", "causal")
    expected = call()
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Only launches on this very stream see the inputs after they are written.
        names = ("q", "k", "v", "dout")
        late: dict[str, Any] = {name: torch.empty_like(getattr(call, name)) for name in names}
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call, unused-ignore]
        for name in names:
            late[name].copy_(getattr(call, name))
        result = replace(call, **late)()
    stream.synchronize()
    assert_same_gradients(result, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@HEAD_DIM
def test_device_that_is_not_current(head_dim: int) -> None:
    call = draw_call(head_dim, "bf16", "causal")
    expected = call()
    other = replace(call, **{n: getattr(call, n).to("cuda:1") for n in ("q", "k", "v", "dout")})
    assert torch.cuda.current_device() == 0
    dq, dk, dv = (gradient.to("cuda:0") for gradient in other())
    assert_same_gradients((dq, dk, dv), expected)


# torch.compile itself warns about what it plans to change.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 36], ids=["d64", "d36"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile(backend: str, head_dim: int, feature: str) -> None:
    torch.compiler.reset()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=feature == "causal")

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    for seqlen in (333, 500):
        call = draw_call(head_dim, "bf16", feature, seqlen_q=seqlen)
        leaves = [t.detach().requires_grad_() for t in (call.q, call.k, call.v)]
        dq, dk, dv = torch.autograd.grad(compiled(*leaves), leaves, call.dout)
        assert_same_gradients((dq, dk, dv), call())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_of_packed_sequences(backend: str) -> None:
    torch.compiler.reset()
    call = draw_call(64, "bf16", batch=1, seqlen_q=400)
    starts = int32([0, 100, 100, 229, 400])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_varlen_func(q, k, v, starts, starts, 171, 171, causal=True)

    results = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend=backend)):
        leaves = [t[0].detach().requires_grad_() for t in (call.q, call.k, call.v)]
        dq, dk, dv = torch.autograd.grad(function(*leaves), leaves, call.dout[0])
        results.append((dq, dk, dv))
    assert_same_gradients(*results)


@pytest.mark.filterwarnings("ignore")
@CAUSAL
@pytest.mark.parametrize("dropout_p", [0.0, 0.2], ids=["plain", "dropout"])
def test_opcheck(dropout_p: float, feature: str) -> None:
    call = draw_call(64, "bf16", feature, seqlen_q=65)
    window_right = 0 if feature == "causal" else -1
    state = torch.tensor([3, 4], device="cuda") if dropout_p else None
    scores = (dropout_p, 0.125, -1, window_right, 0.0)
    out, lse = OPS.fwd(call.q, call.k, call.v, None, state, *scores, 2048, True, True)
    rows = (call.dout, call.q, call.k, call.v, out)
    result = torch.library.opcheck(OPS.bwd.default, (*rows, lse, None, state, *scores, True))
    assert set(result.values()) == {"SUCCESS"}
    starts = int32([0, 65, 130])
    packed = (*(t.flatten(0, 1) for t in rows), lse.transpose(0, 1).flatten(1))
    result = torch.library.opcheck(
        OPS.varlen_bwd.default, (*packed, starts, starts, None, state, 65, 65, *scores, True)
    )
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2], ids=["plain", "dropout"])
def test_activation_checkpointing(dropout_p: float, use_reentrant: bool) -> None:
    call = draw_call(64, "bf16", "causal").with_options(dropout_p=dropout_p)
    leaves = [t.detach().requires_grad_() for t in (call.q, call.k, call.v)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, dropout_p, causal=True)

    torch.manual_seed(call.seed)
    out = checkpoint(attend, *leaves, use_reentrant=use_reentrant)
    out.backward(call.dout)
    dq, dk, dv = (leaf.grad for leaf in leaves)
    assert dq is not None and dk is not None and dv is not None  # noqa: PT018
    assert_same_gradients((dq, dk, dv), call())


@pytest.mark.usefixtures("deterministic_torch")
@pytest.mark.parametrize("feature", FEATURES)
def test_deterministic_algorithms_are_enough(feature: str) -> None:
    """Warnings are errors here; and torch fills new tensors with NaN, so none may be left over."""
    call = draw_call(64, "bf16", feature, nheads=4, nheads_k=2)
    for gradient in call.with_options(deterministic=True)():
        assert gradient.isfinite().all()
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        call.with_options(deterministic="never")()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
        call.with_options(deterministic="never")()


def test_backward_keeps_the_mode_of_the_forward() -> None:
    call = draw_call(128, "bf16", seqlen_q=4096, nheads=2, nheads_k=2)
    backward = call.repeated()
    expected = backward()
    with deterministic_mode(enabled=False):
        for _ in range(20):
            assert_same_gradients(backward(), expected)


def upstreams_scratch(call: GradientCall, packed: bool) -> int:
    """Bytes that upstream's backward without determinism takes beside dq, dk and dv.

    As in mha_bwd and mha_varlen_bwd of its flash_api.cpp: dq in fp32 and a number for each row,
    rows rounded up to 128; for GQA dk and dv of each query head.
    """
    batch, seqlen_q, nheads, head_dim = call.q.shape
    seqlen_k, nheads_k = call.k.shape[1:3]
    rounded = -(-head_dim // 32) * 32
    rows = batch * (seqlen_q + 128 if packed else -(-seqlen_q // 128) * 128)
    expanded = batch * seqlen_k * nheads * head_dim * 2 * 2 if nheads != nheads_k else 0
    return rows * nheads * (rounded + 1) * 4 + expanded


@pytest.mark.parametrize("deterministic", [True, False], ids=["turns", "atomics"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("batch", "seqlen", "nheads", "nheads_k"),
    [(4, 4096, 16, 16), (2, 8192, 32, 8), (1, 16_384, 8, 1), (16, 512, 16, 4), (16, 512, 8, 4)],
    ids=["mha", "gqa", "mqa", "short", "pairs"],
)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256], ids=lambda d: f"d{d}")
def test_scratch_is_at_most_upstreams(
    head_dim: int,
    batch: int,
    seqlen: int,
    nheads: int,
    nheads_k: int,
    packed: bool,
    deterministic: bool,
) -> None:
    call = draw_call(
        head_dim, "bf16", batch=batch, seqlen_q=seqlen, nheads=nheads, nheads_k=nheads_k
    )
    rows = [call.dout, call.q, call.k, call.v]
    scores = (0.0, head_dim**-0.5, -1, 0, 0.0)
    if packed:
        rows = [t.flatten(0, 1) for t in rows]
        lse = torch.zeros((nheads, batch * seqlen), device="cuda")
        starts = int32([i * seqlen for i in range(batch + 1)])
        fixed: tuple[Any, ...] = (starts, starts, None, None, seqlen, seqlen, *scores)
        op = OPS.varlen_bwd
    else:
        lse = torch.zeros((batch, nheads, seqlen), device="cuda")
        fixed = (None, None, *scores)
        op = OPS.bwd
    out = torch.zeros_like(rows[1])
    torch.cuda.synchronize()
    # What was asked for: the allocator may hand out blocks that are larger.
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    gradients = op(*rows, out, lse, *fixed, deterministic)
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    scratch = peak - sum(gradient.nbytes for gradient in gradients)
    allowed = upstreams_scratch(call, packed) + 2**20
    if packed and nheads == 2 * nheads_k:
        # Packed sequences may leave most of a block of keys unused each. Groups of more than two
        # heads take less than upstream for them; pairs take as much, and this.
        allowed += batch * 128 * nheads_k * 2 * head_dim * 4
    if seqlen > 4096:  # sums of chunks of rows: a slot for each CTA and level of the tree
        allowed += 20 * 2**20
    assert 0 < scratch <= allowed


def test_batch_larger_than_a_grid_dimension() -> None:
    call = draw_call(
        64, "bf16", "causal", batch=70_000, seqlen_q=2, seqlen_k=3, nheads=1, nheads_k=1
    )
    dq, dk, dv = call()
    for i in (0, 65_535, 65_536, 69_999):
        one = slice(i, i + 1)
        assert_same_gradients(call.sequences(one)(), (dq[one], dk[one], dv[one]))


@pytest.mark.slow
def test_more_than_2_to_31_elements_over_the_batch() -> None:
    call = draw_call(64, "bf16", "causal", batch=33_000, seqlen_q=32, nheads=32, nheads_k=32)
    assert call.q.numel() > 2**31
    dq, dk, dv = call()
    for i in (0, 16_400, 32_999):
        one = slice(i, i + 1)
        assert_same_gradients(call.sequences(one)(), (dq[one], dk[one], dv[one]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(530_000, 3), (3, 530_000)], ids=["queries", "keys"]
)
def test_more_than_2_to_31_elements_in_a_sequence(seqlen_q: int, seqlen_k: int) -> None:
    call = draw_call(
        128, "bf16", batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, nheads=32, nheads_k=32
    )
    assert max(call.q.numel(), call.k.numel()) > 2**31
    dq, dk, dv = call()
    for h in (0, 31):
        heads = slice(h, h + 1)
        alone = call.kv_heads(h, h + 1)
        names = ("q", "k", "v", "dout")
        alone = replace(alone, **{name: getattr(alone, name).contiguous() for name in names})
        assert_same_gradients(alone(), (dq[:, :, heads], dk[:, :, heads], dv[:, :, heads]))


@pytest.mark.slow
def test_more_than_2_to_31_elements_of_packed_sequences() -> None:
    """Two sequences; the second begins beyond 2^31 elements, with groups of heads."""
    call = draw_call(128, "bf16", batch=1, seqlen_q=530_200, nheads=32, nheads_k=2)
    lengths = [530_000, 200]
    starts = int32([0, lengths[0], sum(lengths)])
    q, k, v = (t[0].detach().requires_grad_() for t in (call.q, call.k, call.v))
    # A window: each key is seen by few rows.
    options: dict[str, Any] = {"window_size": (64, 0)}
    longest = max(lengths)
    out = flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, **options)
    gradients = torch.autograd.grad(out, (q, k, v), call.dout[0])
    own = slice(lengths[0], None)
    names = ("q", "k", "v", "dout")
    last = replace(call, **{name: getattr(call, name)[:, own].contiguous() for name in names})
    for gradient, expected in zip(gradients, last.with_options(**options)(), strict=True):
        assert same_bits(gradient[None, own], expected)
    assert bits(gradients[0][: lengths[0]]).any()


def test_double_backward_is_refused() -> None:
    call = draw_call(64, "bf16")
    leaves, out = call.forward()
    (dq,) = torch.autograd.grad(out, leaves[0], call.dout, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(dq.sum(), leaves[0])
