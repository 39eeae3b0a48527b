"""The model that is looked at: a workload of ours or of one's own, or any module with batches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ...errors import ArgumentError
from ..attentions.registry import made_by
from ..study.environment import Progress
from ..study.files import load_tensors
from ..training.workload import Workload, checked_workload, find_workload

_DATA_SEED = 10**9 + 7


def _sdpa(*args: Any, **kwargs: Any) -> torch.Tensor:
    # Looked up at each call: that is how it is replaced.
    return functional.scaled_dot_product_attention(*args, **kwargs)


@dataclass(frozen=True)
class ModelPlan:
    """What is compared on a model."""

    model: str  # its name, for the record
    attentions: tuple[str, ...]  # names, see `find_attention`
    precision: str = "bf16"  # bf16, fp16: autocast; fp32: none
    device: str = "cpu"
    checkpoint: str = ""  # for the record


@dataclass
class Target:
    """A model, its batches, and what it says of them."""

    model: torch.nn.Module  # on its device
    batches: list[Any]
    workload: Workload | None  # gives loss and outputs; None: the model itself does

    def batches_within(self, seconds: float | None, name: str) -> Iterator[tuple[int, Any]]:
        """Yields batches with their numbers, and says how far a study of this name is.

        Those after the second are left out if they would end later than `seconds`.
        """
        start, slowest = time.monotonic(), 0.0
        progress = Progress(name, len(self.batches))
        for number, batch in enumerate(self.batches):
            before = time.monotonic()
            if seconds is not None and number >= 2 and before - start + slowest > seconds:
                return
            yield number, batch
            slowest = max(slowest, time.monotonic() - before)
            progress.advance(f"batch {number}")

    def loss(self, batch: Any) -> torch.Tensor:
        """Returns the loss of a batch, a scalar."""
        if self.workload is not None:
            return self.workload.loss(self.model, batch)
        found = self._call(batch)
        found = getattr(found, "loss", found)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise ArgumentError(
                "model: expected its call on a batch to return a loss (a tensor of one element, or "
                f"an object with .loss), got {type(found).__name__}"
            )
        return found.reshape(())

    def logits(self, batch: Any) -> torch.Tensor:
        """Returns (batch, tokens, vocabulary) logits in float32."""
        if self.workload is not None:
            found: Any = self.workload.outputs(self.model, batch)
        else:
            found = self._call(batch)
        found = getattr(found, "logits", found)
        if not isinstance(found, torch.Tensor) or found.ndim != 3:
            raise ArgumentError(
                "model: expected logits (batch, tokens, vocabulary) or an object with .logits, got "
                f"{tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__}"
            )
        return found.float()

    def _call(self, batch: Any) -> Any:
        device = next(self.model.parameters(), torch.empty(0)).device
        if isinstance(batch, dict):
            return self.model(**{name: _moved(value, device) for name, value in batch.items()})
        values = batch if isinstance(batch, (list, tuple)) else (batch,)
        return self.model(*(_moved(value, device) for value in values))


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def load_target(
    model: str, batches: str, count: int, device: str, checkpoint: Path | None = None
) -> Target:
    """Builds the model and draws its batches.

    Args:
        model: name of a workload (`find_workload`), or MODULE:FACTORY of a callable without
            arguments that returns a torch.nn.Module or a workload. It must call torch's
            scaled_dot_product_attention: that is what is replaced.
        batches: MODULE:FUNCTION of a callable that returns an iterable, or a .pt file of a list;
            "": the workload's own.
        count: how many are used.
        device: of the model.
        checkpoint: a state dict of the model, safetensors or torch; None: its initial weights.

    Raises:
        ArgumentError: what is missing or does not fit.
    """
    if count < 2:
        raise ArgumentError(f"count: expected at least 2 batches, got {count}")
    torch.manual_seed(0)
    found: Any = made_by(model, "model") if ":" in model else find_workload(model)
    is_module = isinstance(found, torch.nn.Module)
    workload = None if is_module else checked_workload(found, "model", model)
    module: torch.nn.Module = found if workload is None else workload.model(_sdpa)
    if checkpoint is not None:
        try:
            module.load_state_dict(read_weights(checkpoint))
        except RuntimeError as error:
            raise ArgumentError(
                f"checkpoint: expected weights of {model}, got {checkpoint}: {error}"
            ) from error
    # Dropout is a difference of its own.
    return Target(module.to(device).eval(), list(_batches(batches, count, workload)), workload)


def _batches(name: str, count: int, workload: Workload | None) -> Iterator[Any]:
    if not name:
        if workload is None:
            raise ArgumentError(
                "batches: expected MODULE:FUNCTION or a .pt file for this model, got none"
            )
        for number in range(count):
            yield workload.batch(torch.Generator().manual_seed(_DATA_SEED + number))
        return
    if name.endswith(".pt"):
        source = load_tensors(Path(name), "batches: expected a list of batches")
    else:
        source = made_by(name, "batches")
    if not isinstance(source, Iterable) or isinstance(source, (dict, torch.Tensor)):
        raise ArgumentError(
            f"batches: expected a list or an iterator of batches from {name}, got "
            f"{type(source).__name__}"
        )
    found = list(itertools.islice(source, count))
    if len(found) < count:
        raise ArgumentError(f"batches: expected at least {count}, got {len(found)} from {name}")
    yield from found


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Reads a state dict: safetensors, or what torch.save wrote ({"model": ...} is looked into).

    Raises:
        ArgumentError: the file is neither, the safetensors package is missing, or weights are NaN.
    """
    expected = "checkpoint: expected weights (safetensors, or a state dict of torch.save)"
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file

            found: Any = load_file(str(path))
        except ImportError as error:
            raise ArgumentError(
                f"{path}: reading it needs the package safetensors, which is not installed"
            ) from error
        except Exception as error:  # parsers raise what they raise
            raise ArgumentError(f"{expected}, got {path}: {error}") from error
    else:
        found = load_tensors(path, expected)
    for key in ("model", "state_dict"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    weights = {
        name: value
        for name, value in (found.items() if isinstance(found, dict) else ())
        if isinstance(value, torch.Tensor)
    }
    if not weights:
        raise ArgumentError(f"{path}: expected tensors by name, got {type(found).__name__}")
    broken = [name for name, value in weights.items() if not value.isfinite().all()]
    if broken:
        raise ArgumentError(
            f"{path}: expected finite weights, got NaN or infinite ones in {', '.join(broken[:4])}"
        )
    return weights
