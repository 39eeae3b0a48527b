"""Attention with a planted fault: each drops, doubles, negates or shifts one feature.

The functions of the package do the work, on any device; a fault changes what they are asked for, or
what they return. Live checks must catch each one: `tests/unit/verify` on the CPU, and
`python -m tests.gpu.planted` on a GPU, with the same table.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flash_attn_deterministic.checks.tensors import LATENT
from flash_attn_deterministic.verify import accuracy
from flash_attn_deterministic.verify.contract import Attention
from flash_attn_deterministic.verify.contract.sizes import Config

OURS = Attention.installed()
FUNCTIONS = ("dense", "varlen", "kvcache")
Change = Callable[[dict[str, Any]], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Fault:
    """A fault, and the cases of the accuracy checks that meet it."""

    name: str  # "feature: what is wrong"
    attention: Attention
    features: tuple[str, ...] = ()  # names of features.FEATURES; empty: any
    forms: tuple[str, ...] = ("dense",)  # names of accuracy's forms
    # only these tensors may be wrong; empty: any
    tensors: tuple[str, ...] = ()
    configs: tuple[Config, ...] = ((64, "bf16"),)  # bf16's bounds are the wider ones
    dlse: bool = False  # whether it shows only where softmax_lse has a gradient


def caught(fault: Fault, config: Config, device: str) -> dict[str, bool]:
    """Runs the cases of a fault; returns whether each caught it."""
    found = {}
    for case in accuracy.cases(device, config[0] == LATENT[0]):
        if case.form not in fault.forms or (fault.features and case.feature not in fault.features):
            continue
        if case.name.split()[0] not in (case.feature, case.form):
            continue  # of other lengths
        if fault.dlse and not case.dlse:
            continue
        rows = accuracy.measure(config, device, fault.attention, [case])["rows"]
        wrong = {row["tensor"] for row in rows if not row["passed"]}
        found[case.name] = bool(wrong if not fault.tensors else wrong & set(fault.tensors))
    return found


# --- what is asked for ---------------------------------------------------------------------------


def replaced(
    run: Callable[[Callable[..., Any], dict[str, Any]], Any], names: Iterable[str]
) -> Attention:
    """Other functions of those names; `run` takes the package's, and all arguments by name."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def changed(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return run(function, dict(bound.arguments))

        return changed

    return dataclasses.replace(OURS, **{name: wrap(getattr(OURS, name)) for name in names})


def asked(change: Change, *names: str) -> Attention:
    """The package's functions, called with other arguments; of those names, or of all."""
    return replaced(lambda function, a: function(**{**a, **(change(a) or {})}), names or FUNCTIONS)


def argument(name: str, change: Callable[[Any], Any], *names: str) -> Attention:
    """The package's functions that take an argument, with another value where it is given."""
    own = [n for n in names or FUNCTIONS if name in inspect.signature(getattr(OURS, n)).parameters]
    return asked(lambda a: {} if a[name] is None else {name: change(a[name])}, *own)


def window(change: Callable[[int, int], tuple[int, int]]) -> Attention:
    return argument("window_size", lambda sides: change(*sides))


slopes = functools.partial(argument, "alibi_slopes")
sinks = functools.partial(argument, "learnable_sink")


def times(name: str, factor: float) -> Attention:
    return argument(name, lambda value: value * factor)


def nothing(value: Any) -> None:
    """What is given is dropped."""


def by_index(seeds: torch.Tensor) -> torch.Tensor:
    return seeds + torch.arange(len(seeds), device=seeds.device)


def default_scale(a: Mapping[str, Any]) -> float:
    given = a["softmax_scale"]
    return float(a["q"].shape[-1] ** -0.5 if given is None else given)


def scaled_sinks(a: dict[str, Any]) -> dict[str, Any]:
    sinks = a["learnable_sink"]
    return {} if sinks is None else {"learnable_sink": sinks * default_scale(a)}


