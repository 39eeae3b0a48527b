"""What is trained or looked at: the interface, and the workloads by name."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ...errors import ArgumentError
from ..attentions.registry import Attention, made_by
from .language import LANGUAGE_SIZES, Language
from .sinks import Sinks
from .text_to_image import SIZES, Drawings


class Workload(Protocol):
    """A model with its data and optimizer.

    `held_out(generator)`, like `batch`, draws what no training sees; without it, what a training
    did not draw is held out.
    """

    def model(self, attention: Attention) -> torch.nn.Module:
        """Builds a model, on torch's default device and seed, whose layers call `attention`."""
        ...

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer; its learning rate is the peak, after a linear start."""
        ...

    def batch(self, generator: torch.Generator) -> Any:
        """Returns the next batch; all chance comes from `generator`."""
        ...

    def outputs(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Returns what the model says of a batch, any shape, to compare models as functions."""
        ...

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Returns the loss of a batch."""
        ...


_OURS: dict[str, Workload] = {
    **{f"drawings-{name}": Drawings(size) for name, size in SIZES.items()},
    **{f"language-{name}": Language(size) for name, size in LANGUAGE_SIZES.items()},
    "sinks-small": Sinks(),
}
_PARTS = ("model", "optimizer", "batch", "outputs", "loss")


def find_workload(name: str) -> Workload:
    """Returns a workload.

    Args:
        name: drawings-SIZE, language-SIZE, sinks-SIZE, or MODULE:FUNCTION of a callable without
            arguments that returns a Workload.

    Raises:
        ArgumentError: there is none of this name.
    """
    if name in _OURS:
        return _OURS[name]
    if ":" not in name:
        raise ArgumentError(
            f"workload: expected one of {', '.join(_OURS)} or MODULE:FUNCTION, got {name!r}"
        )
    return checked_workload(made_by(name, "workload"), "workload", name)


def checked_workload(found: Any, argument: str, name: str) -> Workload:
    """Returns what a callable of this name made; raises ArgumentError for what is no workload."""
    lacks = [part for part in _PARTS if not hasattr(found, part)]
    if lacks:
        raise ArgumentError(
            f"{argument}: expected {name} to return an object with {', '.join(_PARTS)}"
            f"{' or a torch.nn.Module' if argument == 'model' else ''}, got "
            f"{type(found).__name__} without {', '.join(lacks)}"
        )
    workload: Workload = found
    return workload
