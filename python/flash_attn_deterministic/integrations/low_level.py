"""Forward and backward without autograd, for frameworks that keep the forward's results themselves.

The order of additions is that of the mode, and that of a backward of the mode when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..checks.ops import validate
from ..errors import ArgumentError, UnsupportedError
from ..interface.call import completed, resolve_options, with_ints
from ..ops.autograd import alert_atomics, run
from ..schemas import argument_names, backward_call, forward_call
from ..types import Call, Gradients, Lengths, Options

# dropout_p, softmax_scale, causal, window_size and softcap, as of `flash_attn_func`; a side of the
# window may be None, for no limit.
Numbers = tuple[float, float | None, bool, Sequence[int | None], float]
# out, contiguous; softmax_lse; and seed and offset of the dropout mask, (2,), int64, or None.
Forward = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    numbers: Numbers,
    lengths: Lengths | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> Forward:
    """Runs a forward op; arguments as of `flash_attn_func` or, with lengths, the packed one.

    A head_dim is a multiple of 8. A mode with keep_residual raises UnsupportedError.
    """
    lengths, options = _resolved(q, numbers, lengths, False)
    if options.keep_residual:
        raise UnsupportedError(
            "keep_residual: expected False where a framework keeps the results of the forward, "
            "got True: its backward has no argument for the residual; call flash_attn_func, or "
            "make the call inside deterministic_mode(keep_residual=False)"
        )
    call = forward_call((q, k, v), lengths, options, alibi_slopes)
    _check_head_dim(call)
    if options.dropout_p > 0:
        call = completed(call, pads=False)
    op, arguments = call
    out, softmax_lse = run(call)
    return out, softmax_lse, arguments[argument_names(op).index("rng_state")]


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    result: Forward,
    numbers: Numbers,
    lengths: Lengths | None = None,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    dlse: torch.Tensor | None = None,
) -> Gradients:
    """Runs a backward op; arguments as of `forward`, without seqused_k, leftpad_k and block_table.

    dout and dlse (None: 0) are the gradients of result, which `forward` returned. With
    `deterministic`, the bits of the gradients depend on their own inputs only, also where the mode
    is not enabled. Returns dq, dk and dv: like q, k and v, contiguous.
    """
    lengths, options = _resolved(q, numbers, lengths, deterministic)
    if isinstance(dout, torch.Tensor) and dout.dim() and dout.stride(-1) != 1:
        dout = dout.contiguous()
    out, softmax_lse, rng_state = result
    random = alibi_slopes, rng_state if options.dropout_p > 0 else None
    results = out, softmax_lse
    call = backward_call(dout, (q, k, v), *results, lengths, options, *random, dlse=dlse)
    _check_head_dim(call)
    if not options.deterministic_bwd:
        alert_atomics(q.device)
    gradients: Gradients = run(call)
    return gradients


def starts_of(lengths: torch.Tensor) -> torch.Tensor:
    """Returns (n + 1,), int32: the sum of all lengths before each, and their total."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _resolved(
    q: torch.Tensor, numbers: Numbers, lengths: Lengths | None, deterministic: bool
) -> tuple[Lengths | None, Options]:
    """Returns the lengths with Python ints, and the numbers of a call."""
    dropout_p, scale, causal, window, softcap = numbers
    sides = tuple(-1 if side is None else side for side in window)
    given = dropout_p, scale, causal, sides, softcap, None, deterministic
    _, options = resolve_options(q, *given)
    return None if lengths is None else with_ints(lengths, same=False), options


def _check_head_dim(call: Call) -> None:
    """Refuses a head_dim that is no multiple of 8: results would have the padded one."""
    op, arguments = call
    given = dict(zip(argument_names(op), arguments, strict=False))
    for name in "qv":
        head_dim = getattr(given[name], "shape", (0,))[-1]
        if head_dim % 8:
            validate(op, arguments)
            raise ArgumentError(
                f"{name}: expected a head_dim that is a multiple of 8, got {head_dim}; pad q, k "
                "and v with zeros, or call flash_attn_func, which does"
            )
