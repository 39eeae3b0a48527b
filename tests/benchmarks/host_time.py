"""Times what a call takes on the host: eager calls so small that the GPU waits for them.

Beside the package's functions stand its bare op (what the functions add to it is Python), torch's
scaled_dot_product_attention, and FlashAttention-3's bare op (peer_libraries.py), all in one
process, in turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from flash_attn_deterministic import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn_deterministic.verify.speed.measure import rotations

from tests.benchmarks import peer_libraries
from tests.benchmarks.shared.record import environment, write_json
from tests.benchmarks.shared.run import file_parser

_CALLS = 100  # of a loop: few enough that the queue of the GPU never fills
_DEVICE = "cuda"
_OPS = torch.ops.flash_attn_deterministic


def microseconds(
    calls: Mapping[str, Callable[[], object]], loops: int
) -> dict[str, dict[str, float]]:
    """Times loops over calls in turns.

    Returns:
        Median and 10th percentile of the microseconds of a call, by name.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn, order in rotations(calls, loops + 2):
        for name in order:
            call = calls[name]
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(_CALLS):
                call()
            taken = time.perf_counter() - begin
            if turn >= 2:
                times[name].append(taken / _CALLS * 1e6)
    return {
        name: {
            "median": round(statistics.median(values), 2),
            "p10": round(statistics.quantiles(values, n=10, method="inclusive")[0], 2),
        }
        for name, values in times.items()
    }


def calls_to_time(with_fa3: bool) -> dict[str, Callable[[], object]]:
    """Returns calls by name: functions, ops and peers, forward alone and with backward."""
    bf16: dict[str, Any] = {"device": _DEVICE, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(1, 64, 4, 64, **bf16) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    dout = torch.randn_like(q)
    starts = torch.tensor([0, 64], device=_DEVICE, dtype=torch.int32)
    lengths = torch.tensor([64], device=_DEVICE, dtype=torch.int32)
    one = q[:, :1].contiguous()
    q_rows, k_rows, v_rows = q[0], k[0], v[0]
    turned = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    turned_leaves = [t.clone().requires_grad_() for t in turned]
    turned_dout = torch.randn_like(turned[0])

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=True)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def op() -> object:
        # Without autograd's kernel of the op, a function of Python that the functions go around.
        with torch._C._AutoDispatchBelowAutograd():
            return _OPS.fwd(q, k, v, None, None, 0.0, 0.125, -1, 0, 0.0, 2048, True, True)

    def with_backward(
        function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor
    ) -> object:
        return torch.autograd.grad(function(*inputs), inputs, grad)

    calls: dict[str, Callable[[], object]] = {
        "dense": lambda: ours(q, k, v),
        "packed": lambda: flash_attn_varlen_func(
            q_rows, k_rows, v_rows, starts, starts, 64, 64, causal=True
        ),
        "cache": lambda: flash_attn_with_kvcache(one, k, v, cache_seqlens=lengths, causal=True),
        "op dense": op,
        "forward and backward": lambda: with_backward(ours, leaves, dout),
        "sdpa": lambda: sdpa(turned[0], turned[1], turned[2]),
        "sdpa forward and backward": lambda: with_backward(sdpa, turned_leaves, turned_dout),
    }
    if with_fa3:
        fa3 = torch.ops.flash_attn_3
        calls["fa3"] = lambda: fa3.fwd(q, k, v, softmax_scale=0.125, is_causal=True)
    return calls


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = file_parser(__doc__)
    peer_libraries.add_arguments(parser, with_fa4=False)
    parser.add_argument("--loops", type=int, default=40)
    options = parser.parse_args(arguments)
    peer_libraries.find(options, parser)
    peers = peer_libraries.versions()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        times = microseconds(calls_to_time(peers["fa3"] is not None), options.loops)
    record = {
        **environment(options.wheel, sys.argv),
        "peers": peers,
        "loops": options.loops,
        "us": times,
    }
    write_json(options.out, record)
    for name, one in times.items():
        print(f"{name:28} {one['median']:8.2f} us, p10 {one['p10']:8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