def kv_heads(order: Callable[[int], list[int]], *names: str) -> Attention:
    """Another KV head for each group of query heads."""
    pairs = ("k_cache", "v_cache") if names == ("kvcache",) else ("k", "v")

    def change(a: dict[str, Any]) -> dict[str, Any]:
        return {name: a[name][..., order(a[name].shape[-2]), :] for name in pairs}

    return asked(change, *names)


def interleaved_groups(a: dict[str, Any]) -> dict[str, Any]:
    """Query head h takes KV head h % nheads_k, and not h // group."""
    group = a["q"].shape[-2] // a["k"].shape[-2]
    repeats = (1,) * (a["k"].dim() - 2) + (group, 1)
    return {name: a[name].repeat(repeats) for name in ("k", "v")}


def shifted(a: dict[str, Any], side: str) -> dict[str, Any]:
    """Every border between packed sequences a token later."""
    starts = a[f"cu_seqlens_{side}"] + 1
    starts[0], starts[-1] = 0, starts[-1] - 1
    return {f"cu_seqlens_{side}": starts, f"max_seqlen_{side}": a[f"max_seqlen_{side}"] + 1}


def without_last_element(q: torch.Tensor) -> torch.Tensor:
    """The last element of each head counts as padding."""
    return torch.cat([q[..., :-1], torch.zeros_like(q[..., -1:])], -1)


def rotary_columns(change: Callable[[torch.Tensor], torch.Tensor]) -> Attention:
    """Other queries in the columns that a latent cache has beside its values."""

    def changed(q: torch.Tensor) -> torch.Tensor:
        return torch.cat([q[..., : LATENT[1]], change(q[..., LATENT[1] :])], -1)

    return argument("q", changed, "kvcache")


# --- what comes back -----------------------------------------------------------------------------


def returned(change: Callable[..., Any], *names: str) -> Attention:
    """The package's functions; `change` takes their result, arguments and itself."""
    return replaced(lambda function, a: change(function(**a), a, function), names or ("dense",))


def dropout(change: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> Attention:
    """`change` takes out, out without dropout, and the probability of keeping."""

    def wrong(result: Any, a: dict[str, Any], function: Callable[..., Any]) -> Any:
        if not a["dropout_p"]:
            return result
        out, *rest = result
        plain = {"dropout_p": 0.0, "return_attn_probs": False, "return_max_logits": False}
        whole = function(**{**a, **plain})
        return (change(out, whole, 1.0 - a["dropout_p"]), *rest)

    return returned(wrong, "dense", "varlen")


def other_mask(result: Any, a: dict[str, Any], function: Callable[..., Any]) -> Any:
    """Drops other weights than S_dmask says: those of the next call."""
    if not a["dropout_p"]:
        return result
    return (function(**a)[0], *result[1:])


class Backward(torch.autograd.Function):
    """A result of one call with the gradients of another."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, gradient


def backward_of(change: Change) -> Attention:
    """The forward of a call, and the backward of a changed one."""

    def wrong(result: Any, a: dict[str, Any], function: Callable[..., Any]) -> Any:
        if not a["q"].requires_grad:
            return result
        other = function(**{**a, **(change(a) or {}), "return_attn_probs": False})
        out = result[0] if isinstance(result, tuple) else result
        both = Backward.apply(out.detach(), other)  # type: ignore[no-untyped-call]
        return (both, *result[1:]) if isinstance(result, tuple) else both

    return returned(wrong, "dense", "varlen")


class Gradient(torch.autograd.Function):
    """Returns its argument; changes the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, change: Any) -> torch.Tensor:
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.change(gradient), None


