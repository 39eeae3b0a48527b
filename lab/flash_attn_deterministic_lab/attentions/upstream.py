"""Upstream's own kernels (`nox -s baseline`) on torch tensors, with upstream's own allocations."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .attention import Packed

HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # that a full build of the library holds
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

VERSION = 3  # of the library's interface (cpp/baseline/api.h)
_ROUNDING = 128  # upstream rounds sequence lengths up to it for scratch


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("batch_stride", c_int64),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
    )


class _Problem(ctypes.Structure):
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


@dataclass(frozen=True)
class Scores:
    """What upstream does to scores besides a causal mask; a kernel of the library has one at most.

    Args:
        window: keys visible to the left and to the right of the diagonal; negative: all.
        softcap: 0: none.
        dropout_p: the probability to drop.
        alibi_slopes: (nheads,) or (batch, nheads), fp32, on CUDA.
        rng_state: (2,), int64, on CUDA: seed and offset of dropout.
    """

    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    dropout_p: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    rng_state: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Returns whether there is none of them."""
        numbers = (self.window, self.softcap, self.dropout_p)
        return numbers == ((-1, -1), 0.0, 0.0) and self.alibi_slopes is None

    def fields(self) -> dict[str, object]:
        """Returns them as fields of _Problem."""
        slopes, state = self.alibi_slopes, self.rng_state
        return {
            "window_left": self.window[0],
            "window_right": self.window[1],
            "softcap": self.softcap,
            "p_dropout": self.dropout_p,
            "alibi_slopes": None if slopes is None else slopes.data_ptr(),
            "alibi_batch_stride": slopes.stride(0)
            if slopes is not None and slopes.dim() == 2
            else 0,
            "rng_state": None if state is None else state.data_ptr(),
        }


PLAIN = Scores()


