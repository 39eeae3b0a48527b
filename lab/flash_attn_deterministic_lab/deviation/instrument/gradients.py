"""How far each attention's gradients are from those with exact attention, on one's own model.

The gradient of a batch with an attention is g_a, with exact (float64) attention g_x; e = g_a - g_x.
For each parameter tensor:

- error: |e| / |g_x|, root mean squares over batches;
- noise: |e| over the spread of g_x between batches, which every step is unsure of anyway;
- systematic: the share of |e|^2 that batches have in common, |E e|^2 / E |e|^2, estimated without
  bias from products of different batches. What they have in common adds up over steps.

Intervals are bootstraps over batches. At most SAMPLE entries of each tensor are kept, drawn once
from a seed; for the whole model each of them counts for those of its tensor that were not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.module_tracker import ModuleTracker

from ...attentions.named import first_line_or_kind
from ...errors import ArgumentError
from ..attentions.registry import Attention, find_attention
from ..attentions.substitute import replaced_attention
from ..numbers.intervals import bounds, expanded_tail, mean_interval, resamples
from ..study.environment import autocast, one_thread, repeatable
from ..study.files import new_result, write_result
from .target import ModelPlan, Target

SAMPLE = 16384
_SMALLEST = 1e-300  # for a gradient of 0


def run_gradients(
    plan: ModelPlan, target: Target, folder: Path, seconds: float | None = None
) -> dict[str, Any]:
    """Runs the comparison.

    Batches after the second are not started if they would end later than `seconds`; Ctrl-C ends the
    comparison with those that are done.

    Returns:
        gradients.json: {"layers": {parameter: {attention: {"error", "noise", "systematic"}}},
        "whole": {attention: ...}, "forward": {layer: {attention: relative error of the output}},
        "missing": {attention: reason}, "done": how many batches, ...}; numbers are [low, middle,
        high].

    Raises:
        ArgumentError: no attention works, the model calls none, has no weights to train, or its
            gradients are NaN.
    """
    start = time.monotonic()
    if not plan.attentions:
        raise ArgumentError("attention: expected at least one name, got none")
    found = {name: find_attention(name) for name in plan.attentions}
    weights = {n: p.numel() for n, p in target.model.named_parameters() if p.requires_grad}
    if not weights:
        raise ArgumentError("model: expected parameters that require a gradient, got none")
    samples: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    with repeatable(plan.device):
        for number, batch in target.batches_within(seconds, "gradients"):
            try:
                samples.append(_one_batch(plan, target, batch, found, missing))
            except KeyboardInterrupt:  # what was measured is written
                if number < 2:
                    raise
                break
    names = [name for name in plan.attentions if name not in missing]
    if not names:
        raise ArgumentError(f"attention: expected one that works on this model: {missing}")
    with one_thread():  # of small matrices
        found_errors = _statistics(samples, names, weights)
    configuration = {**asdict(plan), "batches": len(target.batches)}
    value = {
        **new_result("gradients", configuration, plan.device),
        "seconds": time.monotonic() - start,
        "parameters": sum(p.numel() for p in target.model.parameters()),
        "missing": missing,
        "done": len(samples),
        **found_errors,
    }
    write_result(folder, value)
    return value


def _one_batch(
    plan: ModelPlan,
    target: Target,
    batch: Any,
    attentions: dict[str, Attention],
    missing: dict[str, str],
) -> dict[str, Any]:
    outputs: dict[str, dict[str, float]] = {}
    exact, tracker = find_attention("exact"), ModuleTracker()

    @torch.no_grad()
    def compare(out: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        module = max(tracker.parents, key=len).partition(".")[2]  # of a model's parts that run
        layer = f"{len(outputs):02} {module}".strip()
        outputs[layer] = {}
        size = out.double().norm()
        for name, attention in attentions.items():
            if name not in missing:
                try:
                    error = attention(*args, **kwargs).double() - out.double()
                    outputs[layer][name] = float(error.norm() / size)
                except Exception as failure:  # a kernel that does not take this call
                    missing[name] = first_line_or_kind(failure)

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Exact attention, beside which every other is computed on the same tensors."""
        out = exact(*args, **kwargs)
        compare(out, *args, **kwargs)
        return out

    with tracker:
        gradients = {"exact": _gradient(plan, target, batch, watched)}
    broken = [name for name, found in gradients["exact"].items() if not found.isfinite().all()]
    if broken:
        raise ArgumentError(
            "model: expected finite gradients with exact attention, got NaN or infinite ones of "
            + ", ".join(broken[:4])
        )
    for name, attention in attentions.items():
        if name not in missing:
            try:
                gradients[name] = _gradient(plan, target, batch, attention)
            except Exception as failure:
                missing[name] = first_line_or_kind(failure)
    return {"gradients": gradients, "outputs": outputs}


