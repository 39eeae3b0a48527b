"""How both directions are run: streams, graphs, compilers, memory, sizes; that all of it ends."""

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
from flash_attn_deterministic import flash_attn_func, flash_attn_varlen_func
from flash_attn_deterministic.verify.contract.call import Call, Tensors, named_gradients, part
from torch.utils.checkpoint import checkpoint

from tests.gpu.attention import bits, pairwise
from tests.gpu.gradients import (
    FEATURES,
    GRADIENTS,
    SEED,
    assert_same_results,
    draw_call,
    int32,
    results,
)
from tests.inductor import HAS_HEADERS

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


def leaves_of(call: Call) -> list[torch.Tensor]:
    return [t.detach().requires_grad_() for t in (call.q, call.k, call.v)]


def step(call: Call, leaves: list[torch.Tensor]) -> Tensors:
    """out, softmax_lse and the gradients of one forward."""
    out, lse, _ = flash_attn_func(*leaves, return_attn_probs=True, **call.keywords)
    found = named_gradients(out, leaves, call.dout)
    return {"out": out.detach(), "softmax_lse": lse.detach(), **found}


@pytest.mark.parametrize("feature", ["full", "causal", "everything"])
@HEAD_DIM
def test_cuda_graph_of_a_training_step(head_dim: int, feature: str) -> None:
    calls = [draw_call(head_dim, "bf16", feature, seed=seed) for seed in (0, 1)]
    expected = [results(call) for call in calls]
    names = [n for n in ("q", "k", "v", "dout", "slopes") if getattr(calls[0], n) is not None]
    static = replace(calls[0], **{n: getattr(calls[0], n).clone() for n in names})
    leaves = [t.requires_grad_() for t in (static.q, static.k, static.v)]
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(static, leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(static, leaves)
    for index in (1, 0, 0, 1):
        with torch.no_grad():
            for name in names:
                getattr(static, name).copy_(getattr(calls[index], name))
        for tensor in result.values():
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_results(result, expected[index])


@HEAD_DIM
def test_other_stream(head_dim: int) -> None:
    call = draw_call(head_dim, "bf16", "causal")
    expected = results(call)
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Only launches on this very stream see the inputs after they are written.
        names = ("q", "k", "v", "dout")
        late: dict[str, Any] = {name: torch.empty_like(getattr(call, name)) for name in names}
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call, unused-ignore]
        for name in names:
            late[name].copy_(getattr(call, name))
        late_call = replace(call, **late)
        result = step(late_call, leaves_of(late_call))
    stream.synchronize()
    assert_same_results(result, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@HEAD_DIM
def test_device_that_is_not_current(head_dim: int) -> None:
    call = draw_call(head_dim, "bf16", "causal")
    other = replace(call, **{n: getattr(call, n).to("cuda:1") for n in ("q", "k", "v", "dout")})
    assert torch.cuda.current_device() == 0
    found = {name: tensor.to("cuda:0") for name, tensor in results(other).items()}
    assert_same_results(found, results(call))


# torch.compile itself warns about what it plans to change.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 36], ids=["d64", "d36"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=HAS_HEADERS)])
def test_torch_compile(backend: str, head_dim: int, feature: str) -> None:
    torch.compiler.reset()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=feature == "causal")

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    for seqlen in (333, 500):
        call = draw_call(head_dim, "bf16", feature, seqlen_q=seqlen)
        leaves = leaves_of(call)
        found = named_gradients(compiled(*leaves), leaves, call.dout)
        assert_same_results(found, call.gradients())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=HAS_HEADERS)])
def test_torch_compile_of_packed_sequences(backend: str) -> None:
    torch.compiler.reset()
    call = draw_call(64, "bf16", batch=1, seqlen_q=400)
    starts = int32([0, 100, 100, 229, 400])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_varlen_func(q, k, v, starts, starts, 171, 171, causal=True)

    results = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend=backend)):
        leaves = [t[0].detach().requires_grad_() for t in (call.q, call.k, call.v)]
        results.append(named_gradients(function(*leaves), leaves, call.dout[0]))
    assert_same_results(*results)


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
    leaves = leaves_of(call)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, dropout_p, causal=True)

    torch.manual_seed(SEED)
    out = checkpoint(attend, *leaves, use_reentrant=use_reentrant)
    out.backward(call.dout)
    expected = call.gradients()
    for name, leaf in zip(GRADIENTS, leaves, strict=True):
        assert leaf.grad is not None
        assert_same_results({name: leaf.grad}, {name: expected[name]})


