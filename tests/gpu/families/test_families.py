"""Hopper's kernels and those for every GPU give the same bits: one family forced against the other.

FLASH_ATTENTION_FAMILY is read in each call. Lists of forward calls are those of test_parts.py,
which runs them in both families and both schedules, and of `verify`; drawn ones are here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch
from flash_attn_deterministic import (
    explain,
    flash_attn_func,
)
from flash_attn_deterministic.tree import CHUNK_ROWS, add_up
from flash_attn_deterministic.verify.contract.device_override import device_override

from tests.gpu.attention import (
    DTYPES,
    assert_same,
    make_qkv,
    pairwise,
    skip_unless_built,
)
from tests.gpu.drawn_calls import draw_call
from tests.gpu.gradients import GradientCall, Gradients, assert_same_gradients, int32, run_packed
from tests.gpu.gradients import draw_call as draw_gradient_call

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

VARIABLE = "FLASH_ATTENTION_FAMILY"
PARTS = "FLASH_ATTENTION_TEST_DEVICE", "path=parts"  # calls of one split run as without


# Head dims of each kernel, those padded to it included.
RANGES = {32: range(1, 33), 64: range(33, 65), 96: range(65, 97), 128: range(97, 129)}
RANGES |= {192: range(129, 193), 256: range(193, 257)}


@pytest.mark.parametrize(
    "calls", [pytest.param(100, id="100-calls"), pytest.param(1000, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", RANGES)
def test_drawn_calls(
    head_dim: int, dtype: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_built(head_dim, dtype)
    first = 1_000_000 * head_dim + 100_000 * (dtype == "fp16")
    taken = 0
    for seed in range(first, first + calls):
        call = draw_call(seed, RANGES[head_dim], DTYPES[dtype])
        monkeypatch.setenv(VARIABLE, "sm90")
        taken += call.plan.family == "sm90"
        found = call()
        with monkeypatch.context() as context:
            context.setenv(*PARTS)
            parts = call()
        monkeypatch.setenv(VARIABLE, "sm80")
        assert call.plan.family == "sm80"
        expected = call()
        assert_same(found, expected, tuple(f"{name} of {call.words}" for name in ("out", "lse")))
        assert_same(parts, expected, tuple(f"{name} of {call.words}" for name in ("out", "lse")))
    # Views whose strides the copy engine does not take, for instance, are left to the sm80 family.
    assert taken >= 0.7 * calls


BACKWARD = {
    f"d{d}-{t}": (d, t)
    for d in (8, 32, 40, 64, 72, 96, 128, 136, 192, 200, 256)
    for t in ("bf16", "fp16")
}
BACKWARD_FEATURES = ["full", "causal", "window", "window-left", "window-right", "window-0"]


def assert_gradients_agree(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], list[Gradients]]
) -> None:
    results = {}
    for family in ("sm80", "sm90"):
        monkeypatch.setenv(VARIABLE, family)
        results[family] = run()
    for left, right in zip(results["sm90"], results["sm80"], strict=True):
        assert_same_gradients(left, right)


@pytest.mark.parametrize(
    ("sms", "seqlen", "window", "family", "share", "least"),
    [
        pytest.param(132, 4096, (-1, -1), "sm90", 6, 2, id="full"),
        pytest.param(132, 4096, (-1, 0), "sm90", 3, 4, id="causal"),
        pytest.param(132, 4096, (256, 0), "sm90", 3, 4, id="window"),
        pytest.param(132, 512, (-1, 0), "sm90", 3, 4, id="short"),
        pytest.param(132, 64, (-1, 0), "sm90", 3, 4, id="as-many-as-SMs"),
        pytest.param(132, 32_768, (-1, -1), "sm90", 6, 2, id="long"),
        pytest.param(1, 4096, (-1, -1), "sm90", 6, 2, id="one-sm"),
        pytest.param(132, 4096, (-1, 0), "sm80", 3, 4, id="sm80-causal"),
    ],
)
def test_sums_of_heads_side_by_side_fit_into_a_share_of_l2(
    sms: int,
    seqlen: int,
    window: tuple[int, int],
    family: str,
    share: int,
    least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skip_unless_built(128, "bf16", "bwd")
    q, k, v = make_qkv((1, seqlen, 6, 128))
    monkeypatch.setenv(VARIABLE, family)
    with device_override(f"sms={sms}"):
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


@pairwise(config=BACKWARD, feature=BACKWARD_FEATURES)
def test_gradients_of_packed_sequences(
    config: tuple[int, str], feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [(300, 300), (0, 17), (1, 900), (65, 0), (640, 129)]
    calls = [
        draw_gradient_call(*config, feature, batch=1, seqlen_q=q, seqlen_k=k, seed=seed)
        for seed, (q, k) in enumerate(lengths)
    ]
    assert_gradients_agree(monkeypatch, lambda: run_packed(calls, spare=7))


@pytest.mark.parametrize("feature", ["softcap", "alibi", "dropout"])
def test_gradients_that_hopper_leaves_to_the_others(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = draw_gradient_call(64, "bf16", feature)
    assert_gradients_agree(monkeypatch, lambda: [call()])


@pairwise(
    config=BACKWARD,
    nheads_k={"groups": 2, "no-groups": 4},
    causal={"full": False, "causal": True},
    family=("sm80", "sm90"),
)
def test_sums_of_runs_of_chunks_are_those_of_one_call(
    config: tuple[int, str],
    nheads_k: int,
    causal: bool,
    family: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, family)
    seqlen = 5 * CHUNK_ROWS + 100
    call = draw_gradient_call(
        *config, "causal" if causal else "full", batch=1, nheads_k=nheads_k,
        seqlen_q=seqlen, seqlen_k=300 if not causal else seqlen,
    )  # fmt: skip
    assert_same_gradients(in_runs(call, {(2, 0): (0, 4), (1, 2): (4, 6)}, causal), call())


def in_runs(
    call: GradientCall, runs: dict[tuple[int, int], tuple[int, int]], causal: bool
) -> Gradients:
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
    return dq, dk[None], dv[None]


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
    config: tuple[int, str],
    feature: str,
    nheads_k: int,
    seqlens: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seqlen_q, seqlen_k = seqlens
    call = draw_gradient_call(
        *config, feature, nheads_k=nheads_k, seqlen_q=seqlen_q, seqlen_k=seqlen_k
    )
    found = []
    for family, path in itertools.product(("sm80", "sm90"), ("one_cta", "parts", "")):
        monkeypatch.setenv(VARIABLE, family)
        plan = explain(flash_attn_func, call.q, call.k, call.v, **call.options)
        assert plan.backward is not None
        assert plan.backward.family == family
        with device_override(f"path={path}") if path else contextlib.nullcontext():
            found.append(call())
    for one in found[1:]:
        assert_same_gradients(one, found[0])


def test_a_wrong_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_built(64, "bf16")
    monkeypatch.setenv(VARIABLE, "sm75")
    q, k, v = make_qkv((1, 64, 1, 64))
    with pytest.raises(RuntimeError, match="FLASH_ATTENTION_FAMILY: expected the family sm80 or"):
        flash_attn_func(q, k, v)
