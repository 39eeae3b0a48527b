"""One training run: what it differs in, its loop, and how far it is from another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..attentions.registry import find_attention
from ..numbers.formats import parse_format
from ..numbers.metrics import distances
from ..study.environment import autocast
from .workload import Workload, find_workload

MEASURES = ("max_difference", "wasserstein", "l1", "l2", "function")
_WARM_UP = 20
_PROBE_SEED = 2**31


@dataclass(frozen=True)
class Run:
    """What a run does. Runs of one seed are alike but in one thing."""

    name: str
    attention: str = ""  # "": that of the study's base
    # bf16, fp16: autocast with float32 weights (fp16 with loss scaling); fp32: none; pure_bf16:
    # bfloat16 weights and optimizer states too.
    precision: str = "bf16"
    init: int = 0  # 1: other initial weights
    data: int = 0  # 1: other batches
    # From 1: which weight of the first matrix starts one bfloat16 gap higher; 0: none. A float32
    # gap would mostly be lost when autocast rounds the weight.
    nudge: int = 0
    against: str = "base"  # the run of the same seed that it is compared with; "": none


@dataclass(frozen=True)
class Setup:
    """What all runs of a study have in common."""

    workload: str  # see `find_workload`
    base: str  # attention of the base run
    steps: int  # of the optimizer
    device: str

    def points(self) -> list[int]:
        """Returns the steps after which weights are compared."""
        # On a GPU models are large: sorting all weights takes as long as some steps.
        few = self.device == "cuda"
        early = [0, 4] if few else [0, 1, 2, 4, 8, 16, 32]
        parts = 4 if few else 10
        regular = [round(self.steps * part / parts) for part in range(1, parts + 1)]
        return sorted({*regular, *(step for step in early if step < self.steps)})


class State(NamedTuple):
    """A model at a step: its weight matrices and its outputs of a batch, in float32."""

    weights: list[torch.Tensor]
    outputs: torch.Tensor


States = dict[int, State]  # by step, where the model was trained


def compare(mine: State, other: State) -> dict[str, float]:
    """Compares two models.

    Returns:
        `distances` of their weights; "function": the root mean square difference of outputs over
        the standard deviation of the other's.
    """
    spread = float(other.outputs.double().std())
    moved = (mine.outputs - other.outputs).double().square().mean().sqrt()
    return {**distances(mine.weights, other.weights), "function": float(moved) / spread}


def nudged(model: torch.nn.Module) -> torch.nn.Parameter:
    """Returns the first matrix that every batch reads: of an embedding it may never read a row."""
    modules = model.modules()
    tables = {id(module.weight) for module in modules if isinstance(module, torch.nn.Embedding)}
    return next(p for p in model.parameters() if p.ndim >= 2 and id(p) not in tables)


def train(
    setup: Setup, run: Run, seed: int, reference: States | None, keep: bool
) -> tuple[dict[str, Any], States, torch.nn.Module]:
    """Trains one run: all runs of a seed are the same but where they differ by design.

    Returns:
        {"steps": [...], "loss": [mean since the last point], "probe": loss of four held-out batches
        at the end} and, with a reference, one list per name of MEASURES; its states if they are
        kept; the model.
    """
    torch.manual_seed(1000 * seed + run.init)
    workload = find_workload(setup.workload)
    # On a GPU, a hundred million initial weights from a CPU take longer than many steps.
    with torch.device(setup.device):
        model = workload.model(find_attention(run.attention or setup.base))
    model = model.to(setup.device)
    if run.nudge:
        with torch.no_grad():
            weight = nudged(model).view(-1)
            weight[run.nudge - 1] += float(parse_format("bf16").ulp(weight[run.nudge - 1]))
    if run.precision == "pure_bf16":
        model = model.to(torch.bfloat16)
    optimizer = workload.optimizer(model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    scaler = torch.amp.GradScaler(setup.device, enabled=run.precision == "fp16")
    history: dict[str, Any] = {}
    states: States = {}
    losses: list[torch.Tensor] = []
    points = set(setup.points())
    for step in range(setup.steps + 1):
        if step in points:
            mean = float(torch.stack(losses).float().mean()) if losses else math.nan
            found: dict[str, float] = {"steps": step, "loss": mean}
            losses = []
            state = None
            if keep or reference is not None:
                weights = [p.detach().float().clone() for p in model.parameters() if p.ndim >= 2]
                with torch.no_grad(), autocast(setup.device, run.precision):
                    state = State(weights, workload.outputs(model, _probe(workload, 0)).float())
            if state is not None and keep:
                states[step] = state
            if state is not None and reference is not None:
                found |= compare(state, reference[step])
            for name, number in found.items():
                history.setdefault(name, []).append(number)
        if step == setup.steps:
            break
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1.0, (step + 1) / _WARM_UP)
        # Of seed and step alone. (Only 32 bits of a seed count.)
        generator = torch.Generator().manual_seed((2 * seed + run.data) * 10**6 + step)
        with autocast(setup.device, run.precision):
            loss = workload.loss(model, workload.batch(generator))
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    with torch.no_grad(), autocast(setup.device, run.precision):
        probes = [float(workload.loss(model, _probe(workload, number))) for number in range(4)]
    history["probe"] = sum(probes) / len(probes)
    return history, states, model


def _probe(workload: Workload, number: int) -> Any:
    """A batch that no training sees, the same for all runs and seeds."""
    draw = getattr(workload, "held_out", workload.batch)
    return draw(torch.Generator().manual_seed(_PROBE_SEED + number))
