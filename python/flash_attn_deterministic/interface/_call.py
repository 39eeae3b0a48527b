"""The steps that all functions share: options, padding, the call of the op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, Protocol, cast, overload

import torch

from .._checks import kernels, numbers, tensors
from .._checks.determinism import resolve_deterministic
from .._checks.split import check_split_size
from .._checks.varlen import without_backward
from .._ops.arguments import Lengths, Options
from .._ops.autograd import run
from .._ops.dispatch import needs_dispatcher
from .._ops.schemas import WITH_RESIDUAL, parts_of
from ..mode.current import Mode, get_deterministic_mode, resolve

# Defines the ops.
from .._ops import library as library  # isort: skip

WithProbs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WithLse = tuple[torch.Tensor, torch.Tensor]
# (q, k, v), (None, qkv) or (q, kv).
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor] | tuple[torch.Tensor | None, torch.Tensor]
# Raises if inputs or lengths are wrong; returns the lengths, with Python ints.
Check = Callable[[Any, Any], Lengths | None]
Arguments = ParamSpec("Arguments")
_PYTHON_TYPES = frozenset((bool, int, float, str, type(None)))


class Attention(Protocol[Arguments]):
    """The type of a function that returns more than out if a flag is True.

    The function's own signature has Literal[False] for that flag, and so returns out alone.
    """

    __name__: str

    @overload
    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> torch.Tensor: ...

    @overload
    def __call__(
        self, *args: Any, return_attn_probs: Literal[True], **kwargs: Any
    ) -> WithProbs: ...

    @overload
    def __call__(self, *args: Any, return_softmax_lse: Literal[True], **kwargs: Any) -> WithLse: ...


def typed(function: Callable[Arguments, Any]) -> Attention[Arguments]:
    """Returns the function itself, with the type above for type checkers."""
    return cast(Attention[Arguments], function)


def resolve_options(
    head_dim: int,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    split_size: Any,
    deterministic: Any = None,
) -> Options:
    """Checks the numbers and flags of a call, and fills in defaults.

    Raises:
        ArgumentError: a wrong value.
        ArgumentTypeError: a wrong type.
        MissingInstanceError: deterministic is True, and the wheel holds no deterministic kernels.
    """
    mode = get_deterministic_mode()
    plain = head_dim, dropout_p, softmax_scale, causal, softcap, split_size, deterministic
    if type(window_size) is tuple and len(window_size) == 2 and not torch.compiler.is_compiling():
        arguments = plain + window_size
        if _PYTHON_TYPES.issuperset(map(type, arguments)):
            return _known_options(mode, *arguments)
    return _find_options(mode, window_size, *plain)


# typed: True == 1 == 1.0, but not each of them is a valid value of each argument.
@functools.lru_cache(maxsize=256, typed=True)
def _known_options(mode: Mode, *arguments: Any) -> Options:
    """Calls `_find_options` with Python numbers and strings, which can be keys of a cache."""
    *plain, left, right = arguments
    return _find_options(mode, (left, right), *plain)


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
    dropout_p = numbers.check_dropout(dropout_p)
    scores = numbers.check_scores(head_dim, softmax_scale, causal, window_size, softcap)
    mode = resolve(mode, check_split_size(split_size, head_dim))
    backward = resolve_deterministic(deterministic, mode)
    return Options(dropout_p, scores, mode.split_size, mode.enabled, backward, mode.keep_residual)


def attend(
    rank: int,
    inputs: Inputs,
    lengths: Lengths | None,
    check: Check,
    options_given: tuple[Any, ...],
    alibi_slopes: torch.Tensor | None,
    return_attn_probs: Any,
) -> torch.Tensor | WithProbs:
    """Runs a dense or a packed call. All arguments are as the caller gave them, unchecked.

    Args:
        rank: expected dimensions of the first tensor.
        inputs: the tensors that get gradients.
        lengths: of packed sequences; None: dense.
        check: of inputs and lengths.
        options_given: the arguments of `resolve_options` after head_dim.
        alibi_slopes: as of `flash_attn_func`.
        return_attn_probs: see alibi_slopes.

    Returns:
        What `flash_attn_func` or `flash_attn_varlen_func` returns.

    Raises:
        As `flash_attn_func`.
    """
    q: torch.Tensor = inputs[1] if inputs[0] is None else inputs[0]
    checked = not (op_checks(rank, q, *inputs) and (lengths is None or has_ints(lengths)))
    if checked:
        lengths = check(inputs, lengths)
    head_dim = q.shape[-1]
    options = resolve_options(head_dim, *options_given)
    with_probs = numbers.check_flag("return_attn_probs", return_attn_probs)
    if options.dropout_p and not checked:  # a wrong call draws no seed
        check(inputs, lengths)
        checked = True
    if checked:
        _check_rest(q, lengths, alibi_slopes, options)

    slopes = slopes_for_op(alibi_slopes)
    rng_state = draw_rng_state(options.dropout_p, q.device) if options.dropout_p else None
    qkv: tuple[torch.Tensor | None, ...] = inputs
    if head_dim % 8:
        qkv = tuple(map(padded, qkv))
    packed = len(inputs) == 2
    dropout_p, scores, *tree, keep_residual = options
    suffix = WITH_RESIDUAL if keep_residual and has_backward(qkv, lengths) else ""
    if lengths is None:
        name = ("qkvpacked_fwd" if packed else "fwd") + suffix
        arguments = *qkv, slopes, rng_state, dropout_p, *scores, *tree
    else:
        name = ("varlen_qkvpacked_fwd" if packed else "varlen_fwd") + suffix
        cu_seqlens_q, cu_seqlens_k, *longest, seqused_k, leftpad_k, block_table = lengths
        others = () if packed else (seqused_k, leftpad_k, block_table)
        indices = map(contiguous, (cu_seqlens_q, cu_seqlens_k, *others))
        arguments = *qkv, *indices, slopes, rng_state, *longest, dropout_p, *scores, *tree
    if checked:
        out, softmax_lse, *_ = run(name, arguments, needs_dispatcher(*qkv))
    else:
        unchecked = check, inputs, lengths, alibi_slopes, options
        out, softmax_lse, *_ = run_then_check(name, arguments, _check_all, unchecked)
    if head_dim % 8:
        out = out[..., :head_dim]
    if not with_probs:
        return out  # type: ignore[no-any-return]
    if rng_state is None:
        return out, softmax_lse, out.new_empty(0)
    # Imported here, to keep the import of the package short.
    from ..reference._probs import signed_probs

    q, k, _ = parts_of(*inputs) if len(inputs) == 2 else inputs
    return out, softmax_lse, signed_probs(q, k, softmax_lse, lengths, slopes, rng_state, options)


def _check_all(
    check: Check,
    inputs: Inputs,
    lengths: Lengths | None,
    alibi_slopes: torch.Tensor | None,
    options: Options,
) -> None:
    lengths = check(inputs, lengths)
    q: torch.Tensor = inputs[1] if inputs[0] is None else inputs[0]
    _check_rest(q, lengths, alibi_slopes, options)


def _check_rest(
    q: torch.Tensor,
    lengths: Lengths | None,
    alibi_slopes: torch.Tensor | None,
    options: Options,
) -> None:
    batch = q.shape[0] if lengths is None else lengths.cu_seqlens_q.shape[0] - 1
    tensors.check_alibi(alibi_slopes, batch, q.shape[-2], q.device)
    kernels.check_kernels(q.device, q.dtype, q.shape[-1])
    kernels.check_combination(q.device, options.scores.softcap, options.dropout_p)


def has_backward(inputs: Sequence[torch.Tensor | None], lengths: Lengths | None) -> bool:
    """Returns whether a backward can follow a call.

    Args:
        inputs: the tensors that get gradients.
        lengths: of packed sequences; None: a dense call.
    """
    wanted = any(tensor is not None and tensor.requires_grad for tensor in inputs)
    plain = lengths is None or not without_backward(*lengths[4:])
    return wanted and plain and torch.is_grad_enabled()


def op_checks(rank: int, q: Any, *others: Any) -> bool:
    """Returns whether the checks of a call can be left to the op; see `run_then_check`.

    The CUDA ops check all that their kernels need before they launch anything. Calls that need the
    dispatcher may run something else, for instance with fake tensors.

    Args:
        rank: expected dimensions of q.
        q: the argument.
        others: other tensors of the call.
    """
    if q is None or needs_dispatcher(q, *others) or not q.is_cuda or q.is_nested:
        return False
    shape = q.shape
    # Other head dims are padded first: the op would check the copies.
    return len(shape) == rank and shape[-1] > 0 and shape[-1] % 8 == 0


def has_ints(lengths: Lengths) -> bool:
    """Returns whether the lengths of the longest sequences are ints; the op checks their range."""
    return type(lengths.max_seqlen_q) is int and type(lengths.max_seqlen_k) is int


def run_then_check(
    name: str,
    arguments: tuple[Any, ...],
    check: Callable[..., object],
    unchecked: tuple[Any, ...],
) -> Any:
    """Runs an op that checks its arguments, and explains a refusal with our own checks.

    A valid call skips our checks, which take the host longer than the op's.

    Args:
        name: of the op.
        arguments: of the op.
        check: raises the error for the caller; if it finds nothing wrong, the op's own error is
            raised.
        unchecked: the arguments of check.
    """
    try:
        return run(name, arguments, through_dispatcher=False)
    except Exception as error:
        problem = error
    try:
        check(*unchecked)
        raise problem
    finally:
        del problem  # its traceback refers to this frame, and so to the tensors


def draw_rng_state(dropout_p: float, device: torch.device) -> torch.Tensor | None:
    """Draws seed and offset of a call's dropout mask from torch's generator of the device.

    They stay on the device: the host does not wait, and a replayed CUDA graph draws new ones.

    Returns:
        (2,), int64; None without dropout.
    """
    if dropout_p == 0:
        return None
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


@overload
def padded(tensor: torch.Tensor) -> torch.Tensor: ...


@overload
def padded(tensor: torch.Tensor | None) -> torch.Tensor | None: ...


def padded(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Pads head_dim to a multiple of 8 with zeros."""
    if tensor is None:
        return None
    padding = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, padding)) if padding else tensor


def slopes_for_op(alibi_slopes: torch.Tensor | None) -> torch.Tensor | None:
    """Returns ALiBi slopes as the ops take them: contiguous, without gradient."""
    if not isinstance(alibi_slopes, torch.Tensor):
        return alibi_slopes
    return alibi_slopes.detach().contiguous()


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Copies a small tensor of lengths or indices unless it is contiguous."""
    if tensor is None or not isinstance(tensor, torch.Tensor):
        return tensor
    return tensor.contiguous()
