"""Two ranks, of which the second stops taking part after the forward; see test_ranks.py."""

from __future__ import annotations

import datetime
import os
import time

import torch
import torch.distributed as dist
from flash_attn_deterministic import distributed


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=20))
    q = torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = distributed.flash_attn_func(q, q, q, causal=True)
    torch.cuda.synchronize()
    if rank == 1:
        # Alive for torchrun, which would end the other rank at once.
        time.sleep(90)
        return
    out.sum().backward()


if __name__ == "__main__":
    main()
