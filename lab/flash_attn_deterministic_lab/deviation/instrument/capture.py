"""Captures every call of attention of a live model, to replay it in emulated attention.

    with captured_calls(model) as record:
        model(batch)
    record.save("calls.pt")  # then: deviation forward --inputs calls.pt

The model's own result is left as it is: nothing it computes changes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import ArgumentError
from ..attentions.masks import Call, call_of
from ..attentions.substitute import replaced_attention, running_modules
from ..forward.inputs import save_calls


@dataclass(frozen=True)
class Captured:
    """One call of attention."""

    layer: str  # qualified name of the module that called, "" for the model itself
    function: str  # scaled_dot_product_attention, or the name of this package's op
    call: Call  # on the CPU, with mask, causal, scale and window
    out: torch.Tensor | None  # what the model itself computed, like call.q; None with dropout


@dataclass
class Record:
    """What was seen; `skipped` counts calls of this package's ops that are not captured."""

    calls: list[Captured] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)  # that run, the innermost last

    def save(self, path: Path) -> None:
        """Writes every call, for `deviation forward --inputs`."""
        save_calls([captured.call for captured in self.calls], path)

    def add(self, function: str, call: Call, out: torch.Tensor | None) -> None:
        """Keeps copies of the tensors (batch, nheads, seqlen, head_dim) of a call."""
        q, k, v = (tensor.detach().cpu().clone() for tensor in (call.q, call.k, call.v))
        mask, result = (t if t is None else t.detach().cpu().clone() for t in (call.mask, out))
        layer = self.layers[-1] if self.layers else ""
        kept = replace(call, q=q, k=k, v=v, mask=mask)
        self.calls.append(Captured(layer, function, kept, result))


@contextlib.contextmanager
def captured_calls(model: torch.nn.Module) -> Iterator[Record]:
    """Records every call of attention that `model` makes inside the block.

    Seen are `scaled_dot_product_attention` and this package's dense and varlen functions. Softcap,
    ALiBi and caches are not captured, dropout is left out of the call.

    Yields:
        The record, which fills up as the model runs.

    Raises:
        ArgumentError: at the end, where the model ran no attention that can be seen.
    """

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Computes what torch would."""
        out = functional.scaled_dot_product_attention(*args, **kwargs)
        call, dropout = call_of(*args, **kwargs)
        record.add("scaled_dot_product_attention", call, None if dropout else out)
        return out

    with running_modules(model) as layers:
        record = Record(layers=layers)
        with replaced_attention(attend, needed=False), _Ops(record):
            yield record
    if not record.calls:
        skipped = f" (not captured: {record.skipped})" if record.skipped else ""
        raise ArgumentError(
            "model: expected calls of scaled_dot_product_attention or flash_attn_func inside the "
            f"block, got none{skipped}; compiled models and attention written out as matmul and "
            "softmax can't be seen"
        )


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees this package's ops, which its functions call."""

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") != "flash_attn_deterministic":
            return out
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        name, values = _unpacked(func._schema.name.partition("::")[2], given)
        if not _followed(name, values):
            if not name.endswith("bwd"):
                self.record.skipped[name] = self.record.skipped.get(name, 0) + 1
            return out
        window = (values["window_left"], values["window_right"])
        plain = not values.get("dropout_p")
        for q, k, v, result in _sequences(values, out[0]):
            call = Call(q, k, v, scale=values["softmax_scale"], window=window)
            self.record.add(name, call, result if plain else None)
        return out


def _unpacked(name: str, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the op and arguments of the same call with q, k and v apart."""
    name = name.replace("qkvpacked_", "").removesuffix("_with_residual")
    if "qkv" in values:
        parts = values["qkv"].unbind(-3)
        q = [] if values["q"] is None else [values["q"]]
        values = {**values, **dict(zip("qkv", (*q, *parts), strict=True))}
    return name, values


def _followed(name: str, values: dict[str, Any]) -> bool:
    """Whether a call has nothing that is not captured: softcap, ALiBi, a cache, a block table."""
    absent = ("alibi_slopes", "seqused_k", "leftpad_k", "block_table")
    return (
        name in ("fwd", "varlen_fwd")
        and not values.get("softcap")
        and all(values.get(part) is None for part in absent)
    )


def _sequences(values: dict[str, Any], out: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yields q, k, v and out of each sequence, (batch, nheads, seqlen, head_dim)."""
    tensors = [*(values[part] for part in ("q", "k", "v")), out]
    if "cu_seqlens_q" not in values:
        yield [tensor.transpose(1, 2) for tensor in tensors]
        return
    starts = [values[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")]
    rows, keys = ([slice(*ends) for ends in itertools.pairwise(found)] for found in starts)
    for row, key in zip(rows, keys, strict=True):
        if row.start < row.stop and key.start < key.stop:
            parts = zip(tensors, (row, key, key, row), strict=True)
            yield [tensor[part].transpose(0, 1)[None] for tensor, part in parts]
