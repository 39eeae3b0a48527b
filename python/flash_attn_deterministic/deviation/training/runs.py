"""One training run: what it differs in, its loop, its checkpoints."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ...errors import ArgumentError
from ..cells import identity
from ..files import whole_file
from ..metrics import wasserstein
from .attention import Attention, find_attention
from .model import SIZES, Drawings

MEASURES = ("max_difference", "wasserstein", "l1")
PRECISIONS = ("bf16", "fp16", "fp32", "pure_bf16")


class Workload(Protocol):
    """What a training study trains."""

    def model(self, attention: Attention) -> torch.nn.Module:
        """Builds a model on the CPU whose layers call `attention`."""

    def loss(self, model: torch.nn.Module, generator: torch.Generator) -> torch.Tensor:
        """Returns the loss of the next batch; all chance comes from `generator`."""


@dataclass(frozen=True)
class Run:
    """What a run does. All runs are like `base` but in one thing.

    Args:
        name: of the run.
        attention: name of an implementation.
        precision: bf16, fp16: autocast with float32 weights; fp32: none; pure_bf16: bfloat16
            weights and optimizer states too.
        init_seed: of the initial weights.
        data_seed: of the batches and their order.
    """

    name: str
    attention: str = "baseline"
    precision: str = "bf16"
    init_seed: int = 0
    data_seed: int = 0


RUNS = {
    run.name: run
    for run in (
        Run("base"),
        Run("repeat"),
        Run("flash", attention="flash"),
        Run("sdpa", attention="sdpa"),
        Run("ours", attention="ours"),
        Run("init", init_seed=1),
        Run("fp32", precision="fp32"),
        Run("fp16", precision="fp16"),
        Run("pure_bf16", precision="pure_bf16"),
        Run("data", data_seed=1),
    )
}


@dataclass(frozen=True)
class Setup:
    """What all runs of a study have in common.

    Args:
        workload: "" for the drawings, or MODULE:FUNCTION of a callable that returns a Workload.
        size: name of a size of the drawings.
        steps: optimizer steps.
        every: steps between two measurements, beside those after 1, 2, 4, 8, 16 and 32.
        device: cpu or cuda.
        learning_rate: of AdamW, after a linear start of 20 steps.
    """

    workload: str
    size: str
    steps: int
    every: int
    device: str
    learning_rate: float = 1e-3

    def points(self) -> list[int]:
        """Returns the steps after which weights are compared."""
        early = [0, *(1 << n for n in range(6))]
        regular = range(0, self.steps, self.every)
        return sorted({self.steps, *regular, *(step for step in early if step < self.steps)})

    def make_workload(self) -> Workload:
        """Returns the workload.

        Raises:
            ArgumentError: MODULE:FUNCTION can't be imported, or returns something else.
        """
        if not self.workload:
            return Drawings(SIZES[self.size])
        module, _, function = self.workload.partition(":")
        try:
            workload = getattr(importlib.import_module(module), function)()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"workload: expected MODULE:FUNCTION of a callable, got {self.workload!r}: {error}"
            ) from error
        if not (hasattr(workload, "model") and hasattr(workload, "loss")):
            raise ArgumentError(
                f"workload: expected {self.workload} to return an object with model() and loss(), "
                f"got {type(workload).__name__}"
            )
        return workload  # type: ignore[no-any-return]


def matrices(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the weight matrices (parameters of two dimensions and more) in float32, copied."""
    return {
        name: parameter.detach().float().cpu().clone()
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2
    }


def measure(
    weights: dict[str, torch.Tensor], base: dict[str, torch.Tensor]
) -> dict[str, list[float]]:
    """Compares two runs' matrices.

    Returns:
        For each of MEASURES one number per matrix, in units of the weights: the largest
        elementwise difference; the 1-Wasserstein distance of the two sets of entries; the mean
        elementwise difference.
    """
    result: dict[str, list[float]] = {name: [] for name in MEASURES}
    for name, tensor in base.items():
        size = (weights[name] - tensor).abs()
        result["max_difference"].append(float(size.max()))
        result["wasserstein"].append(wasserstein(weights[name], tensor))
        result["l1"].append(float(size.double().mean()))
    return result


