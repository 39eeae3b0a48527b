"""Both attentions on every call of a live model, compared layer by layer (the dual-compute method).

    with dual_compute(model) as record:
        model(batch)
    for call in record.calls:
        print(call.layer, call.flash["max"], call.baseline["max"])

The model's own result is left as it is: nothing it computes changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ..._ops.schemas import unpacked
from ...errors import ArgumentError
from ..attentions.masks import Call
from ..attentions.substitute import replaced_attention, running_modules
from ..emulate.blocks import Blocks
from ..emulate.simulate import (
    baseline_attention,
    check_inputs,
    golden_attention,
    tiled_attention,
)
from ..emulate.steps import find_preset
from ..forward.inputs import save_calls
from ..numbers.formats import NumberFormat, parse_format
from ..numbers.metrics import Metrics, deviation

_SDPA = functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Compared:
    """One call of attention, compared.

    Args:
        layer: qualified name of the module that called, "" for the model itself.
        function: scaled_dot_product_attention, or the name of this package's op.
        shape: (batch, nheads, seqlen_q, head_dim) of q.
        flash: deviation of the preset's tiled attention from float64; a list per head and sequence.
        baseline: deviation of explicit attention in the format from float64.
        difference: deviation of the one from the other.
        model: deviation from float64 of what the model itself computed; empty with dropout.
    """

    layer: str
    function: str
    shape: tuple[int, ...]
    flash: Metrics
    baseline: Metrics
    difference: Metrics
    model: Metrics


@dataclass
class Record:
    """What was seen; `skipped` counts calls of this package's ops that are not compared."""

    calls: list[Compared] = field(default_factory=list)
    kept: list[Call] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes every call, with its mask, scale and window, for `deviation forward --inputs`.

        Raises:
            ArgumentError: nothing was kept: `dual_compute(..., keep=True)` keeps.
        """
        if not self.kept:
            raise ArgumentError("path: expected kept calls; use dual_compute(model, keep=True)")
        save_calls(self.kept, path)


@contextlib.contextmanager
def dual_compute(
    model: torch.nn.Module,
    number_format: str = "bf16",
    preset: str = "paper",
    block_c: int = 64,
    keep: bool = False,
) -> Iterator[Record]:
    """Records every call of attention that `model` makes inside the block.

    Seen are `scaled_dot_product_attention` and this package's dense and varlen functions.
    Masks, causal and grouped-query calls are compared as they are, dropout is left out of the
    comparison.

    Args:
        model: any module.
        number_format: of both attentions that are compared, whatever the model's own dtype.
        preset: of the tiled one.
        block_c: keys per block.
        keep: whether q, k and v of every call are kept, on the CPU.

    Yields:
        The record, which fills up as the model runs.

    Raises:
        ArgumentError: at the end, where the model ran no attention that can be seen; or unknown
            names.
    """
    record = Record()
    find_preset(preset)
    blocks, watched = Blocks(64, block_c), parse_format(number_format)
    with running_modules(model) as layers:
        watch = _Watch(watched, preset, blocks, keep, record, layers)
        with replaced_attention(watch.attend), _Ops(watch):
            yield record
    if not record.calls:
        skipped = f" (not compared: {record.skipped})" if record.skipped else ""
        raise ArgumentError(
            "model: expected calls of scaled_dot_product_attention or flash_attn_func inside the "
            f"block, got none{skipped}; compiled models and attention written out as matmul and "
            "softmax can't be hooked"
        )


@dataclass
class _Watch:
    number_format: NumberFormat
    preset: str
    blocks: Blocks
    keep: bool
    record: Record
    layers: list[str]
    busy: bool = False

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Computes what torch would, and compares."""
        out = _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                    enable_gqa=enable_gqa)  # fmt: skip
        call = Call(query, key, value, attn_mask, is_causal, scale)
        self.see("scaled_dot_product_attention", call, None if dropout_p else out)
        return out

    @torch.no_grad()
    def see(self, function: str, call: Call, out: torch.Tensor | None) -> None:
        """Compares one call; tensors are (batch, nheads, seqlen, head_dim)."""
        self.busy = True
        try:
            self._see(function, call, out)
        finally:
            self.busy = False

    def _see(self, function: str, call: Call, out: torch.Tensor | None) -> None:
        number_format, preset = self.number_format, find_preset(self.preset)
        if self.keep:
            self.record.kept.append(_copied(call))
        container = number_format.container
        q, k, v = (number_format.round(t.detach().to(container)) for t in call.heads())
        check_inputs(q, k, v)
        scale, bias = call.factor, call.bias()
        golden = golden_attention(q, k, v, scale, bias)
        baseline = baseline_attention(q, k, v, scale, number_format, None, bias)
        steps = preset.steps(number_format)
        flash = tiled_attention(q, k, v, scale, preset, steps, self.blocks, None, bias)
        keep = q.ndim - 2
        self.record.calls.append(
            Compared(
                layer=self.layers[-1] if self.layers else "",
                function=function,
                shape=tuple(q.shape),
                flash=deviation(flash, golden, number_format, keep),
                baseline=deviation(baseline, golden, number_format, keep),
                difference=deviation(flash, baseline.double(), number_format, keep),
                model={} if out is None else deviation(out.detach(), golden, number_format, keep),
            )
        )


def _copied(call: Call) -> Call:
    """The same call with tensors of its own, on the CPU."""
    tensors = {
        f.name: getattr(call, f.name).detach().cpu().clone()
        for f in fields(call)
        if isinstance(getattr(call, f.name), torch.Tensor)
    }
    return replace(call, **tensors)


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees this package's ops, which its functions call."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") != "flash_attn_deterministic" or self.watch.busy:
            return out
        name = func._schema.name.partition("::")[2]
        name, values = unpacked(name, _arguments(func, args, kwargs or {}))
        sequences = _sequences(name, values, out)
        if sequences:
            window = (values["window_left"], values["window_right"])
            for q, k, v, result in sequences:
                call = Call(q, k, v, scale=values["softmax_scale"], window=window)
                self.watch.see(name, call, result)
        elif not name.endswith("bwd"):
            self.watch.record.skipped[name] = self.watch.record.skipped.get(name, 0) + 1
        return out


_Sequence = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def _sequences(name: str, values: dict[str, Any], out: Any) -> list[_Sequence]:
    """Returns q, k, v and out of each sequence length; none where a call has what is not compared.

    Not compared are softcap, ALiBi, and keys that lie in a cache or behind a block table.
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
