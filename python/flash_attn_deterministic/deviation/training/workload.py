"""What is trained or looked at: the interface, and the workloads by name."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ...errors import ArgumentError
from ..attentions.registry import Attention, find_object
from .language import LANGUAGE_SIZES, Language
from .sinks import SINKS_SIZES, Sinks
from .text_to_image import SIZES, Drawings


class Workload(Protocol):
    """A model with its data and optimizer."""

    def model(self, attention: Attention) -> torch.nn.Module:
        """Builds a model, on torch's default device, whose layers call `attention`."""

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer; its learning rate is the peak, after a linear start."""

    def batch(self, generator: torch.Generator) -> Any:
        """Returns the next batch; all chance comes from `generator`."""

    def outputs(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Returns what the model says of a batch, any shape, to compare models as functions."""

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Returns the loss of a batch."""


_PARTS = ("model", "optimizer", "batch", "outputs", "loss")


def find_workload(name: str) -> Workload:
    """Returns a workload.

    Args:
        name: drawings-SIZE, language-SIZE, sinks-SIZE, or MODULE:FUNCTION of a callable without
            arguments that returns a Workload.

    Raises:
        ArgumentError: there is none of this name.
    """
    kind, _, size = name.partition("-")
    if kind == "drawings" and size in SIZES:
        return Drawings(SIZES[size])
    if kind == "language" and size in LANGUAGE_SIZES:
        return Language(LANGUAGE_SIZES[size])
    if kind == "sinks" and size in SINKS_SIZES:
        return Sinks(SINKS_SIZES[size])
    if ":" not in name:
        sizes = {"drawings": SIZES, "language": LANGUAGE_SIZES, "sinks": SINKS_SIZES}
        known = [f"{kind}-{size}" for kind, found in sizes.items() for size in found]
        raise ArgumentError(
            f"workload: expected one of {', '.join(known)} or MODULE:FUNCTION, got {name!r}"
        )
    try:
        found: Any = find_object(name, "workload")()
    except TypeError as error:
        raise ArgumentError(
            f"workload: expected {name} to be a callable without arguments: {error}"
        ) from error
    lacks = [part for part in _PARTS if not hasattr(found, part)]
    if lacks:
        raise ArgumentError(
            f"workload: expected {name} to return an object with {', '.join(_PARTS)}, got "
            f"{type(found).__name__} without {', '.join(lacks)}"
        )
    return found  # type: ignore[no-any-return]
