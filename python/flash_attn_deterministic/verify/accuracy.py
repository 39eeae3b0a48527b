"""Errors against float64 of every feature and layout, forward and backward.

An error is compared with what roundings explain (`bounds`); that of a plain or causal call on a GPU
with torch's flash attention as well. A ratio is an error over the largest that passes.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..checks.tensors import LATENT
from ..mode import deterministic_mode
from . import bounds, standard
from .bounds import Error
from .contract import layouts
from .contract.call import Attention, Call, Tensors, draw, named_gradients
from .contract.sizes import Config
from .exact import Definition
from .features import FEATURES, options_of

CRITERION = (
    "each error against float64 is at most what roundings explain; in plain and causal calls on a "
    f"GPU at most {bounds.OVER_TORCHS} x torch's flash attention"
)
_FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "packed": {},
    "padded": {"room": 40, "leftpad": 21},
    "packed-pages": {"page_size": 48},
    "cache": {"room": 40},
    "cache-places": {"room": 70, "leftpad": 21, "reordered": True},
    "pages": {"page_size": 16},
    "pages-fp8": {"page_size": 32, "fp8": True},
    "latent": {"room": 40, "latent": True},
    "latent-pages": {"page_size": 64, "latent": True},
    "append": {"room": 40, "new": 5},
    "append-pages": {"page_size": 16, "new": 5, "rotary": True},
    "append-halves": {"room": 40, "new": 5, "rotary": False},
}
_OF_FORMS = ("full", "causal", "everything", "sink")
_ROTARY_DIM = 32


@dataclass(frozen=True)
class Case:
    """A call of the accuracy checks."""

    name: str
    seqlen_q: int
    seqlen_k: int
    feature: str = "full"  # a name in FEATURES
    form: str = "dense"  # a name in _FORMS
    batch: int = 2
    nheads: int = 4
    nheads_k: int = 2
    backward: bool = False  # whether gradients are compared too
    shrink: int = 1  # of windows
    narrow: bool = False  # whether v has two thirds of the columns of q and k
    dlse: bool = False  # whether softmax_lse has a gradient


def cases(device: str, latent: bool = False) -> Iterator[Case]:
    """Yields the cases of a head dim and dtype: lengths, features, layouts.

    `latent`: those of multi-head latent attention, which has one head dim.
    """
    cuda = device == "cuda"
    seqlen_q, seqlen_k, shrink = (333, 1000, 1) if cuda else (70, 130, 6)

    def case(name: str, feature: str, form: str = "dense", batch: int = 3, **rest: bool) -> Case:
        return Case(name, seqlen_q, seqlen_k, feature, form, batch, shrink=shrink, **rest)

    if latent:
        for form, feature in itertools.product(("latent", "latent-pages"), _OF_FORMS):
            one = case(f"{form} {feature}", feature, form)
            yield replace(one, seqlen_q=seqlen_q // 60, nheads_k=1)
        return
    for feature in ("full", "causal"):
        for shape in _SHAPES[device]:
            yield replace(shape, name=f"{shape.name} {feature}", feature=feature)
    for feature in FEATURES:
        yield case(feature, feature, batch=2, backward=True)
    others = [form for form in _FORMS if form != "dense" and not form.startswith("latent")]
    for form, feature in itertools.product(others, _OF_FORMS):
        yield case(f"{form} {feature}", feature, form, backward=form == "packed")
    for form in ("dense", "packed", "append-pages"):
        yield case(f"{form} narrow-v", "causal", form, backward="append" not in form, narrow=True)
    for form, feature in itertools.product(("dense", "packed"), ("causal", "everything")):
        yield case(f"{form} lse-gradient {feature}", feature, form, backward=True, dlse=True)
    # A window turns rotary positions on, whatever its width.
    yield case("append-pages window", "window-left-0", "append-pages")
    for feature in ("dropout", "dropout-seeds"):
        yield case(f"packed {feature}", feature, "packed", backward=True)


_SHAPES = {
    "cuda": (
        Case("one-key", 1, 1, nheads_k=4),
        Case("below-tile", 127, 63, nheads_k=4),
        Case("above-tile-mqa", 129, 65, nheads_k=1),
        Case("1000-gqa", 1000, 1000, nheads=8, backward=True),
        Case("4096-gqa", 4096, 4096, batch=1, nheads=8),
        Case("1000-of-4096-mqa", 1000, 4096, batch=1, nheads_k=1),
        Case("decode-4096-gqa", 1, 4096, nheads=8),
        Case("fewer-keys", 1000, 65, nheads=8),
        Case("130-mha", 130, 130, nheads_k=4, backward=True),
        Case("2048", 2048, 2048, batch=1, nheads_k=4, backward=True),
    ),
    "cpu": (
        Case("one-key", 1, 1, nheads_k=4),
        Case("above-tile-mqa", 129, 65, nheads_k=1),
        Case("130-gqa", 130, 130, backward=True),
        Case("decode-300", 1, 300),
    ),
}


def measure(
    config: Config, device: str, attention: Attention, among: Iterable[Case] | None = None
) -> dict[str, Any]:
    """Measures cases of a head dim and dtype on "cpu" or "cuda"; without `among`, all of the
    device.

    Returns `rows`, each with the errors of ours and, of plain calls on a GPU, torch's, the ratio
    and whether it passed; `criterion` in words.
    """
    rows = []
    latent = config[0] == LATENT[0]
    for case in cases(device, latent) if among is None else among:
        call, seed = _draw(case, config, device, attention)
        for direction, tensor, error, other in _errors(case, call, seed):
            rows.append(
                {
                    "name": f"{direction} {tensor} {case.name}",
                    "direction": direction,
                    "tensor": tensor,
                    "feature": case.feature,
                    "form": case.form,
                    "shape": {n: getattr(case, n) for n in _DIMENSIONS},
                    "head_dim": config[0],
                    "dtype": config[1],
                    "ours": {"largest": error.largest, "rmse": error.rmse},
                    "standard": None if other is None else asdict(other),
                    "ratio": error.ratio,
                    "passed": error.ratio <= 1.0,
                }
            )
    return {"rows": rows, "standard": standard.FLASH, "criterion": CRITERION}


_DIMENSIONS = ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k")
Found = Iterator[tuple[str, str, Error, "Error | None"]]


def _draw(case: Case, config: Config, device: str, attention: Attention) -> tuple[Call, int]:
    head_dim, dtype = config
    seed = zlib.crc32(f"{case.name} {head_dim} {dtype}".encode()) >> 1
    options = options_of(case.feature, case.shrink)
    shape = (case.batch, case.seqlen_q, case.nheads, head_dim)
    drawn = draw(
        attention, shape, case.seqlen_k, case.nheads_k,
        dtype=dtype, device=device, seed=seed, options=options,
    )  # fmt: skip
    if case.narrow:
        columns = head_dim * 2 // 3
        drawn = replace(drawn, v=drawn.v[..., :columns], dout=drawn.dout[..., :columns])
    if case.dlse:
        # Of the size of the products of dout and v, which it is added to.
        generator = torch.Generator(device).manual_seed(seed + 1)
        dlse = torch.randn(drawn.q.shape[:3], generator=generator, device=device)
        drawn = replace(drawn, dlse=head_dim**0.5 * dlse)
    return drawn, seed


def _errors(case: Case, call: Call, seed: int) -> Found:
    """Yields direction, tensor, its error in the worst sequence, and torch's if comparable."""
    if "residual" in FEATURES[case.feature]:
        yield "backward", "dq", _residual(call), None
        return
    if call.sinks is not None and case.backward and case.form == "dense" and not call.dropout:
        yield "backward", "dsink", _sink(call), None
    if case.form == "dense" and case.name == case.feature:
        yield "forward", "max_logits", _max_logits(call), None
    torchs: Tensors = {}
    plain = case.form == "dense" and case.feature in ("full", "causal")
    if call.q.is_cuda and plain and not (case.narrow or case.dlse):
        torchs = _torchs(call, case.backward)
    for direction in ("forward", "backward") if case.backward else ("forward",):
        worst: dict[str, tuple[Error, Error | None]] = {}
        torch.manual_seed(seed)
        for one, own in _parts(case, call, direction == "backward"):
            found, exact = bounds.compare(one, own)
            for name, error in found.items():
                beside: tuple[Error, Error | None] = (error, None)
                if name in torchs:
                    beside = _beside(error, torchs[name], exact[name])
                if name not in worst or error.ratio > worst[name][0].ratio:
                    worst[name] = beside
        for name, (error, other) in worst.items():
            yield direction, name, error, other