def gradient(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Attention:
    return argument(name, lambda t: Gradient.apply(t, change), "dense", "varlen")  # type: ignore[no-untyped-call]


def residual(factor: float) -> Attention:
    """dq is linear in the residual: one of another size is a mix of with and without."""

    def wrong(result: Any, a: dict[str, Any], function: Callable[..., Any]) -> Any:
        from flash_attn_deterministic import deterministic_mode

        if not a["q"].requires_grad:
            return result
        with deterministic_mode(keep_residual=False):
            without = function(**a)
        return Backward.apply(  # type: ignore[no-untyped-call]
            result.detach(), factor * result + (1 - factor) * without
        )

    return returned(wrong)


def cache(change: Change) -> Attention:
    return asked(change, "kvcache")


def forgetful(a: dict[str, Any]) -> dict[str, Any]:
    return {"k_cache": a["k_cache"].clone(), "v_cache": a["v_cache"].clone()}


def with_out(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(result, tuple):
        return (change(result[0]), *result[1:])
    return change(result)


def out(change: Callable[[torch.Tensor], torch.Tensor]) -> Attention:
    return returned(lambda result, a, function: with_out(result, change), *FUNCTIONS)


def lse(change: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]) -> Attention:
    def wrong(result: Any, a: dict[str, Any], function: Callable[..., Any]) -> Any:
        if not isinstance(result, tuple):
            return result
        return (result[0], change(result[1], a), *result[2:])

    return returned(wrong, *FUNCTIONS)


def max_logits(change: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]) -> Attention:
    def wrong(result: Any, a: dict[str, Any], function: Callable[..., Any]) -> Any:
        return (*result[:-1], change(result[-1], a)) if a["return_max_logits"] else result

    return returned(wrong, "dense")


def with_sink(logits: torch.Tensor, a: dict[str, Any]) -> torch.Tensor:
    return torch.maximum(logits, logits.amax() + a["learnable_sink"].abs())


def dlse(change: Callable[[torch.Tensor], torch.Tensor]) -> Attention:
    return lse(lambda t, a: Gradient.apply(t, change) if t.requires_grad else t)  # type: ignore[no-untyped-call]


# --- the table -----------------------------------------------------------------------------------

RIGHT = ("window", "window-right", "everything")
CAUSAL = ("causal", "softcap", "alibi")
SOFTCAP = ("softcap", "softcap-full", "everything", "everything-causal", "dropout-softcap")
ALIBI = ("alibi", "alibi-full", "everything", "everything-causal")
SINK = ("sink", "sink-full")
DROPOUT = ("dropout", "dropout-causal", "dropout-window", "dropout-softcap", "sink-dropout")
APPEND = ("append", "append-pages", "append-halves")
ROTARY = ("append-pages", "append-halves")
IN_PAGES = ("pages", "packed-pages", "append-pages")
IN_CACHE = ("cache", "cache-places", "pages")
PADDED: tuple[Config, ...] = ((40, "fp16"), (72, "bf16"))

FORGOTTEN: dict[str, tuple[Change, tuple[str, ...]]] = {
    "causal": (lambda a: {"causal": False}, CAUSAL),
    "window": (lambda a: {"window_size": (-1, -1)}, ("window", "window-left", "window-right")),
    "softcap": (lambda a: {"softcap": 0.0}, SOFTCAP),
    "alibi": (lambda a: {"alibi_slopes": None}, ALIBI),
    "sink": (lambda a: {"learnable_sink": None}, SINK),
    "dropout": (lambda a: {"dropout_p": 0.0}, DROPOUT),
    "dropout_seeds": (lambda a: {"dropout_seeds": None}, ("dropout-seeds",)),
    "scale": (lambda a: {"softmax_scale": None}, ("scale",)),
}
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropped": lambda t: 0 * t,
    "doubled": lambda t: 2 * t,
    "negated": lambda t: -t,
    "shifted": lambda t: t.roll(1, -3),
}