def _gradient(
    plan: ModelPlan, target: Target, batch: Any, attention: Any
) -> dict[str, torch.Tensor]:
    """Returns the kept entries of each parameter's gradient."""
    target.model.zero_grad(set_to_none=True)
    # Gradients of float16 underflow without a factor; it is taken out again.
    factor = 65536.0 if plan.precision == "fp16" else 1.0
    with autocast(plan.device, plan.precision), replaced_attention(attention):
        loss = target.loss(batch)
    torch.autograd.backward([loss * factor])
    kept = {}
    for name, parameter in target.model.named_parameters():
        if parameter.requires_grad:
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            flat = found.detach().flatten()
            if len(flat) > SAMPLE:
                generator = torch.Generator().manual_seed(sum(name.encode()))
                place = torch.randint(len(flat), (SAMPLE,), generator=generator)
                flat = flat[place.to(flat.device)]
            kept[name] = flat.float().cpu() / factor
    return kept


def _statistics(
    samples: Sequence[dict[str, Any]], names: Sequence[str], sizes: dict[str, int]
) -> dict[str, Any]:
    """Returns the errors of each parameter (`sizes`: its elements), of all, and of outputs."""
    layers: dict[str, dict[str, Any]] = {}
    whole, whole_exact = torch.zeros(()), torch.zeros(())
    for parameter in samples[0]["gradients"]["exact"]:
        exact = torch.stack([s["gradients"]["exact"][parameter] for s in samples]).double()
        errors = [
            torch.stack([s["gradients"][name][parameter] for s in samples]).double() - exact
            for name in names
        ]
        grams = torch.stack([error @ error.T for error in errors])
        if not exact.any():
            continue  # no batch has a gradient of it
        layers[parameter] = dict(zip(names, _of_grams(grams, exact @ exact.T), strict=True))
        each = sizes[parameter] / exact.shape[1]
        whole, whole_exact = whole + each * grams, whole_exact + each * (exact @ exact.T)
    if not layers:
        raise ArgumentError("model: expected gradients other than 0, got 0 for every parameter")
    forward = {
        layer: {
            name: mean_interval([s["outputs"][layer][name] for s in samples]).listed()
            for name in names
            if all(name in s["outputs"].get(layer, {}) for s in samples)
        }
        for layer in samples[0]["outputs"]
    }
    found = dict(zip(names, _of_grams(whole, whole_exact), strict=True))
    return {"layers": layers, "whole": found, "forward": forward}


def _of_grams(errors: torch.Tensor, exact: torch.Tensor) -> list[dict[str, list[float]]]:
    """Statistics from products of pairs of batches: errors (attentions, n, n), and exact (n, n).

    A resample is how often it draws each batch, which makes every sum a product of matrices.
    """
    count = len(exact)
    places = resamples(count)
    ones = torch.ones_like(places, dtype=torch.float64)
    drawn = torch.zeros(len(places), count, dtype=torch.float64).scatter_add(1, places, ones)
    # One batch drawn every time has no spread, and no pair.
    drawn[drawn.amax(1) == count] = torch.nan
    own, twice = errors.diagonal(dim1=-2, dim2=-1), drawn.square()
    squares, size = own @ drawn.T, drawn @ exact.diag()
    # Pairs of different batches only: a batch drawn twice is no second one.
    pairs = count**2 - twice.sum(1)
    spread = (count * size - (drawn @ exact * drawn).sum(1)) / pairs
    common = ((drawn @ errors * drawn).sum(-1) - own @ twice.T) / pairs
    mean = squares / count
    measures = {
        "error": (squares / size.clamp(min=_SMALLEST)).sqrt(),
        "noise": (mean / spread.clamp(min=0)).sqrt(),  # infinite where batches are alike
        "systematic": common / mean.clamp(min=_SMALLEST),
    }
    tail = expanded_tail(count)
    found = {name: bounds(values, tail).tolist() for name, values in measures.items()}
    return [{name: found[name][index] for name in found} for index in range(len(errors))]
