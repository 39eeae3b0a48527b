"""Both attentions on every call of a live model, compared layer by layer (the dual-compute method).

    with dual_compute(model) as record:
        model(batch)
    for call in record.calls:
        print(call.layer, call.flash["max"], call.baseline["max"])

The model's own result is left as it is: nothing it computes changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ArgumentError
from .blocks import Blocks
from .files import whole_file
from .formats import NumberFormat, parse_format
from .metrics import deviation
from .simulate import baseline_attention, check_inputs, flash_attention, golden_attention
from .steps import find_preset

Metrics = dict[str, list[float]]
_ATTENTION = functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Call:
    """One call of attention.

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

    calls: list[Call] = field(default_factory=list)
    tensors: list[dict[str, torch.Tensor]] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes q, k and v of every call, for `deviation forward --inputs`.

        Raises:
            ArgumentError: nothing was kept: `dual_compute(..., keep=True)` keeps.
        """
        if not self.tensors:
            raise ArgumentError("path: expected kept tensors; use dual_compute(model, keep=True)")
        with whole_file(path) as temporary:
            torch.save(self.tensors, temporary)


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
        preset: of the tiled one; its kernels' order of operations takes no masks.
        block_c: keys per block.
        keep: whether q, k and v of every call are kept, on the CPU.

    Yields:
        The record, which fills up as the model runs.

    Raises:
        ArgumentError: at the end, where the model ran no attention that can be seen; or unknown
            names.
    """
    record = Record()
    watch = _Watch(parse_format(number_format), preset, Blocks(64, block_c), keep, record)
    find_preset(preset)
    layers: list[str] = []
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(_enter(layers, name)))
        handles.append(module.register_forward_hook(_leave(layers), always_call=True))
    watch.layers = layers
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # torch.nn.MultiheadAttention's fused path in eval mode calls no function that can be seen.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _Functions(watch), _Ops(watch), _patched(watch):
            yield record
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for handle in handles:
            handle.remove()
    if not record.calls:
        skipped = f" (not compared: {record.skipped})" if record.skipped else ""
        raise ArgumentError(
            "model: expected calls of scaled_dot_product_attention or flash_attn_func inside the "
            f"block, got none{skipped}; compiled models and attention written out as matmul and "
            "softmax can't be hooked"
        )


def _enter(layers: list[str], name: str) -> Callable[..., None]:
    def enter(*_: Any) -> None:
        layers.append(name)

    return enter


def _leave(layers: list[str]) -> Callable[..., None]:
    def leave(*_: Any) -> None:
        layers.pop()

    return leave


@dataclass
class _Watch:
    number_format: NumberFormat
    preset: str
    blocks: Blocks
    keep: bool
    record: Record
    layers: list[str] = field(default_factory=list)
    busy: bool = False

    @torch.no_grad()
    def see(
        self,
        function: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        bias: torch.Tensor | None,
        scale: float,
    ) -> None:
        """Compares one call; tensors are (batch, nheads, seqlen, head_dim)."""
        number_format = self.number_format
        if k.shape[-3] != q.shape[-3]:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        shape = tuple(q.shape)
        if self.keep:
            tensors = {"q": q, "k": k, "v": v}
            self.record.tensors.append({n: t.detach().cpu().clone() for n, t in tensors.items()})
        q, k, v = (number_format.round(t.detach().to(number_format.container)) for t in (q, k, v))
        check_inputs(q, k, v)
        preset = find_preset(self.preset)
        golden = golden_attention(q, k, v, scale, bias)
        baseline = baseline_attention(q, k, v, scale, number_format, None, bias)
        steps = preset.steps(number_format)
        flash = flash_attention(q, k, v, scale, preset, steps, self.blocks, None, bias)
        keep = q.ndim - 2
        self.record.calls.append(
            Call(
                layer=self.layers[-1] if self.layers else "",
                function=function,
                shape=shape,
                flash=deviation(flash, golden, number_format, keep),
                baseline=deviation(baseline, golden, number_format, keep),
                difference=deviation(flash, baseline.double(), number_format, keep),
                model={} if out is None else deviation(out.detach(), golden, number_format, keep),
            )
        )


def _see(
    watch: _Watch,
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, device=bias.device).masked_fill(~bias, -torch.inf)
    if is_causal:
        rows, keys = query.shape[-2], key.shape[-2]
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=query.device).triu(1)
        bias = torch.zeros(rows, keys, device=query.device).masked_fill(hidden, -torch.inf)
    watch.see(
        "scaled_dot_product_attention",
        query, key, value,
        None if dropout_p else out,
        bias,
        query.shape[-1] ** -0.5 if scale is None else scale,
    )  # fmt: skip


@contextlib.contextmanager
def _patched(watch: _Watch) -> Iterator[None]:
    """Sees calls that torch's own functions make: no mode is active inside of them."""
    original = functional.scaled_dot_product_attention

    def seen(*args: Any, **kwargs: Any) -> torch.Tensor:
        if watch.busy:
            return original(*args, **kwargs)
        watch.busy = True
        try:
            out = original(*args, **kwargs)
            _see(watch, out, *args, **kwargs)
        finally:
            watch.busy = False
        return out

    functional.scaled_dot_product_attention = seen
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


class _Functions(TorchFunctionMode):
    """Sees scaled_dot_product_attention, under whatever name it was imported."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is _ATTENTION and not self.watch.busy:
            self.watch.busy = True
            try:
                _see(self.watch, out, *args, **kwargs)
            finally:
                self.watch.busy = False
        return out


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
        values = _arguments(func, args, kwargs or {})
        sequences = _sequences(name, values, out)
        if sequences:
            self.watch.busy = True
            try:
                for q, k, v, result in sequences:
                    bias = _window_bias(q, k, values["window_left"], values["window_right"])
                    self.watch.see(name, q, k, v, result, bias, values["softmax_scale"])
            finally:
                self.watch.busy = False
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


def _window_bias(q: torch.Tensor, k: torch.Tensor, left: int, right: int) -> torch.Tensor | None:
    from ..reference._window import Window

    rows = range(k.shape[-2] - q.shape[-2], k.shape[-2])
    hidden = Window(left, right).hidden(rows, range(k.shape[-2]), q.device)
    if hidden is None:
        return None
    return torch.zeros(hidden.shape, device=q.device).masked_fill(hidden, -torch.inf)