def _parts(case: Case, call: Call, gradients: bool) -> layouts.Parts:
    """Runs a case in its layout."""
    options = dict(_FORMS[case.form])
    if case.form == "dense":
        return [(call, call.gradients() if gradients else call())]
    ragged = [case.seqlen_k, case.seqlen_k // 2 + 1, max(0, case.seqlen_k - 9)]
    if "room" in options:
        options["room"] += case.seqlen_k
    if case.form.startswith(("packed", "padded")):
        lengths_q = [case.seqlen_q, case.seqlen_q // 3, case.seqlen_q - 1]
        return layouts.packed(call, lengths_q, ragged, gradients=gradients, **options).parts
    if "new" in options:
        call = call.queries(0, options["new"])
    if "rotary" in options:
        options["rotary"] = _rotary(call, case.seqlen_k, options["rotary"])
    return layouts.cached(call, ragged, **options)


def _rotary(call: Call, seqlen: int, interleaved: bool) -> layouts.Rotary:
    half, device = _ROTARY_DIM // 2, call.q.device
    angles = torch.arange(seqlen + 70, device=device)[:, None] * (
        10_000.0 ** (-torch.arange(half, device=device) / half)
    )
    return layouts.Rotary(angles.cos().to(call.q), angles.sin().to(call.q), interleaved)


def _residual(call: Call) -> Error:
    """Compares dq's errors with a residual and without, where values are alike."""
    call = replace(call, v=call.v.float().sigmoid().to(call.v), options={})
    exact = Definition().gradients(call.q, call.k, call.v, call.dout)[0]
    with deterministic_mode(keep_residual=True):
        kept = call.gradients()["dq"].double() - exact
    without = call.gradients()["dq"].double() - exact
    return bounds.error(kept.norm(), bounds.OVER_NO_RESIDUAL * without.norm())


def _sink(call: Call) -> Error:
    """Compares dsink with minus the sum of probability times dout times out."""
    exact = Definition(**call.keywords).forward(call.q, call.k, call.v)
    sinks = call.options["learnable_sink"].double()
    probability = torch.exp(sinks[:, None] - exact.softmax_lse).transpose(1, 2)
    products = call.dout.double() * exact.out
    gap = call.sink_gradient()["dsink"].double()
    gap = gap + (probability * products.sum(-1)).sum((0, 1))
    # Weights and out are rounded once each, up or down; in fp32 other roundings are small beside.
    unit = torch.finfo(call.q.dtype).eps + call.options.get("softcap", 0.0) * 2 * bounds.TANH
    spread = (probability[..., None] * products).square().sum((0, 1, 3)).sqrt()
    return bounds.error(gap, bounds.SIGMAS * unit * spread + 1e-5)


def _max_logits(call: Call) -> Error:
    """Compares the largest score of each head."""
    with torch.no_grad():
        _, found = call.attention.dense(
            call.q, call.k, call.v, return_max_logits=True, **call.keywords
        )
    truth = Definition(**call.keywords)
    gap = found.double() - truth.max_logits(call.q, call.k)
    return bounds.error(gap, torch.full_like(gap, bounds.LSE + truth.softcap * bounds.TANH))


def _torchs(call: Call, backward: bool) -> Tensors:
    """Returns out, and dq, dk and dv, of torch's flash attention."""
    leaves = [t.detach().requires_grad_(backward) for t in (call.q, call.k, call.v)]
    with torch.set_grad_enabled(backward):
        q, k, v = leaves
        out = standard.forward(q, k, v, call.options.get("causal", False))
        found = named_gradients(out, leaves, call.dout) if backward else {}
    return {**found, "out": out.detach()}


def _beside(error: Error, other: torch.Tensor, exact: torch.Tensor) -> tuple[Error, Error]:
    """Returns an error whose ratio is also that to torch's, and torch's."""
    theirs = bounds.error(other.double() - exact, torch.ones_like(exact))
    # Smaller errors are chance, not the algorithm.
    floor = torch.finfo(other.dtype).eps / 64
    ratio = max(error.largest, floor) / (bounds.OVER_TORCHS * max(theirs.largest, floor))
    # Beside a standard that is infinitely wrong, any finite error would pass.
    ratio = ratio if math.isfinite(theirs.largest) else math.inf
    return replace(error, ratio=max(error.ratio, ratio)), theirs
