"""Checks of the gradients, and of dropout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from . import layouts
from .call import Attention, Call, Tensors, part
from .check import Case, case_of, cases_of, expect_different, expect_same, make
from .forward import repeat
from .sizes import Size

DROPOUT_P = 0.2
_REPEATS = 5


def backward_cases(size: Size) -> Iterator[Case]:
    for seqlen_q, seqlen_k in size.backward_lengths:
        yield from cases_of(size, size.features, seqlen_q=(seqlen_q,), seqlen_k=(seqlen_k,))
    if size.long_backward:
        # Many thread blocks then add to one row of dq.
        for (head_dim, dtype), feature in (
            (c, f) for c in size.configs for f in ("full", "causal")
        ):
            lengths = {"seqlen_q": size.long_backward, "seqlen_k": size.long_backward}
            yield case_of(head_dim, dtype, feature, lengths)


def backward(case: Case, attention: Attention, size: Size) -> None:
    """dq, dk and dv: run-to-run, batch, varlen, groups of heads; dsink: by sequence."""
    sequences = 3 if size.device == "cpu" else 8
    call = make(case, attention, size, batch=sequences)
    # Where few thread blocks add to a row of dq, a few repeats show what many would.
    many = size.long_backward and case["seqlen_q"] == size.long_backward
    times = size.repeats if many else min(size.repeats, _REPEATS)
    together = repeat(call, call.gradients, size.device, times)
    _each_alone(call, together, (0, sequences // 2, sequences - 1))
    _packed_gradients(call)
    if call.sinks is not None:
        _sink_gradients(call, size.device, times)
    if size.device == "cuda":
        # Other schedules suit a GPU that is full than one that is not.
        heads = torch.cuda.get_device_properties("cuda").multi_processor_count
        full = make(case, attention, size, batch=heads, nheads=1, nheads_k=1)
        _each_alone(full, full.gradients(), (0, heads - 1))
    groups = make(case, attention, size, batch=1, nheads=6, nheads_k=3)
    whole = groups.gradients()
    for begin, end in ((0, 1), (2, 3), (1, 3)):
        alone = groups.kv_heads(begin, end)
        expected = part(whole, h=slice(2 * begin, 2 * end), g=slice(begin, end))
        what = f"gradients of KV heads [{begin}, {end}) alone against all 3 together"
        expect_same(alone, what, alone.gradients(), expected)


def _sink_gradients(call: Call, device: str, times: int) -> None:
    """dsink of a batch is the sum of those of its sequences, first to last."""
    together = repeat(call, call.sink_gradient, device, times)
    total = torch.zeros_like(call.options["learnable_sink"])
    for place in range(len(call.q)):
        total = total + call.sequences([place]).sink_gradient()["dsink"]
    what = f"dsink of {len(call.q)} sequences against the sum of those of each alone"
    expect_same(call, what, together, {"dsink": total})


def _each_alone(call: Call, together: Tensors, places: Iterable[int]) -> None:
    """Gradients of a batch against those of its sequences alone."""
    for place in places:
        one = call.sequences([place])
        what = f"gradients of sequence {place} of {len(call.q)} against the sequence alone"
        expect_same(one, what, part(together, b=[place]), one.gradients())


def _packed_gradients(call: Call) -> None:
    """Sequences of several lengths, packed, against each alone."""
    seqlen_q, seqlen_k = call.q.shape[1], call.k.shape[1]
    lengths_q = [seqlen_q, max(1, seqlen_q // 2), 1][: call.q.shape[0]]
    lengths_k = [seqlen_k, seqlen_k, max(1, seqlen_k // 3)][: call.q.shape[0]]
    for one, own in layouts.packed(call, lengths_q, lengths_k, gradients=True).parts:
        length_q, length_k = one.q.shape[1], one.k.shape[1]
        what = f"gradients of {length_q} queries and {length_k} keys, packed, against dense"
        expect_same(one, what, own, one.gradients())


# --- dropout ------------------------------------------------------------------------------------


def dropout_cases(size: Size) -> Iterable[Case]:
    return cases_of(size, size.features[:2], seqlen_q=size.seqlen_q)


def dropout(case: Case, attention: Attention, size: Size) -> None:
    """The same seed, the same bits; another seed, others."""
    call = make(case, attention, size, seqlen_k=min(size.seqlen, 600))
    call = call.with_options(dropout_p=DROPOUT_P)

    def seeded(seed: int) -> Tensors:
        torch.manual_seed(seed)
        results = call()
        torch.manual_seed(seed)
        return {**results, **call.gradients()}

    first = seeded(case.seed)
    expect_different(call, "another seed", seeded(case.seed + 1), first)
    expect_same(call, "the same seed again", seeded(case.seed), first)


def dropout_seeds(case: Case, attention: Attention, size: Size) -> None:
    """Where sequences have seeds of their own: out and gradients alone, in batches, packed."""
    seqlen_k = min(size.seqlen, 600)
    call = make(case, attention, size, batch=3, seqlen_k=seqlen_k)
    seeds = torch.arange(3, device=call.q.device) * 7919 - case.seed
    call = call.with_options(dropout_p=DROPOUT_P, dropout_seeds=seeds)

    def results(one: Call) -> Tensors:
        return without_probs({**one(), **one.gradients()})

    together = results(call)
    other = results(call.with_options(dropout_seeds=seeds + 1))
    expect_different(call, "other seeds", other, together)
    for index in ([0], [1], [2], [2, 0]):
        fewer = call.sequences(index)
        what = f"sequences {index} of 3, with their seeds, against the batch"
        expect_same(fewer, what, results(fewer), part(together, b=index))
    seqlen_q = call.q.shape[1]
    lengths = [seqlen_q, max(1, seqlen_q // 2), 1], [seqlen_k, seqlen_k, seqlen_k // 3]
    for one, own in layouts.packed(call, *lengths, gradients=True).parts:
        what = f"{one.q.shape[1]} queries and {one.k.shape[1]} keys, packed, against dense"
        expect_same(one, what, without_probs(own), results(one))


def without_probs(results: Tensors) -> Tensors:
    """Returns the others: these come from torch's product, whose bits depend on the batch."""
    return {name: tensor for name, tensor in results.items() if name != "probs"}
