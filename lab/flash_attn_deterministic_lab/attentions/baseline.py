"""FlashAttention-2's own kernels (`nox -s baseline`) on torch tensors, with its own allocations."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UnavailableError
from .attention import OPTIONS, Function
from .interface import Differentiable

VERSION = 3  # of the library's interface (cpp/baseline/api.h)
_ROUNDING = 128  # upstream rounds sequence lengths up to it for scratch
Tensors = tuple[Tensor, Tensor, Tensor]


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("batch_stride", c_int64),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
    )


class _Problem(ctypes.Structure):
    """All that the library can do; packed sequences and what changes scores are not used here."""

    _fields_ = (
        ("device", c_int32),
        ("is_bf16", c_int32),
        ("is_causal", c_int32),
        ("batch", c_int32),
        ("seqlen_q", c_int32),
        ("seqlen_k", c_int32),
        ("nheads", c_int32),
        ("nheads_k", c_int32),
        ("head_dim", c_int32),
        ("softmax_scale", c_float),
        ("stream", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_k", c_void_p),
        ("total_q", c_int32),
        ("window_left", c_int32),
        ("window_right", c_int32),
        ("softcap", c_float),
        ("p_dropout", c_float),
        ("alibi_slopes", c_void_p),
        ("alibi_batch_stride", c_int64),
        ("rng_state", c_void_p),
    )


class BaselineError(RuntimeError):
    """The baseline library reported a failure."""


class Baseline:
    """The shared library that `nox -s baseline` leaves in build/baseline.

    Its calls take q (batch, seqlen_q, nheads, head_dim), k and v (batch, seqlen_k > 0, nheads_k,
    head_dim) in fp16 or bf16 on CUDA. softmax_lse is fp32, (batch, nheads, seqlen_q). Causal masks
    are aligned to the bottom right corner.

    Args:
        path: libfa2_baseline.so.

    Raises:
        OSError: it is not there, or does not load.
        BaselineError: it was built from other sources; of a call: it holds no such kernel, or CUDA
            failed.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path.resolve()))
        found = library.fa2_baseline_version() if hasattr(library, "fa2_baseline_version") else 1
        if found != VERSION:
            raise BaselineError(
                f"{path}: expected version {VERSION} of the interface, got {found}; run "
                "`nox -s baseline` again"
            )
        tensor, problem = POINTER(_Tensor), POINTER(_Problem)
        library.fa2_baseline_error.restype = c_char_p
        signatures: dict[str, tuple[Any, ...]] = {
            "holds": (c_int32,),
            "num_splits": (c_int32,),
            "forward": (*[tensor] * 4, c_void_p, c_int32, c_void_p, c_void_p),
            "backward": (
                *[tensor] * 5, c_void_p, *[tensor] * 3, c_void_p, c_void_p, c_int32, c_int64
            ),
        }  # fmt: skip
        for name, arguments in signatures.items():
            function = getattr(library, f"fa2_baseline_{name}")
            function.argtypes, function.restype = [problem, *arguments], c_int32
        self._library = library

    def holds(self, q: Tensor, k: Tensor, *, causal: bool = False, backward: bool = False) -> bool:
        """Returns whether this build of the library holds a kernel of the forward or backward."""
        problem = ctypes.byref(_problem(q, k, causal))
        return bool(self._library.fa2_baseline_holds(problem, int(backward)))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, num_splits: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Runs upstream's forward as its flash_attn_func does.

        Args:
            num_splits: 0: upstream's heuristic (what flash_attn_func uses); 1: its forward
                kernel; more: its split kernel and combine kernel.
        """
        batch, seqlen_q, nheads, head_dim = q.shape
        nheads_k = k.shape[2]
        # As upstream: one query row needs no mask, and its head group becomes the rows of a tile.
        causal = causal and seqlen_q > 1
        swapped = seqlen_q == 1 and nheads > nheads_k
        if swapped:
            q = q.reshape(batch, nheads_k, nheads // nheads_k, head_dim).transpose(1, 2)
        problem = _problem(q, k, causal)
        if num_splits == 0:
            sms = torch.cuda.get_device_properties(q.device).multi_processor_count
            num_splits = int(self._library.fa2_baseline_num_splits(ctypes.byref(problem), sms))
        lse = q.new_empty((batch, q.shape[2], q.shape[1]), dtype=torch.float32)
        out = torch.empty_like(q)
        lse_accum = out_accum = None
        if num_splits > 1:
            rows = (num_splits, *lse.shape)
            lse_accum = lse.new_empty(rows)
            out_accum = lse.new_empty((*rows, head_dim))
        # Upstream allocates a (seed, offset) pair and an empty P as well: bytes, not counted here.
        self._check(
            self._library.fa2_baseline_forward(
                ctypes.byref(problem),
                *(ctypes.byref(_tensor(t)) for t in (q, k, v, out)),
                lse.data_ptr(),
                num_splits,
                None if out_accum is None else out_accum.data_ptr(),
                None if lse_accum is None else lse_accum.data_ptr(),
            )
        )
        if swapped:
            out = out.transpose(1, 2).reshape(batch, 1, nheads, head_dim)
            lse = lse.reshape(batch, nheads, 1)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        *,
        causal: bool = False,
        deterministic: bool = False,
    ) -> Tensors:
        """Runs upstream's backward; `deterministic` is its mode: run to run, not over batches."""
        batch, seqlen_q, nheads, head_dim = q.shape
        nheads_k = k.shape[2]
        rounded = -(-seqlen_q // _ROUNDING) * _ROUNDING
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        softmax_d = q.new_empty((batch, nheads, rounded), dtype=torch.float32)
        dq_accum_shape = (batch, rounded, nheads, head_dim)
        split_stride = 0
        if deterministic:
            sms = torch.cuda.get_device_properties(q.device).multi_processor_count
            copies = -(-sms // (batch * nheads))
            dq_accum = q.new_zeros((copies, *dq_accum_shape), dtype=torch.float32)
            split_stride = dq_accum.stride(0)
        else:
            dq_accum = q.new_empty(dq_accum_shape, dtype=torch.float32)
        expanded = (*k.shape[:2], nheads, head_dim)
        dk_heads = dk if nheads == nheads_k else q.new_empty(expanded)
        dv_heads = dv if nheads == nheads_k else q.new_empty(expanded)
        self._check(
            self._library.fa2_baseline_backward(
                ctypes.byref(_problem(q, k, causal)),
                *(ctypes.byref(_tensor(t)) for t in (dout, q, k, v, out)),
                softmax_lse.data_ptr(),
                *(ctypes.byref(_tensor(t)) for t in (dq, dk_heads, dv_heads)),
                softmax_d.data_ptr(),
                dq_accum.data_ptr(),
                int(deterministic),
                split_stride,
            )
        )
        if nheads != nheads_k:
            groups = (*k.shape[:2], nheads_k, nheads // nheads_k, head_dim)
            torch.sum(dk_heads.reshape(groups), -2, out=dk)
            torch.sum(dv_heads.reshape(groups), -2, out=dv)
        return dq, dk, dv

    def _check(self, status: int) -> None:
        if status != 0:
            raise BaselineError(self._library.fa2_baseline_error().decode())


def _tensor(tensor: Tensor) -> _Tensor:
    return _Tensor(tensor.data_ptr(), *tensor.stride()[:3])


def _problem(q: Tensor, k: Tensor, causal: bool) -> _Problem:
    return _Problem(
        device=q.device.index,
        is_bf16=int(q.dtype == torch.bfloat16),
        is_causal=int(causal),
        batch=q.shape[0],
        seqlen_q=q.shape[1],
        seqlen_k=k.shape[1],
        nheads=q.shape[2],
        nheads_k=k.shape[2],
        head_dim=q.shape[3],
        softmax_scale=q.shape[3] ** -0.5,
        stream=torch.cuda.current_stream(q.device).cuda_stream,
        window_left=-1,
        window_right=-1,
    )


def load(path: str, deterministic: bool) -> Function:
    """Opens the library, and returns its attention; raises UnavailableError."""
    try:
        library = Baseline(Path(path))
    except (OSError, RuntimeError) as error:
        raise UnavailableError(f"{Path(path).name} cannot be loaded ({error})") from error

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, **options: Any) -> Tensor:
        if options:
            words = ", ".join(OPTIONS[name] for name in options)
            raise UnavailableError(f"the library's calls take no {words}")
        if not library.holds(q, k, causal=causal, backward=torch.is_grad_enabled()):
            raise UnavailableError("the library holds no such kernel")
        forward = partial(library.forward, causal=causal)
        backward = partial(library.backward, causal=causal, deterministic=deterministic)
        return Differentiable.apply(q, k, v, forward, backward)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]

    return attend
