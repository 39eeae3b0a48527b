"""Hopper's kernels and those for every GPU give the same bits: one family forced against the other.

So do Hopper's walk over all splits and its part for each, which has several launches and a counter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from flash_attn_deterministic import deterministic_mode, explain, flash_attn_func
from flash_attn_deterministic.tree import CHUNK_ROWS, add_up
from flash_attn_deterministic.verify.contract.call import Call, Tensors
from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.gpu.attention import (
    DTYPES,
    assert_same,
    attend,
    each_config,
    make_qkv,
    named,
    pairwise,
    skip_unless_built,
)
from tests.gpu.drawn_calls import draw_call
from tests.gpu.gradients import assert_same_results, int32, results
from tests.gpu.gradients import draw_call as draw_gradient_call

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

# Those of Hopper's forward: the plan's choice, and each of its paths.
SCHEDULES = ("family=sm90", "family=sm90,path=one_cta", "family=sm90,path=parts")
CONFIGS = each_config(
    (
        *((8, "bf16"), (32, "bf16"), (40, "fp16"), (64, "bf16"), (96, "bf16"), (112, "bf16")),
        *((128, "fp16"), (160, "fp16"), (192, "bf16"), (256, "fp16")),
    )
)
# Head dims of each kernel, those padded to it included.
RANGES = {32: range(1, 33), 64: range(33, 65), 96: range(65, 97), 128: range(97, 129)}
RANGES |= {192: range(129, 193), 256: range(193, 257)}


def assert_schedules_agree(
    run: Callable[[], tuple[torch.Tensor, ...]],
    schedules: tuple[str, ...] = SCHEDULES,
    words: str = "",
) -> None:
    """Compares each schedule of a forward with the sm80 family."""
    with device_override("family=sm80"):
        expected = run()
    for schedule in schedules:
        with device_override(schedule):
            found = run()
        names = ("out", "softmax_lse")
        assert_same(found, expected, tuple(f"{name}, {schedule} {words}" for name in names))


@pytest.mark.parametrize(
    "calls", [pytest.param(100, id="100-calls"), pytest.param(1000, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", RANGES)
def test_drawn_calls(head_dim: int, dtype: str, calls: int) -> None:
    """Lengths at the edges of splits and tiles, empty sequences, NaN behind caches and pages."""
    skip_unless_built(head_dim, dtype)
    first = 1_000_000 * head_dim + 100_000 * (dtype == "fp16")
    taken = 0
    for seed in range(first, first + calls):
        call = draw_call(seed, RANGES[head_dim], DTYPES[dtype])
        with device_override("family=sm80"):
            assert call.plan.family == "sm80"
        with device_override("family=sm90"):
            taken += call.plan.family == "sm90"
        assert_schedules_agree(call, words=call.words)
    # Views whose strides the copy engine does not take, for instance, are left to the sm80 family.
    assert taken >= 0.7 * calls


@CONFIGS
def test_negative_zeros(head_dim: int, dtype: str) -> None:
    """The first product of a chain adds to nothing in one family, and to 0 in the other."""
    skip_unless_built(head_dim, dtype)
    q, k, _ = make_qkv((2, 200, 8, head_dim), 700, 2, dtype=DTYPES[dtype])
    with deterministic_mode(split_size=256):
        assert_schedules_agree(lambda: attend(q, k, -torch.zeros_like(k), causal=True))


@CONFIGS
def test_however_many_take_parts(head_dim: int, dtype: str) -> None:
    """One CTA takes all parts, or each its own."""
    skip_unless_built(head_dim, dtype)
    q, k, v = make_qkv((2, 200, 8, head_dim), 1100, 2, dtype=DTYPES[dtype])
    counts = tuple(f"family=sm90,path=parts,sms={sms}" for sms in (1, 7, 132, 10_000))
    with deterministic_mode(split_size=256):
        with device_override(counts[0]):
            plan = explain(flash_attn_func, q, k, v, causal=True)
        assert (plan.family, plan.path) == ("sm90", "parts")
        assert_schedules_agree(lambda: attend(q, k, v, causal=True), counts)


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k", "nheads", "head_dim", "family", "path"),
    [
        (1, 512, 32_768, 32, 64, "sm90", "parts"),
        (1, 512, 32_768, 32, 128, "sm90", "one-cta"),
        (1, 128, 32_768, 32, 128, "sm90", "parts"),
        (1, 4096, 4096, 32, 128, "sm90", "one-cta"),
        (4, 5, 4096, 32, 128, "sm90", "parts"),
        (4, 1, 4096, 32, 256, "sm90", "parts"),
        (8, 16, 777, 32, 128, "sm90", "one-cta"),
        (8, 8, 777, 56, 128, "sm90", "one-cta"),
        (1, 1, 4096, 32, 128, "sm80", "scores-first"),
        (1, 16, 4096, 32, 128, "sm90", "parts"),
    ],
    ids=[
        "idle-sms",
        "few-idle-sms",
        "short-chunk",
        "prefill",
        "5-queries",
        "head-dim-256",
        "one-split-of-64-rows",
        "one-split-of-56-rows",
        "one-query",
        "16-queries-of-one",
    ],
)
def test_parts_are_left_where_they_pay(
    batch: int, seqlen_q: int, seqlen_k: int, nheads: int, head_dim: int, family: str, path: str
) -> None:
    """SMs would idle, or few queries have many rows; `bench --study paths` times the choice."""
    skip_unless_built(head_dim, "bf16")
    one = torch.empty(1, 1, 1, head_dim, device="cuda", dtype=torch.bfloat16)
    q = one.expand(batch, seqlen_q, nheads, head_dim)
    k = one.expand(batch, seqlen_k, 8, head_dim)
    with device_override("sms=132"):
        plan = explain(flash_attn_func, q, k, k, causal=True)
    assert (plan.family, plan.path) == (family, path)


BACKWARD = named([(d, t) for d in (8, 32, 40, 64, 72, 96, 128, 136, 192, 200, 256) for t in DTYPES])
BACKWARD_FEATURES = ["full", "causal", "window", "window-left", "window-right", "window-0"]


@pytest.mark.parametrize(("sms", "seqlen", "window", "family", "share", "least"), [
    pytest.param(132, 4096, (-1, -1), "sm90", 6, 2, id="full"),
    pytest.param(132, 4096, (-1, 0), "sm90", 3, 4, id="causal"),
    pytest.param(132, 4096, (256, 0), "sm90", 3, 4, id="window"),
    pytest.param(132, 512, (-1, 0), "sm90", 3, 4, id="short"),
    pytest.param(132, 64, (-1, 0), "sm90", 3, 4, id="as-many-as-SMs"),
    pytest.param(132, 32_768, (-1, -1), "sm90", 6, 2, id="long"),
    pytest.param(1, 4096, (-1, -1), "sm90", 6, 2, id="one-sm"),
    pytest.param(132, 4096, (-1, 0), "sm80", 3, 4, id="sm80-causal"),
])  # fmt: skip
def test_sums_of_heads_side_by_side_fit_into_a_share_of_l2(
    sms: int, seqlen: int, window: tuple[int, int], family: str, share: int, least: int
) -> None:
    skip_unless_built(128, "bf16", "bwd")
    q, k, v = make_qkv((1, seqlen, 6, 128))
    with device_override(f"family={family},sms={sms}"):
        plan = explain(flash_attn_func, q, k, v, window_size=window, deterministic=True)
    assert plan.backward is not None
    sums = 4 * -(-seqlen // 128) * 128 * 128
    fit = torch.cuda.get_device_properties(0).L2_cache_size // share // sums
    expected = min(max(fit, least), sms)
    assert (plan.backward.in_turns, plan.backward.heads_in_flight) == (True, expected)


def test_heads_side_by_side_may_be_set() -> None:
    skip_unless_built(128, "bf16", "bwd")
    q, k, v = make_qkv((1, 512, 6, 128))
    with device_override("heads=7"):
        plan = explain(flash_attn_func, q, k, v, deterministic=True)
    assert plan.backward is not None
    assert plan.backward.heads_in_flight == 7


@pytest.mark.parametrize("feature", ["softcap", "alibi", "dropout", "dropout-softcap"])
def test_gradients_that_hopper_leaves_to_the_others(feature: str) -> None:
    call = draw_gradient_call(64, "bf16", feature)
    with device_override("family=sm80"):
        expected = results(call)
    with device_override("family=sm90"):
        assert_same_results(results(call), expected)


@pairwise(
    config=BACKWARD,
    nheads_k={"groups": 2, "no-groups": 4},
    causal={"full": False, "causal": True},
    family=("sm80", "sm90"),
)
def test_sums_of_runs_of_chunks_are_those_of_one_call(
    config: tuple[int, str], nheads_k: int, causal: bool, family: str
) -> None:
    seqlen = 5 * CHUNK_ROWS + 100
    call = draw_gradient_call(
        *config, "causal" if causal else "full", batch=1, nheads_k=nheads_k,
        seqlen_q=seqlen, seqlen_k=300 if not causal else seqlen,
    )  # fmt: skip
    with device_override(f"family={family}"):
        found = in_runs(call, {(2, 0): (0, 4), (1, 2): (4, 6)}, causal)
        assert_same_results(found, call.gradients())


def in_runs(call: Call, runs: dict[tuple[int, int], tuple[int, int]], causal: bool) -> Tensors:
    """dq, dk, dv of a call of one sequence, of the sums over runs [begin, end) of chunks."""
    out, lse, _ = flash_attn_func(call.q, call.k, call.v, return_attn_probs=True, **call.options)
    scale = call.q.shape[-1] ** -0.5
    dq = torch.empty_like(call.q)
    sums = {}
    for node, (begin, end) in runs.items():
        rows = slice(begin * CHUNK_ROWS, min(end * CHUNK_ROWS, call.q.shape[1]))
        keys = rows.stop if causal else call.k.shape[1]
        dq[0, rows], *own = torch.ops.flash_attn_deterministic.varlen_bwd_sums(
            call.dout[0, rows],
            call.q[0, rows],
            call.k[0, :keys],
            call.v[0, :keys],
            out[0, rows],
            lse[0, :, rows].contiguous(),
            int32([0, rows.stop - rows.start]),
            int32([0, keys]),
            None,
            None,
            rows.stop - rows.start,
            keys,
            0.0,
            scale,
            -1,
            0 if causal else -1,
            0.0,
            True,
        )
        unseen = (0, 0, 0, 0, 0, call.k.shape[1] - keys)
        sums[node] = [torch.nn.functional.pad(total, unseen) for total in own]
    chunks = -(-call.q.shape[1] // CHUNK_ROWS)
    total = add_up(sums, chunks, lambda a, b: [x + y for x, y in zip(a, b, strict=True)])
    assert total is not None
    dk, dv = torch.ops.flash_attn_deterministic.finish_key_sums(*total, call.k, scale, 0.0, 0.0)
    return {"dq": dq, "dk": dk[None], "dv": dv[None]}


@pairwise(
    config=BACKWARD,
    feature=BACKWARD_FEATURES,
    nheads_k={"groups": 1, "no-groups": 4},
    seqlens=(
        *((40, 1100), (700, 1100), (1100, 1100), (1100, 300)),
        *((CHUNK_ROWS + edge, 700) for edge in (-1, 0, 1)),
    ),
)
def test_gradients_are_those_of_every_family_and_path(
    config: tuple[int, str], feature: str, nheads_k: int, seqlens: tuple[int, int]
) -> None:
    seqlen_q, seqlen_k = seqlens
    call = draw_gradient_call(
        *config, feature, nheads_k=nheads_k, seqlen_q=seqlen_q, seqlen_k=seqlen_k
    )
    found = []
    for family, path in itertools.product(("sm80", "sm90"), (",path=one_cta", ",path=parts", "")):
        with device_override(f"family={family}" + path):
            plan = explain(flash_attn_func, call.q, call.k, call.v, **call.options)
            assert plan.backward is not None
            assert plan.backward.family == family
            found.append(call.gradients())
    for one in found[1:]:
        assert_same_results(one, found[0])


@pytest.mark.parametrize("power", [-110, -118, -124])
@pytest.mark.parametrize("head_dim", RANGES)
def test_sums_of_dq_keep_denormals(head_dim: int, power: int) -> None:
    """PTX's manual says that the copy engine, which adds Hopper's sums, flushes them."""
    call = draw_gradient_call(head_dim, "bf16", seqlen_q=700)
    call = replace(call, dout=(call.dout.float() * 2.0**power).to(call.dout.dtype))
    found = []
    for family in ("sm80", "sm90"):
        with device_override(f"family={family}"):
            found.append(call.gradients())
    assert found[0]["dq"].any()
    assert_same_results(*found)


def test_a_wrong_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_built(64, "bf16")
    monkeypatch.setenv("FLASH_ATTENTION_FAMILY", "sm75")
    q, k, v = make_qkv((1, 64, 1, 64))
    with pytest.raises(RuntimeError, match="FLASH_ATTENTION_FAMILY: expected the family sm80 or"):
        flash_attn_func(q, k, v)