@pytest.mark.usefixtures("deterministic_torch")
@pytest.mark.parametrize("feature", FEATURES)
def test_deterministic_algorithms_are_enough(feature: str) -> None:
    """Warnings are errors here; and torch fills new tensors with NaN, so none may be left over."""
    call = draw_call(64, "bf16", feature, nheads=4, nheads_k=2)
    for gradient in call.with_options(deterministic=True).gradients().values():
        assert gradient.isfinite().all()
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        call.with_options(deterministic="never").gradients()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
        call.with_options(deterministic="never").gradients()


def upstreams_scratch(call: Call, packed: bool) -> int:
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


@pairwise(
    head_dim=(64, 96, 128, 192, 256),
    shape={
        "mha": (4, 4096, 16, 16),
        "gqa": (2, 8192, 32, 8),
        "mqa": (1, 16_384, 8, 1),
        "short": (16, 512, 16, 4),
        "pairs": (16, 512, 8, 4),
    },
    packed={"dense": False, "packed": True},
    deterministic={"turns": True, "atomics": False},
)
def test_scratch_is_at_most_upstreams(
    head_dim: int, shape: tuple[int, int, int, int], packed: bool, deterministic: bool
) -> None:
    batch, seqlen, nheads, nheads_k = shape
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


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize(
    ("batch", "lengths", "nheads", "places"),
    [
        pytest.param(70_000, (2, 3), 1, (0, 65_535, 65_536, 69_999), id="grid"),
        pytest.param(
            33_000, (32, 32), 32, (0, 16_400, 32_999), marks=pytest.mark.slow, id="elements"
        ),
    ],
)
def test_batch_beyond_a_grid_dimension_and_2_to_31_elements(
    batch: int, lengths: tuple[int, int], nheads: int, places: tuple[int, ...]
) -> None:
    call = draw_call(
        64, "bf16", "causal",
        batch=batch, seqlen_q=lengths[0], seqlen_k=lengths[1], nheads=nheads, nheads_k=nheads,
    )  # fmt: skip
    assert nheads == 1 or call.q.numel() > 2**31
    together = results(call)
    for place in places:
        assert_same_results(results(call.sequences([place])), part(together, b=[place]))


@pytest.mark.slow
@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(530_000, 3), (3, 530_000)], ids=["queries", "keys"]
)
def test_more_than_2_to_31_elements_in_a_sequence(seqlen_q: int, seqlen_k: int) -> None:
    call = draw_call(
        128, "bf16", batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, nheads=32, nheads_k=32
    )
    assert max(call.q.numel(), call.k.numel()) > 2**31
    together = results(call)
    for h in (0, 31):
        alone = call.kv_heads(h, h + 1)
        names = ("q", "k", "v", "dout")
        alone = replace(alone, **{name: getattr(alone, name).contiguous() for name in names})
        heads = slice(h, h + 1)
        assert_same_results(results(alone), part(together, h=heads, g=heads))


@pytest.mark.slow
@pytest.mark.usefixtures("much_memory")
def test_more_than_2_to_31_elements_of_packed_sequences() -> None:
    """Two sequences; the second begins beyond 2^31 elements, with groups of heads."""
    call = draw_call(128, "bf16", batch=1, seqlen_q=530_200, nheads=32, nheads_k=2)
    # A window: each key is seen by few rows.
    call = call.with_options(window_size=(64, 0))
    lengths = [530_000, 200]
    starts = int32([0, lengths[0], sum(lengths)])
    leaves = [t[0].detach().requires_grad_() for t in (call.q, call.k, call.v)]
    out: Any = flash_attn_varlen_func(*leaves, starts, starts, *[max(lengths)] * 2, **call.keywords)
    found = named_gradients(out, leaves, call.dout[0])
    names = ("q", "k", "v", "dout")
    last = {name: getattr(call, name)[:, lengths[0] :].contiguous() for name in names}
    own = {name: gradient[None, lengths[0] :] for name, gradient in found.items()}
    assert_same_results(own, replace(call, **last).gradients())
    assert bits(found["dq"][: lengths[0]]).any()
