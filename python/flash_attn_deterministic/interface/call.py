"""The steps that all functions share: options, the layout of the op's arguments, its call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, Protocol, cast, overload

import torch

from ..checks import numbers
from ..checks.ops import validate
from ..checks.tensors import FP8, check_tensor
from ..errors import ArgumentError, UnsupportedError
from ..mode import Mode, mode_of_call, resolve, resolve_deterministic
from ..ops.autograd import run
from ..private import C
from ..schemas import WITHOUT_BACKWARD, argument_names, forward_call, parts_of
from ..types import Call, Inputs, Lengths, Options
from .descale import Descale, scaled, with_scaled_query

# Defines the ops.
from ..ops import library as library  # isort: skip

WithProbs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WithMax = tuple[torch.Tensor, torch.Tensor]
WithProbsAndMax = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
WithLse = tuple[torch.Tensor, torch.Tensor]
Arguments = ParamSpec("Arguments")
_PYTHON_TYPES = frozenset((bool, int, float, str, type(None)))


class Attention(Protocol[Arguments]):
    """The type of a function that returns more than out if a flag is True."""

    __name__: str

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self,
        *args: Any,
        return_attn_probs: Literal[True],
        return_max_logits: Literal[True],
        **kwargs: Any,
    ) -> WithProbsAndMax: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_attn_probs: Literal[True], **kwargs: Any
    ) -> WithProbs: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_max_logits: Literal[True], **kwargs: Any
    ) -> WithMax: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_softmax_lse: Literal[True], **kwargs: Any
    ) -> WithLse: ...

    @overload
    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> torch.Tensor: ...


def typed(function: Callable[Arguments, Any]) -> Attention[Arguments]:
    """Returns the function itself, with the type above for type checkers."""
    return cast(Attention[Arguments], function)


def attend(
    inputs: Inputs,
    lengths: Lengths | None,
    given: tuple[Any, ...],
    alibi_slopes: torch.Tensor | None,
    return_attn_probs: Any,
    learnable_sink: torch.Tensor | None = None,
    return_max_logits: Any = False,
    descales: tuple[Descale, Descale] = (None, None),
    dropout_seeds: torch.Tensor | None = None,
) -> Any:
    """Runs a dense or a packed call. All arguments are as the caller gave them, unchecked.

    `given` are those of `resolve_options` after q.
    """
    if return_attn_probs is not False:
        return_attn_probs = numbers.as_flag("return_attn_probs", return_attn_probs)
    if return_max_logits is not False:
        return_max_logits = numbers.as_flag("return_max_logits", return_max_logits)
    seeds = None if dropout_seeds is None else as_rng_state(dropout_seeds)
    inputs, lengths, head_dim, options, call = prepare(
        inputs, lengths, given, alibi_slopes, learnable_sink, return_max_logits, seeds
    )
    k_descale, v_descale = descales
    if k_descale is not None or v_descale is not None:
        call = with_scaled_query(call, k_descale, v_descale)
    try:
        head_dim_v = inputs[-1].shape[-1]
    except (AttributeError, IndexError, RuntimeError):
        head_dim_v = 8  # the op refuses it
    pads = bool(head_dim % 8 or head_dim_v % 8)
    if pads or options.dropout_p or seeds is not None:
        call = completed(call, pads)
    results = run(call)
    out: torch.Tensor = results[0]
    if head_dim_v % 8:
        out = out[..., :head_dim_v]
    if v_descale is not None:
        out = scaled(out, v_descale, call)
    more = (max_logits(results[2], lengths),) if return_max_logits else ()
    if not return_attn_probs:
        return (out, *more) if more else out
    softmax_lse = results[1]
    if not options.dropout_p:
        return out, softmax_lse, out.new_empty(0), *more
    # Imported here, to keep the import of the package short.
    from ..reference.probs import signed_probs

    drawn = dict(zip(argument_names(call[0]), call[1], strict=False))
    q, k, _ = parts_of(*inputs) if len(inputs) == 2 else inputs
    random = drawn["alibi_slopes"], drawn["rng_state"]
    return out, softmax_lse, signed_probs(q, k, softmax_lse, lengths, *random, options), *more


def max_logits(row_max: torch.Tensor, lengths: Lengths | None) -> torch.Tensor:
    """Returns the largest score of each head, (nheads,); of no row -inf."""
    if row_max.numel():
        return row_max.amax((0, 2) if lengths is None else 1)
    return row_max.new_full(row_max.shape[-2:-1], -math.inf)


def prepare(
    inputs: Inputs,
    lengths: Lengths | None,
    given: tuple[Any, ...],
    alibi_slopes: torch.Tensor | None,
    learnable_sink: torch.Tensor | None = None,
    with_max: bool = False,
    rng_state: torch.Tensor | None = None,
) -> tuple[Inputs, Lengths | None, int, Options, Call]:
    """Finds the op of a call and lays out its arguments; see `attend`.

    Returns:
        inputs, lengths, head_dim, options, and the call. Nothing was copied or drawn, and only
        numbers were checked.
    """
    if C._is_any_autocast_enabled():
        inputs = autocast(inputs)
    head_dim, options = resolve_options(inputs[1] if inputs[0] is None else inputs[0], *given)
    sink = None if learnable_sink is None else as_sink(learnable_sink)
    if lengths is not None:
        if not (type(lengths[2]) is int is type(lengths[3])):
            lengths = with_ints(lengths, inputs[0] is None)
        if torch.compiler.is_compiling():
            _check_no_gradient((*inputs, sink), lengths)
    residual = options.keep_residual and has_backward((*inputs, sink), lengths)
    random = alibi_slopes, rng_state
    call = forward_call(inputs, lengths, options, *random, residual, sink, with_max)
    return inputs, lengths, head_dim, options, call


def as_sink(learnable_sink: Any) -> Any:
    """Returns sinks in float32, as the op takes them; what it refuses, as it is."""
    if isinstance(learnable_sink, torch.Tensor) and learnable_sink.layout is torch.strided:
        if learnable_sink.dtype in (torch.float16, torch.bfloat16):
            learnable_sink = learnable_sink.float()
        return learnable_sink.contiguous()
    return learnable_sink


def as_rng_state(dropout_seeds: Any) -> torch.Tensor:
    """Returns seeds as the op takes them, a row for each sequence; no vector raises."""
    check_tensor("dropout_seeds", dropout_seeds, "a torch.Tensor or None")
    if dropout_seeds.dim() != 1:
        raise ArgumentError(
            f"dropout_seeds: expected shape (batch,), got {tuple(dropout_seeds.shape)}"
        )
    rng_state: torch.Tensor = dropout_seeds.detach().contiguous()[:, None]
    return rng_state


def completed(call: Call, pads: bool) -> Call:
    """Returns a call with padded tensors, and with a seed of its dropout; a wrong one raises."""
    op, arguments = call
    validate(op, arguments)  # before a seed is drawn, and with the caller's shapes
    changed = dict(zip(argument_names(op), arguments, strict=False))
    if changed.get("dropout_p"):
        first = changed["qkv" if "qkv" in changed else "q"]
        if hasattr(first, "device_mesh"):
            raise UnsupportedError(
                f"dropout_p: expected 0.0 with DTensors, got {changed['dropout_p']}: a mask "
                "depends on the indices of sequences and heads, which are those of one rank"
            )
        if changed["rng_state"] is None:
            changed["rng_state"] = draw_rng_state(first.device)
    elif "rng_state" in changed:  # seeds that have been checked, and drop nothing
        changed["rng_state"] = None
    if pads:
        for name in ("q", "k", "v", "qkv", "k_cache", "v_cache"):
            if changed.get(name) is not None:
                changed[name] = padded(changed[name])
    return op, tuple(changed.values())


def autocast(inputs: Inputs) -> Inputs:
    """Casts tensors as autocast does for scaled_dot_product_attention, if one is float32.

    Pages in 8 bits stay what they are: scales are for them, and a cast would copy all of them.
    """
    tensors = [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)]
    kind = tensors[0].device.type if tensors else "meta"
    enabled = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    if not enabled or all(tensor.dtype != torch.float32 for tensor in tensors):
        return inputs
    dtype = torch.get_autocast_dtype(kind)
    return tuple(  # type: ignore[return-value]
        x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype not in (torch.float64, FP8) else x
        for x in inputs
    )


def resolve_options(
    q: Any,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    split_size: Any,
    deterministic: Any = None,
) -> tuple[int, Options]:
    """Returns head_dim, and the numbers and flags of a call, checked, with defaults filled in."""
    try:
        head_dim = q.shape[-1] or 8
    except (AttributeError, IndexError, RuntimeError):
        head_dim = 8  # no tensor, of no dimension, or nested: the op refuses it
    compiling = torch.compiler.is_compiling()
    mode = mode_of_call(compiling)
    plain = head_dim, dropout_p, softmax_scale, causal, softcap, split_size, deterministic
    if not compiling and type(window_size) is tuple:
        only_deterministic = torch.are_deterministic_algorithms_enabled()
        try:
            return head_dim, _known_options(mode, only_deterministic, *plain, *window_size)
        except TypeError:
            pass  # an argument that can't be the key of a cache, or a wrong one
    return head_dim, _find_options(mode, window_size, *plain)


# typed: True == 1 == 1.0, but not each of them is a valid value of each argument.
@functools.lru_cache(maxsize=256, typed=True)
def _known_options(mode: Mode, only_deterministic: bool, *arguments: Any) -> Options:
    """Calls `_find_options` with Python numbers and strings; a TypeError for other arguments."""
    if not _PYTHON_TYPES.issuperset(map(type, arguments)):
        raise TypeError
    return _find_options(mode, arguments[7:], *arguments[:7])


def _find_options(
    mode: Mode,
    window_size: Any,
    head_dim: int,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    softcap: Any,
    split_size: Any,
    deterministic: Any,
) -> Options:
    dropout_p = numbers.as_dropout(dropout_p)
    scores = numbers.as_scores(head_dim, softmax_scale, causal, window_size, softcap)
    mode = resolve(mode, None if split_size is None else numbers.as_split_size(split_size))
    backward = resolve_deterministic(deterministic, mode)
    tree = mode.split_size, mode.enabled, backward
    return Options(dropout_p, *scores, *tree, mode.keep_residual)


def with_ints(lengths: Lengths, same: bool) -> Lengths:
    """Returns lengths with Python ints; `same`: queries and keys have them in common."""
    names = ("max_seqlen", "max_seqlen") if same else ("max_seqlen_q", "max_seqlen_k")
    q, k = (numbers.as_int(n, tokens) for n, tokens in zip(names, lengths[2:4], strict=True))
    return lengths._replace(max_seqlen_q=q, max_seqlen_k=k)


def _check_no_gradient(inputs: tuple[Any, ...], lengths: Lengths) -> None:
    """Refuses to compile a call without a backward whose inputs require a gradient.

    torch.compile traces the backward together with the call. Otherwise the backward raises, and the
    forward alone works.
    """
    name = without_backward(lengths)
    if name and has_backward(inputs, None):
        raise UnsupportedError(
            f"{name}: there is no backward with it, and q, k or v requires a gradient; call it "
            f"under torch.no_grad(), or pass packed sequences without {name}"
        )


def without_backward(lengths: Lengths) -> str:
    """Returns the name of a given argument that has no backward; "" if there is none."""
    for name in WITHOUT_BACKWARD:
        if getattr(lengths, name) is not None:
            return name
    return ""


def has_backward(inputs: tuple[Any, ...], lengths: Lengths | None) -> bool:
    """Returns whether a backward can follow a call."""
    wanted = any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
    recorded = wanted and torch.is_grad_enabled()
    return recorded and (lengths is None or not without_backward(lengths))


def draw_rng_state(device: torch.device) -> torch.Tensor:
    """Draws seed and offset of a call's dropout mask from torch's generator of the device.

    They stay on the device: the host does not wait, and a replayed CUDA graph draws new ones.
    """
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def padded(tensor: torch.Tensor, head_dim: int = 8) -> torch.Tensor:
    """Pads with zeros to a multiple of 8 that is at least head_dim."""
    columns = tensor.shape[-1]
    padding = -(-max(columns, head_dim) // 8) * 8 - columns
    return torch.nn.functional.pad(tensor, (0, padding)) if padding else tensor