class Baseline:
    """The shared library that `nox -s baseline` leaves in build/baseline.

    Its calls take q (batch, seqlen_q, nheads, head_dim), k and v (batch, seqlen_k > 0, nheads_k,
    head_dim), or packed sequences without the dimension of the batch, in fp16 or bf16 on CUDA.
    softmax_lse is fp32, (batch, nheads, seqlen_q) or packed (nheads, total_q). Causal masks are
    aligned to the bottom right corner.

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

    def holds(
        self,
        head_dim: int,
        dtype: torch.dtype,
        causal: bool = False,
        scores: Scores = PLAIN,
        *,
        backward: bool = False,
    ) -> bool:
        """Returns whether this build of the library holds a kernel of the forward or backward."""
        problem = _Problem(
            is_bf16=int(dtype == torch.bfloat16),
            is_causal=int(causal),
            batch=1,
            seqlen_q=2**20,  # no window covers it
            seqlen_k=2**20,
            nheads=1,
            nheads_k=1,
            head_dim=head_dim,
            softmax_scale=1.0,
            **scores.fields(),
        )
        return bool(self._library.fa2_baseline_holds(ctypes.byref(problem), int(backward)))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        num_splits: int = 0,
        scores: Scores = PLAIN,
        packed: Packed | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs upstream's forward as its flash_attn_func or flash_attn_varlen_func does.

        Args:
            num_splits: 0: upstream's heuristic (what flash_attn_func uses); 1: its forward
                kernel; more: its split kernel and combine kernel. With features or packed
                sequences it is 1: the library holds no split kernel for them.
            scores: features; none of packed sequences.
            packed: where packed sequences lie; the longest has more than one query (with a single
                one upstream turns head groups into rows, which is not done here).
        """
        if packed is not None:
            lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
            return self._forward(_problem(q, k, causal, PLAIN, packed), (q, k, v), lse, 1)
        batch, seqlen_q, nheads, head_dim = q.shape
        nheads_k = k.shape[2]
        # As upstream: one query row needs no mask, and its head group becomes the rows of a tile.
        causal = causal and (seqlen_q > 1 or scores.alibi_slopes is not None)
        swapped = seqlen_q == 1 and nheads > nheads_k and scores.plain
        if not scores.plain and num_splits == 0:
            num_splits = 1
        if swapped:
            q = q.reshape(batch, nheads_k, nheads // nheads_k, head_dim).transpose(1, 2)
        problem = _problem(q, k, causal, scores)
        if num_splits == 0:
            sms = torch.cuda.get_device_properties(q.device).multi_processor_count
            num_splits = int(self._library.fa2_baseline_num_splits(ctypes.byref(problem), sms))
        lse = q.new_empty((batch, q.shape[2], q.shape[1]), dtype=torch.float32)
        out, lse = self._forward(problem, (q, k, v), lse, num_splits)
        if swapped:
            out = out.transpose(1, 2).reshape(batch, 1, nheads, head_dim)
            lse = lse.reshape(batch, nheads, 1)
        return out, lse

    def _forward(
        self, problem: _Problem, qkv: Tensors, lse: torch.Tensor, num_splits: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(qkv[0])
        lse_accum = out_accum = None
        if num_splits > 1:
            rows = (num_splits, *lse.shape)
            lse_accum = lse.new_empty(rows)
            out_accum = lse.new_empty((*rows, out.shape[-1]))
        # Upstream allocates a (seed, offset) pair and an empty P as well: bytes, not counted here.
        self._check(
            self._library.fa2_baseline_forward(
                ctypes.byref(problem),
                *(ctypes.byref(_tensor(t)) for t in (*qkv, out)),
                lse.data_ptr(),
                num_splits,
                None if out_accum is None else out_accum.data_ptr(),
                None if lse_accum is None else lse_accum.data_ptr(),
            )
        )
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor,
        *,
        causal: bool = False,
        deterministic: bool = False,
        scores: Scores = PLAIN,
        packed: Packed | None = None,
    ) -> Tensors:
        """Runs upstream's backward; `deterministic` is its mode: run to run, not over batches."""
        nheads, head_dim = q.shape[-2:]
        nheads_k = k.shape[-2]
        if packed is None:
            rounded = -(-q.shape[1] // _ROUNDING) * _ROUNDING
            softmax_d_shape: tuple[int, ...] = (q.shape[0], nheads, rounded)
            dq_accum_shape: tuple[int, ...] = (q.shape[0], rounded, nheads, head_dim)
        else:
            rounded = q.shape[0] + _ROUNDING * packed.batch
            softmax_d_shape, dq_accum_shape = (nheads, rounded), (rounded, nheads, head_dim)
        problem = _problem(q, k, causal, scores if packed is None else PLAIN, packed)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        softmax_d = q.new_empty(softmax_d_shape, dtype=torch.float32)
        split_stride = 0
        if deterministic:
            sms = torch.cuda.get_device_properties(q.device).multi_processor_count
            copies = -(-sms // (problem.batch * nheads))
            dq_accum = q.new_zeros((copies, *dq_accum_shape), dtype=torch.float32)
            split_stride = dq_accum.stride(0)
        else:
            dq_accum = q.new_empty(dq_accum_shape, dtype=torch.float32)
        expanded = (*k.shape[:-2], nheads, head_dim)
        dk_heads = dk if nheads == nheads_k else q.new_empty(expanded)
        dv_heads = dv if nheads == nheads_k else q.new_empty(expanded)
        self._check(
            self._library.fa2_baseline_backward(
                ctypes.byref(problem),
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
            groups = (*k.shape[:-2], nheads_k, nheads // nheads_k, head_dim)
            torch.sum(dk_heads.reshape(groups), -2, out=dk)
            torch.sum(dv_heads.reshape(groups), -2, out=dv)
        return dq, dk, dv

    def _check(self, status: int) -> None:
        if status != 0:
            raise BaselineError(self._library.fa2_baseline_error().decode())


def _tensor(tensor: torch.Tensor) -> _Tensor:
    strides = tensor.stride()
    # Packed sequences have no batch dimension.
    batch_stride = strides[0] if len(strides) == 4 else 0
    return _Tensor(tensor.data_ptr(), batch_stride, strides[-3], strides[-2])


def _problem(
    q: torch.Tensor, k: torch.Tensor, causal: bool, scores: Scores, packed: Packed | None = None
) -> _Problem:
    problem = _Problem(
        device=q.device.index,
        is_bf16=int(q.dtype == torch.bfloat16),
        is_causal=int(causal),
        batch=q.shape[0],
        seqlen_q=q.shape[1],
        seqlen_k=k.shape[1],
        nheads=q.shape[-2],
        nheads_k=k.shape[-2],
        head_dim=q.shape[-1],
        softmax_scale=q.shape[-1] ** -0.5,
        stream=torch.cuda.current_stream(q.device).cuda_stream,
        **scores.fields(),
    )
    if packed is not None:
        problem.batch = packed.batch
        problem.seqlen_q, problem.seqlen_k = packed.max_seqlen_q, packed.max_seqlen_k
        problem.cu_seqlens_q = packed.cu_seqlens_q.data_ptr()
        problem.cu_seqlens_k = packed.cu_seqlens_k.data_ptr()
        problem.total_q = q.shape[0]
    return problem
