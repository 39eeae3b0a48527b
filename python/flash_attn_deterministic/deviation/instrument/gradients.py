"""How far each attention's gradients are from those with exact attention, on one's own model.

The gradient of a batch with an attention is g_a, with exact (float64) attention g_x; e = g_a - g_x.
For each parameter tensor:

- error: |e| / |g_x|, root mean squares over batches;
- noise: |e| over the spread of g_x between batches, which every step is unsure of anyway;
- systematic: the share of |e|^2 that batches have in common, |E e|^2 / E |e|^2, estimated without
  bias from products of different batches. What they have in common adds up over steps.

Intervals are bootstraps over batches. At most SAMPLE entries of each tensor are kept, drawn once
from a seed: memory is attentions x batches x tensors x SAMPLE x 4 bytes beside the model's own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ...errors import ArgumentError
from ..attentions.registry import Attention, find_attention
from ..attentions.substitute import replaced_attention, running_modules
from ..numbers.intervals import Interval, interval_of
from ..study.environment import SCHEMA, environment, repeatable, stopwatch
from ..study.files import read_json, whole_file, write_json
from ..study.progress import Progress
from .target import Target

RESULT_FILE = "gradients.json"
SAMPLE = 16384
_SDPA = functional.scaled_dot_product_attention


@dataclass(frozen=True)
class GradientPlan:
    """What is compared.

    Args:
        model: name of the model, for the record.
        attentions: names, see `find_attention`.
        precision: "bf16", "fp16": autocast; "fp32": none.
        device: cpu or cuda.
        checkpoint: for the record.
    """

    model: str
    attentions: tuple[str, ...]
    precision: str = "bf16"
    device: str = "cpu"
    checkpoint: str = ""


def memory_bound(target: Target, attentions: int) -> int:
    """Returns how many bytes the kept samples take at most."""
    sizes = [min(SAMPLE, p.numel()) for p in target.model.parameters() if p.requires_grad]
    return 4 * (attentions + 1) * len(target.batches) * sum(sizes)


def run_gradients(
    plan: GradientPlan,
    target: Target,
    folder: Path,
    force: bool = False,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Runs or resumes the comparison; each batch is kept as it is done.

    Args:
        plan: what to compare.
        target: the model with its batches.
        folder: of the result and of what is kept.
        force: whether another comparison in the folder is replaced.
        seconds: no batch but the first two is started that would end later; the same call again
            goes on. None: all batches.

    Returns:
        gradients.json: {"layers": {parameter: {attention: {"error", "noise", "systematic"}}},
        "whole": {attention: ...}, "forward": {layer: {attention: relative error of the output}},
        "missing": {attention: reason}, "done": how many batches, ...}; numbers are [low, middle,
        high].

    Raises:
        ArgumentError: no attention works, the model calls none, or the folder holds another study.
    """
    start, slowest = time.monotonic(), 0.0
    found = {name: find_attention(name) for name in plan.attentions}
    identity = {**asdict(plan), "attentions": list(plan.attentions)}
    identity["batches"] = len(target.batches)
    store = folder / "batches"
    samples: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    with (
        stopwatch() as taken,
        repeatable(plan.device),
        Progress("gradients", len(target.batches)) as progress,
    ):
        for number, batch in enumerate(target.batches):
            path = store / f"{number:04}.pt"
            kept = _kept(path, identity, force)
            if kept is None:
                before = time.monotonic()
                late = seconds is not None and before - start + slowest > seconds
                if late and number >= 2:
                    break
                kept = _one_batch(plan, target, batch, found, missing)
                slowest = max(slowest, time.monotonic() - before)
                with whole_file(path) as temporary:
                    torch.save({"identity": identity, **kept}, temporary)
            missing.update(kept["missing"])
            samples.append(kept)
            progress.advance(f"batch {number}")
    names = [name for name in plan.attentions if name not in missing]
    if not names:
        raise ArgumentError(f"attention: expected one that works on this model: {missing}")
    value = {
        "kind": "gradients",
        "schema": SCHEMA,
        "configuration": identity,
        "environment": environment(plan.device),
        "seconds": taken[0],
        "memory_bytes": memory_bound(target, len(names)),
        "parameters": sum(p.numel() for p in target.model.parameters()),
        "missing": missing,
        "done": len(samples),
        **_statistics(samples, names),
    }
    write_json(folder / RESULT_FILE, value, digits=4)
    return value


def _kept(path: Path, identity: dict[str, Any], force: bool) -> dict[str, Any] | None:
    if not path.exists() or force:
        return None
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    if saved.get("identity") != identity:
        raise ArgumentError(
            f"out: {path.parent} holds batches of another comparison; give another folder, or "
            "--force to replace them"
        )
    return saved


