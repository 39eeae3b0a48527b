"""Captures every call of attention of a live model, to replay it in emulated attention.

    with captured_calls(model) as record:
        model(batch)
    record.save("calls.pt")  # then: deviation forward --inputs calls.pt

The model's own result is left as it is: nothing it computes changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ..._ops.schemas import unpacked
from ...errors import ArgumentError
from ..attentions.masks import Call, call_of
from ..attentions.substitute import replaced_attention, running_modules
from ..forward.inputs import save_calls


@dataclass(frozen=True)
class Captured:
    """One call of attention.

    Args:
        layer: qualified name of the module that called, "" for the model itself.
        function: scaled_dot_product_attention, or the name of this package's op.
        call: its tensors, on the CPU, with mask, causal, scale and window.
        out: what the model itself computed, like call.q; None with dropout.
    """

    layer: str
    function: str
    call: Call
    out: torch.Tensor | None


@dataclass
class Record:
    """What was seen; `skipped` counts calls of this package's ops that are not captured."""

    calls: list[Captured] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)

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
        name = func._schema.name.partition("::")[2]
        name, values = unpacked(name, _arguments(func, args, kwargs or {}))
        sequences = _sequences(name, values, out)
        if sequences:
            window = (values["window_left"], values["window_right"])
            for q, k, v, result in sequences:
                call = Call(q, k, v, scale=values["softmax_scale"], window=window)
                self.record.add(name, call, result)
        elif not name.endswith("bwd"):
            self.record.skipped[name] = self.record.skipped.get(name, 0) + 1
        return out


_Sequence = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def _sequences(name: str, values: dict[str, Any], out: Any) -> list[_Sequence]:
    """Returns q, k, v and out of each sequence; none where a call has what is not captured.

    Not captured are softcap, ALiBi, and keys that lie in a cache or behind a block table.
    """
    if values.get("softcap", 0.0) != 0 or values.get("alibi_slopes") is not None:
        return []
    result = out[0] if isinstance(out, (tuple, list)) else out
    if name not in ("fwd", "varlen_fwd"):
        return []
    q, k, v = (values[part] for part in ("q", "k", "v"))
    plain = not values.get("dropout_p", 0.0)
    if name == "fwd":
        parts = [tensor.transpose(1, 2) for tensor in (q, k, v, result)]
        return [(parts[0], parts[1], parts[2], parts[3] if plain else None)]
    moved = ("seqused_k", "leftpad_k", "block_table")
    if any(values.get(part) is not None for part in moved):
        return []
    found: list[_Sequence] = []
    starts_q, starts_k = values["cu_seqlens_q"].tolist(), values["cu_seqlens_k"].tolist()
    for index in range(len(starts_q) - 1):
        rows = slice(starts_q[index], starts_q[index + 1])
        keys = slice(starts_k[index], starts_k[index + 1])
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        cut = [t.transpose(0, 1)[None] for t in (q[rows], k[keys], v[keys], result[rows])]
        found.append((cut[0], cut[1], cut[2], cut[3] if plain else None))
    return found


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