FAULTS: tuple[Fault, ...] = (
    *(Fault(f"out: {name}", out(change), ("full", "causal"), ("dense", "packed", "cache"))
      for name, change in CHANGES.items()),
    *(Fault(f"{tensor}: {name}", gradient(tensor[1], change), ("full", "causal"),
            ("dense", "packed"), (tensor,))
      for tensor in ("dq", "dk", "dv") for name, change in CHANGES.items()),
    Fault("softmax_lse: dropped", lse(lambda t, a: torch.zeros_like(t)), ("full", "causal")),
    Fault("softmax_lse: in base 2", lse(lambda t, a: t * 1.4427), ("full", "causal")),
    Fault("softmax_lse: negated", lse(lambda t, a: -t), ("full", "causal")),
    Fault("softmax_lse: shifted", lse(lambda t, a: t.roll(1, -1)), ("full", "causal")),
    *(Fault(f"dlse: {name}", dlse(change), ("causal", "everything"), ("dense", "packed"),
            dlse=True)
      for name, change in (*[*CHANGES.items()][:3], ("shifted", lambda t: t.roll(1, -1)))),
    Fault("dlse: forgotten", lse(lambda t, a: t.detach()), ("causal", "everything"),
          ("dense", "packed"), dlse=True),
    *(Fault(f"backward: without {name}", backward_of(change), features, ("dense",),
            ("dq", "dk", "dv"))
      for name, (change, features) in FORGOTTEN.items()),
    # masks
    Fault("causal: dropped", asked(lambda a: {"causal": False}), CAUSAL, ("dense", "packed")),
    Fault("causal: a key too far",
          asked(lambda a: {"causal": False, "window_size": (-1, 1)} if a["causal"] else None),
          CAUSAL, ("dense", "packed", "cache")),
    Fault("causal: a key too short",
          asked(lambda a: {n: a[n][:, :-1] for n in "kv"}, "dense"), CAUSAL),
    Fault("causal: aligned to the top left",
          asked(lambda a: {n: a[n][:, : a["q"].shape[1]] for n in "kv"}, "dense"), CAUSAL),
    Fault("causal: negated",
          asked(lambda a: {"causal": False, "window_size": (0, -1)} if a["causal"] else None),
          CAUSAL),
    Fault("window left: dropped", window(lambda left, right: (-1, right)),
          ("window", "window-left")),  # ALiBi hides far keys
    Fault("window left: doubled", window(lambda left, right: (2 * left, right)),
          ("window", "window-left")),
    Fault("window left: a key too far", window(lambda left, right: (left + 1, right)),
          ("window", "window-left", "window-0", "window-left-0")),
    Fault("window left: a key too short", window(lambda left, right: (left - 1, right)),
          ("window", "window-left")),
    Fault("window right: dropped", window(lambda left, right: (left, -1)),
          (*RIGHT, "window-right-0")),
    Fault("window right: doubled", window(lambda left, right: (left, 2 * right)), RIGHT),
    Fault("window right: a key too far", window(lambda left, right: (left, right + 1)),
          (*RIGHT, "window-0", "window-right-0")),
    Fault("window right: a key too short", window(lambda left, right: (left, right - 1)), RIGHT),
    Fault("window: shifted", window(lambda left, right: (left - 1, right + 1)), ("window",)),
    Fault("window: negated", window(lambda left, right: (right, left)),
          ("window", "window-left", "window-right", "window-right-0")),
    # scores
    Fault("scale: dropped", asked(lambda a: {"softmax_scale": 1.0})),
    Fault("scale: the default for a given one", asked(lambda a: {"softmax_scale": None}),
          ("scale",)),
    Fault("scale: doubled", asked(lambda a: {"softmax_scale": 2 * default_scale(a)})),
    Fault("scale: negated", argument("q", torch.neg), ("full", "causal", "scale")),
    Fault("softcap: dropped", times("softcap", 0.0), SOFTCAP, ("dense", "packed", "cache")),
    Fault("softcap: doubled", times("softcap", 2.0), SOFTCAP),
    Fault("softcap: negated", argument("q", torch.neg), SOFTCAP),
    Fault("softcap: a tenth too large", times("softcap", 1.1), SOFTCAP),
    Fault("alibi: dropped", slopes(nothing), ALIBI, ("dense", "packed", "cache")),
    Fault("alibi: doubled", slopes(lambda t: 2 * t), ALIBI),
    Fault("alibi: negated", slopes(torch.neg), ALIBI),
    Fault("alibi: slopes of the next head", slopes(lambda t: t.roll(1, -1)), ALIBI),
    Fault("alibi: slopes of the first sequence",
          slopes(lambda t: t[:1].expand_as(t).contiguous()), ALIBI),
    Fault("alibi: distances from 1",
          lse(lambda t, a: t if a["alibi_slopes"] is None else t - a["alibi_slopes"][..., None]),
          ALIBI),
    Fault("sink: dropped", sinks(nothing), SINK, ("dense", "packed", "cache", "pages", "append")),
    Fault("sink: doubled", sinks(lambda t: 2 * t), SINK),
    Fault("sink: negated", sinks(torch.neg), SINK),
    Fault("sink: of the next head", sinks(lambda t: t.roll(1)), SINK),
    Fault("sink: scaled as scores are", asked(scaled_sinks), SINK),
    Fault("max_logits: unscaled", max_logits(lambda t, a: t / default_scale(a)),
          ("full", "window"), ("dense",), ("max_logits",)),
    Fault("max_logits: of the next head", max_logits(lambda t, a: t.roll(1)),
          ("full", "window"), ("dense",), ("max_logits",)),
    Fault("max_logits: with the sink", max_logits(with_sink),
          SINK, ("dense",), ("max_logits",)),
    *(Fault(f"dsink: {name}", gradient("learnable_sink", change), SINK, ("dense",), ("dsink",))
      for name, change in list(CHANGES.items())[:3]),
    # dropout
    Fault("dropout: dropped", dropout(lambda own, whole, keep: whole), DROPOUT,
          ("dense", "packed")),
    Fault("dropout: doubled", times("dropout_p", 2.0), DROPOUT),
    Fault("dropout: not scaled", dropout(lambda own, whole, keep: own * keep), DROPOUT,
          ("dense", "packed")),
    Fault("dropout: negated",
          dropout(lambda own, whole, keep: (whole - keep * own) / keep), DROPOUT),
    Fault("dropout: the next mask", returned(other_mask, "dense", "varlen"), DROPOUT,
          ("dense", "packed")),
    Fault("dropout_seeds: dropped", argument("dropout_seeds", nothing), ("dropout-seeds",),
          ("dense", "packed")),
    Fault("dropout_seeds: of the next sequence",
          argument("dropout_seeds", lambda t: t.roll(1)), ("dropout-seeds",), ("dense", "packed")),
    Fault("dropout_seeds: with the index in the batch",
          argument("dropout_seeds", by_index), ("dropout-seeds",), ("dense", "packed")),
    # heads
    Fault("heads: interleaved", asked(interleaved_groups, "dense", "varlen"), (),
          ("dense", "packed")),
    Fault("heads: negated", kv_heads(lambda n: list(range(n))[::-1], "dense", "varlen"), (),
          ("dense", "packed")),
    Fault("heads: the first for all", kv_heads(lambda n: [0] * n, "dense"), ()),
    Fault("heads: shifted in a cache", kv_heads(lambda n: [*range(1, n), 0], "kvcache"), (),
          ("cache", "pages")),
    Fault("padding: scale of the padded head dim",
          asked(lambda a: {"softmax_scale": (-a["q"].shape[-1] // 32 * -32) ** -0.5}),
          ("full", "causal"), ("dense", "packed", "cache"), configs=PADDED),
    Fault("padding: scores without the last element", argument("q", without_last_element),
          ("full", "causal"), ("dense", "packed", "cache"), configs=PADDED),
    Fault("padding: values without the last element", out(without_last_element), ("full", "causal"),
          ("dense", "packed", "cache"), configs=PADDED),
    # layouts
    Fault("packed: queries shifted", asked(lambda a: shifted(a, "q"), "varlen"), (),
          ("packed", "padded", "packed-pages")),
    Fault("packed: keys shifted", asked(lambda a: shifted(a, "k"), "varlen"), (),
          ("packed", "padded")),
    Fault("padded: a key too many", argument("seqused_k", lambda t: t + 1), (), ("padded",)),
    Fault("padded: a key too few", argument("seqused_k", lambda t: t - 1), (), ("padded",)),
    # A window hides the beginning of long sequences.
    Fault("padded: its beginning dropped", argument("leftpad_k", nothing),
          ("full", "causal"), ("padded",)),
    Fault("padded: its beginning shifted", argument("leftpad_k", lambda t: t + 1),
          ("full", "causal"), ("padded",)),
    Fault("padded: lengths dropped", argument("seqused_k", nothing), (), ("padded",)),
    Fault("pages: shifted", argument("block_table", lambda t: t.roll(1, 1)), (), IN_PAGES),
    Fault("pages: of the next sequence", argument("block_table", lambda t: t.roll(1, 0)), (),
          IN_PAGES),
    Fault("pages: in the order of storage", argument("block_table", lambda t: t.sort(1)[0]), (),
          IN_PAGES),
    Fault("cache: a key too many", argument("cache_seqlens", lambda t: t + 1), (), IN_CACHE),
    Fault("cache: a key too few", argument("cache_seqlens", lambda t: t - 1), (), IN_CACHE),
    Fault("cache: lengths dropped", argument("cache_seqlens", nothing), (),
          ("cache", "cache-places")),
    Fault("cache: padding dropped", argument("cache_leftpad", nothing),
          ("full", "causal"), ("cache-places",)),
    Fault("cache: padding shifted", argument("cache_leftpad", lambda t: t + 1), ("full", "causal"),
          ("cache-places",)),
    Fault("cache: places dropped", argument("cache_batch_idx", nothing), (), ("cache-places",)),
    Fault("cache: places negated", argument("cache_batch_idx", lambda t: t.flip(0)), (),
          ("cache-places",)),
    *(Fault(f"descale: {name}", argument(f"{of}_descale", change), (), ("pages-fp8",))
      for of in "kv"
      for name, change in ((f"of {of} dropped", nothing),
                           (f"of the next head of {of}", lambda t: t.roll(1)))),
    *(Fault(f"latent: rotary columns {name}", rotary_columns(change), (),
            ("latent", "latent-pages"), configs=((LATENT[0], "bf16"),))
      for name, change in (("dropped", torch.zeros_like), ("doubled", lambda q: 2 * q),
                           ("negated", torch.neg), ("shifted", lambda q: q.roll(1, -1)))),
    Fault("latent: values shifted",
          returned(lambda found, a, f: (found[0].roll(1, -1), *found[1:]), "kvcache"), (),
          ("latent", "latent-pages"), configs=((LATENT[0], "bf16"),)),
    # appending
    Fault("append: not written", cache(forgetful), (), APPEND, ("k_new", "v_new")),
    Fault("append: doubled", cache(lambda a: {n: 2 * a[n] for n in "kv"}), (), APPEND),
    Fault("append: keys negated", argument("k", torch.neg, "kvcache"), (), APPEND),
    Fault("append: values negated", argument("v", torch.neg, "kvcache"), (), APPEND),
    Fault("append: in the wrong order", cache(lambda a: {n: a[n].flip(1) for n in "kv"}), (),
          APPEND),
    Fault("append: a place too late", argument("cache_seqlens", lambda t: t + 1), (), APPEND),
    Fault("rotary: dropped",
          cache(lambda a: {"rotary_cos": torch.ones_like(a["rotary_cos"]),
                           "rotary_sin": torch.zeros_like(a["rotary_sin"])}), (), ROTARY),
    Fault("rotary: doubled",
          cache(lambda a: {"rotary_cos": a["rotary_cos"] ** 2 - a["rotary_sin"] ** 2,
                           "rotary_sin": 2 * a["rotary_cos"] * a["rotary_sin"]}), (), ROTARY),
    Fault("rotary: negated", argument("rotary_sin", torch.neg), (), ROTARY),
    Fault("rotary: shifted",
          cache(lambda a: {n: a[n].roll(-1, 0) for n in ("rotary_cos", "rotary_sin")}), (),
          ROTARY),
    Fault("rotary: the other pairs",
          argument("rotary_interleaved", lambda flag: not flag), (), ROTARY),
    *(Fault(f"residual: {name}", residual(factor), ("residual",))
      for name, factor in (("dropped", 0.0), ("doubled", 2.0), ("negated", -1.0))),
)  # fmt: skip