def _one_batch(
    plan: GradientPlan,
    target: Target,
    batch: Any,
    attentions: dict[str, Attention],
    missing: dict[str, str],
) -> dict[str, Any]:
    outputs: dict[str, dict[str, float]] = {}
    exact = find_attention("exact")
    calls = 0

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Exact attention, beside which every other is computed on the same tensors."""
        nonlocal calls
        out = exact(*args, **kwargs)
        layer = f"{calls:02} {layers[-1] if layers else ''}".strip()
        calls += 1
        with torch.no_grad():
            size = out.double().norm()
            for name, attention in attentions.items():
                if name not in missing:
                    try:
                        other = attention(*args, **kwargs)
                    except Exception as error:  # a kernel that does not take this call
                        missing[name] = (str(error).splitlines() or [type(error).__name__])[0]
                        continue
                    error_size = (other.double() - out.double()).norm() / size
                    outputs.setdefault(layer, {})[name] = float(error_size)
        return out

    with running_modules(target.model) as layers:
        gradients = {"exact": _gradient(plan, target, batch, watched)}
    if not calls:
        raise ArgumentError(
            "model: expected calls of scaled_dot_product_attention, got none; compiled models and "
            "attention written out as matmul and softmax can't be replaced"
        )
    for name, attention in attentions.items():
        if name not in missing:
            try:
                gradients[name] = _gradient(plan, target, batch, attention)
            except RuntimeError as error:
                missing[name] = (str(error).splitlines() or [type(error).__name__])[0]
    return {"gradients": gradients, "outputs": outputs, "missing": dict(missing)}


def _gradient(
    plan: GradientPlan, target: Target, batch: Any, attention: Any
) -> dict[str, torch.Tensor]:
    """Returns the kept entries of each parameter's gradient."""
    dtype = torch.float16 if plan.precision == "fp16" else torch.bfloat16
    autocast = torch.autocast(plan.device, dtype=dtype, enabled=plan.precision != "fp32")
    target.model.zero_grad(set_to_none=True)
    # Gradients of float16 underflow without a factor; it is taken out again.
    factor = 65536.0 if plan.precision == "fp16" else 1.0
    with autocast, replaced_attention(_cast(attention, dtype, plan.precision)):
        loss = target.loss(batch)
    torch.autograd.backward([loss * factor])
    return {
        name: _sampled(parameter.grad, name) / factor
        for name, parameter in target.model.named_parameters()
        if parameter.grad is not None
    }


def _cast(attention: Any, dtype: torch.dtype, precision: str) -> Any:
    """Autocast turns q, k and v of torch's own function to 16 bits; so for its replacement."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if precision != "fp32":
            q, k, v = (t.to(dtype) if t.is_floating_point() else t for t in (q, k, v))
        return attention(q, k, v, *args, **kwargs)

    return attend


def _sampled(gradient: torch.Tensor, name: str) -> torch.Tensor:
    flat = gradient.detach().flatten()
    if flat.numel() > SAMPLE:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        flat = flat[torch.randint(flat.numel(), (SAMPLE,), generator=generator).to(flat.device)]
    return flat.float().cpu()


def _statistics(samples: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    layers: dict[str, dict[str, Any]] = {}
    grams: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    exact_grams = []
    for parameter in samples[0]["gradients"]["exact"]:
        exact = torch.stack([s["gradients"]["exact"][parameter] for s in samples]).double()
        exact_grams.append(exact @ exact.T)
        layers[parameter] = {}
        for name in names:
            error = torch.stack([s["gradients"][name][parameter] for s in samples]).double() - exact
            grams[name].append(error @ error.T)
            layers[parameter][name] = _of_grams(grams[name][-1], exact_grams[-1])
    # Over the whole model each tensor counts by the size of its sample's gradient.
    whole_exact = torch.stack(exact_grams).sum(0)
    whole = {name: _of_grams(torch.stack(grams[name]).sum(0), whole_exact) for name in names}
    forward = {
        layer: {
            name: _listed(_mean_of([s["outputs"][layer][name] for s in samples]))
            for name in names
            if all(name in s["outputs"].get(layer, {}) for s in samples)
        }
        for layer in samples[0]["outputs"]
    }
    return {"layers": layers, "whole": whole, "forward": forward}


def _mean_of(values: list[float]) -> Interval:
    data = torch.tensor(values, dtype=torch.float64)
    return interval_of(len(values), lambda index: data[index].mean(-1))


def _of_grams(error: torch.Tensor, exact: torch.Tensor) -> dict[str, list[float]]:
    """Statistics from the products of all pairs of batches, (batches, batches)."""
    count = len(error)

    def squares(index: torch.Tensor) -> torch.Tensor:
        return error.diagonal()[index].sum(-1)

    def systematic(index: torch.Tensor) -> torch.Tensor:
        # Pairs of different batches only: a batch drawn twice is no second one.
        rows, columns = index[:, :, None], index[:, None, :]
        apart = rows != columns
        products = (error[rows, columns] * apart).sum((1, 2)) / apart.sum((1, 2))
        return products / (squares(index) / count).clamp(min=1e-300)

    def spread(index: torch.Tensor) -> torch.Tensor:
        rows, columns = index[:, :, None], index[:, None, :]
        mean = exact[rows, columns].sum((1, 2)) / count**2
        found = exact.diagonal()[index].sum(-1) / count - mean
        # One batch drawn every time has no spread.
        single = (index == index[:, :1]).all(-1)
        return torch.where(single, torch.nan, found * count / (count - 1))

    def relative(index: torch.Tensor) -> torch.Tensor:
        return (squares(index) / exact.diagonal()[index].sum(-1).clamp(min=1e-300)).sqrt()

    def noise(index: torch.Tensor) -> torch.Tensor:
        return (squares(index) / count / spread(index)).sqrt()

    return {
        "error": _listed(interval_of(count, relative)),
        "noise": _listed(interval_of(count, noise)),
        "systematic": _listed(interval_of(count, systematic)),
    }


def _listed(interval: Interval) -> list[float]:
    return [interval.low, interval.middle, interval.high]


def read_gradients(path: Path) -> dict[str, Any]:
    """Reads gradients.json.

    Raises:
        ArgumentError: the file is no result of this study.
    """
    value = read_json(path)
    if not isinstance(value, dict) or value.get("kind") != "gradients":
        raise ArgumentError(f"{path}: expected the result of deviation gradients")
    return value
