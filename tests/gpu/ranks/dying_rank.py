"""Two ranks in processes of their own, of which the second stops taking part after the forward.

    python -m tests.gpu.ranks.dying_rank cuda killed 20 later   # one rank, torchrun's variables

`run` starts both. torchrun would end the first rank as soon as the second one has ended.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from flash_attn_deterministic import distributed
from flash_attn_deterministic.errors import RankError

ROOT = Path(__file__).resolve().parents[3]
_START = 90.0  # seconds that two processes may take to import torch and to connect


class Ended(NamedTuple):
    """How the first rank ended.

    Args:
        status: exit status; negative: the signal.
        text: stdout and stderr.
        seconds: from its last message with the other rank to its end.
    """

    status: int
    text: str
    seconds: float


def run(
    device: str,
    how: str,
    timeout: float,
    more: float,
    environment: Mapping[str, str],
    when: str = "first",
) -> Ended:
    """Runs both ranks, and waits for the first.

    Args:
        device: "cuda" (NCCL) or "cpu" (gloo).
        how: what the second rank does: "killed", or "silent": it sleeps.
        timeout: of the process group, in seconds.
        more: seconds after the timeout in which the first rank has to end.
        environment: variables of both ranks, besides those of this process.
        when: in the "first" step or a "later" one.

    Raises:
        AssertionError: the first rank did not end in time; with what it printed.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-m", "tests.gpu.ranks.dying_rank", device, how]
    command += [str(timeout), when]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.STDOUT if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    begin = time.monotonic()
    try:
        text, _ = ranks[0].communicate(timeout=_START + timeout + more)
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        shown = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        raise AssertionError(
            f"rank 0 runs after {time.monotonic() - begin:.0f} s; it printed:\n{shown}"
        ) from None
    finally:
        # No rank is left behind with a GPU, whatever happened.
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
    alone = [float(line.split()[1]) for line in text.splitlines() if line.startswith(_ALONE)]
    assert alone, text
    return Ended(ranks[0].returncode, text, time.time() - alone[0])


_ALONE = "alone "  # begins the line with the time of the last message


def main(device: str, how: str, timeout: float, when: str) -> None:
    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    q = torch.randn(1, 256, 4, 64).to(device, torch.bfloat16).requires_grad_()
    if when == "later":  # in the first step, ranks compare their calls without messages
        distributed.flash_attn_func(q, q, q, causal=True).sum().backward()
    out = distributed.flash_attn_func(q, q, q, causal=True)
    if device == "cuda":
        torch.cuda.synchronize()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # the test kills it
    print(f"{_ALONE}{time.time()}", flush=True)
    try:
        out.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
    except RankError as error:
        # NCCL's kernel waits for the other rank: the end of the process would wait for it, too.
        print(f"RankError: {error}", flush=True)
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