def train(
    setup: Setup, run: Run, folder: Path, key: str, tick: Callable[[], None]
) -> dict[str, Any]:
    """Trains one run, from its checkpoint where there is one.

    Args:
        setup: of the study.
        run: of the run.
        folder: of the study; the run writes to runs/<name>.
        key: hash of the study. A checkpoint of another one is refused.
        tick: called after each measurement.

    Returns:
        {"steps": [...], "loss": [...], "names": [...]} and, for runs other than base, one list per
        name of MEASURES with a list of matrices for each step.

    Raises:
        ArgumentError: the checkpoint belongs to another study or run.
    """
    store = folder / "runs" / run.name
    checkpoint = store / "checkpoint.pt"
    owner = {"study": key, "run": identity(run.__dict__)}
    torch.manual_seed(run.init_seed)
    workload = setup.make_workload()
    model = workload.model(find_attention(run.attention)).to(setup.device)
    if run.precision == "pure_bf16":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setup.learning_rate, weight_decay=0.01, foreach=False
    )
    history: dict[str, Any] = {"steps": [], "loss": [], "names": list(matrices(model))}
    if run.name != "base":
        history.update({name: [] for name in MEASURES})
    step, losses = 0, [float("nan")]
    if checkpoint.exists():
        saved = _load(checkpoint, owner)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, history = saved["step"], saved["history"]
        losses = []
    else:
        _observe(model, run, store, folder, history, 0, losses)
        tick()
        losses = []
    points = set(setup.points())
    while step < setup.steps:
        for group in optimizer.param_groups:
            group["lr"] = setup.learning_rate * min(1.0, (step + 1) / 20)
        # Of seed and step alone: a resumed run sees what the whole one would have. (Only 32 bits
        # of a seed count.)
        generator = torch.Generator().manual_seed(run.data_seed * 10**6 + step)
        with _autocast(setup.device, run.precision):
            loss = workload.loss(model, generator)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward([loss])
        optimizer.step()
        losses.append(float(loss.detach()))
        step += 1
        if step in points:
            _observe(model, run, store, folder, history, step, losses)
            with whole_file(checkpoint) as temporary:
                torch.save(
                    {
                        "owner": owner,
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                        "history": history,
                    },
                    temporary,
                )
            losses = []
            tick()
    return history


def _autocast(device: str, precision: str) -> torch.autocast:
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device, dtype=dtype, enabled=precision in ("bf16", "fp16"))


def _load(path: Path, owner: dict[str, str]) -> dict[str, Any]:
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load raises what its format's parsers raise
        raise ArgumentError(f"{path}: expected a checkpoint of this study, got {error}") from error
    if not isinstance(saved, dict) or saved.get("owner") != owner:
        raise ArgumentError(
            f"{path}: expected a checkpoint of this study, got one of another; give another "
            "folder, or --force to delete it"
        )
    return saved


def snapshot(folder: Path, step: int) -> Path:
    """Where the base run's matrices after a step are."""
    return folder / "runs" / "base" / f"weights-{step:06}.pt"


def _observe(
    model: torch.nn.Module,
    run: Run,
    store: Path,
    folder: Path,
    history: dict[str, Any],
    step: int,
    losses: list[float],
) -> None:
    history["steps"].append(step)
    history["loss"].append(sum(losses) / len(losses))
    weights = matrices(model)
    if run.name == "base":
        with whole_file(snapshot(folder, step)) as temporary:
            torch.save(weights, temporary)
        return
    base = torch.load(snapshot(folder, step), weights_only=True)
    for name, values in measure(weights, base).items():
        history[name].append(values)
