"""What all functions do with their arguments before they call an op."""

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
from .._ops.eager import is_followed
from .._ops.schemas import WITH_RESIDUAL, parts_of
from ..mode.current import Mode, get_deterministic_mode, resolve

# Defines the ops.
from .._ops import library as library  # isort: skip

WithProbs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WithLse = tuple[torch.Tensor, torch.Tensor]
# q, k and v; None and qkv, or q and kv.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor] | tuple[torch.Tensor | None, torch.Tensor]
Arguments = ParamSpec("Arguments")
_PYTHONS_OWN = frozenset((bool, int, float, str, type(None)))


class Attention(Protocol[Arguments]):
    """The type of a function that returns more than out where a flag says so.

    Its own signature has Literal[False] for that flag: what it returns then is known.
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
    """Returns the function as it is; the type is for type checkers."""
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
    """Checks the numbers and flags of a call, and fills in what the caller left open.

    Raises:
        ArgumentError: a wrong value.
        ArgumentTypeError: a wrong type.
        MissingInstanceError: deterministic is True, and the wheel holds no such kernels.
    """
    plain = head_dim, dropout_p, softmax_scale, causal, softcap, split_size, deterministic
    if type(window_size) is tuple and len(window_size) == 2 and not torch.compiler.is_compiling():
        arguments = *window_size, *plain
        if _PYTHONS_OWN.issuperset(map(type, arguments)):
            return _known_options(get_deterministic_mode(), *arguments)
    return _find_options(get_deterministic_mode(), window_size, *plain)


# typed: True, 1 and 1.0 are equal, and one of them may be refused where another is not.
@functools.lru_cache(maxsize=256, typed=True)
def _known_options(mode: Mode, left: Any, right: Any, *plain: Any) -> Options:
    """Returns options of what is equal only where its value is the same: no tensor, no array."""
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
    inputs: Inputs,
    alibi_slopes: torch.Tensor | None,
    options: Options,
    return_attn_probs: Any,
    lengths: Lengths | None = None,
    check: Callable[[], object] | None = None,
) -> torch.Tensor | WithProbs:
    """Runs a dense or a packed call.

    Args:
        inputs: what gets gradients: q, k and v; None and qkv; or q and kv. Checked, unless there is
            a check; lengths too.
        alibi_slopes: as the caller gave it; return_attn_probs too.
        options: of the call; checked.
        return_attn_probs: see alibi_slopes.
        lengths: of packed sequences; None: dense.
        check: what raises where inputs or lengths are wrong; only for a call of which `op_checks`
            is true.

    Returns:
        What `flash_attn_func` or `flash_attn_varlen_func` returns.

    Raises:
        As `flash_attn_func`.
    """
    with_probs = numbers.check_flag("return_attn_probs", return_attn_probs)
    q: torch.Tensor = inputs[1] if inputs[0] is None else inputs[0]
    packed = len(inputs) == 2
    head_dim = q.shape[-1]

    def check_rest() -> None:
        if check is not None:
            check()
        batch = q.shape[0] if lengths is None else lengths.cu_seqlens_q.shape[0] - 1
        tensors.check_alibi(alibi_slopes, batch, q.shape[-2], q.device)
        kernels.check_kernels(q.device, q.dtype, head_dim)
        kernels.check_combination(q.device, options.scores.softcap, options.dropout_p)

    # A seed is drawn for a call alone that has been found right.
    explains = check is not None and options.dropout_p == 0
    if not explains:
        check_rest()
    slopes = slopes_for_op(alibi_slopes)
    rng_state = draw_rng_state(options.dropout_p, q.device) if options.dropout_p else None
    qkv: tuple[torch.Tensor | None, ...] = inputs
    if head_dim % 8:
        qkv = tuple(map(padded, qkv))
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
    if explains:
        out, softmax_lse, *_ = run_explained(name, arguments, check_rest)
    else:
        out, softmax_lse, *_ = run(name, arguments, is_followed(*qkv))
    if head_dim % 8:
        out = out[..., :head_dim]
    if not with_probs:
        return out  # type: ignore[no-any-return]
    if rng_state is None:
        return out, softmax_lse, out.new_empty(0)
    # Imported here, as the reference is wherever it is used, to keep the package's import short.
    from ..reference._probs import signed_probs

    q, k, _ = parts_of(*inputs) if len(inputs) == 2 else inputs
    return out, softmax_lse, signed_probs(q, k, softmax_lse, lengths, slopes, rng_state, options)


def has_backward(inputs: Sequence[torch.Tensor | None], lengths: Lengths | None) -> bool:
    """Returns whether a backward can follow a call.

    Args:
        inputs: what gets gradients.
        lengths: of packed sequences; None: a dense call.
    """
    wanted = any(tensor is not None and tensor.requires_grad for tensor in inputs)
    plain = lengths is None or not without_backward(*lengths[4:])
    return wanted and plain and torch.is_grad_enabled()


def op_checks(rank: int, q: Any, *others: Any) -> bool:
    """Returns whether the op checks the tensors of a call, which is then explained if it refuses.

    The CUDA ops check all that their kernels need, before they launch anything. What is followed
    may not run them: fake tensors, for instance.

    Args:
        rank: dimensions that q has to have.
        q: the argument.
        others: other tensors of the call that torch.compile, modes or subclasses may follow.
    """
    if not isinstance(q, torch.Tensor) or is_followed(q, *others) or not q.is_cuda or q.is_nested:
        return False
    shape = q.shape
    # What is padded first the op sees otherwise.
    return len(shape) == rank and shape[-1] > 0 and shape[-1] % 8 == 0


def run_explained(name: str, arguments: tuple[Any, ...], check: Callable[[], object]) -> Any:
    """Runs an op that checks its arguments; where it refuses them, a check says why at length.

    Args:
        name: of the op.
        arguments: of the op.
        check: raises what the caller is to read; where it finds nothing wrong, the op's own error
            is raised.
    """
    try:
        return run(name, arguments, followed=False)
    except Exception as error:
        problem = error
    try:
        check()
        raise problem
    finally:
        del problem  # its traceback holds this frame, and with it the tensors


def draw_rng_state(dropout_p: float, device: torch.device) -> torch.Tensor | None:
    """Draws seed and offset of a call's dropout mask from torch's generator of the device.

    They stay on the device: a replayed CUDA graph draws new ones, and nothing waits for them.

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
    """Returns ALiBi slopes as the ops take them; nothing of the call is differentiable in them."""
    if alibi_slopes is None or not isinstance(alibi_slopes, torch.Tensor):
        return alibi_slopes
    return alibi_slopes.detach().contiguous()


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Copies a small tensor of lengths or indices unless it is contiguous."""
    if tensor is None or not isinstance(tensor, torch.Tensor):
        return tensor
    return tensor.contiguous()
