"""The command `flash-attn-deterministic verify --ranks N`: starts torchrun, or runs as a rank."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ...errors import ArgumentError
from ..environment import without_settings
from ..installed import NotInstalledError, Wheel
from ..outcome import PASSED, Exit
from ..shared.commands import sigterm_interrupts

_LAUNCHED = "VERIFY_RANKS_LAUNCHED"  # set where this command started torchrun


def run(arguments: argparse.Namespace, wheel: Wheel | None = None) -> int:
    """Runs the row "ranks" on N ranks of this machine, or as one rank of a running torchrun.

    Returns a status of `outcome.Exit`; 1 where a rank ended early.

    Raises:
        ArgumentError: a number of ranks that can't be.
        NotInstalledError: not as many GPUs.
    """
    import torch

    count = arguments.ranks
    if count < 2:
        raise ArgumentError(f"--ranks: expected at least 2, got {count}")
    world = os.environ.get("WORLD_SIZE")
    if world is not None and "RANK" in os.environ:
        if int(world) != count:
            raise ArgumentError(f"--ranks: expected {world}, as torchrun has started, got {count}")
        from . import run as ranks

        status = ranks.main(arguments.device, arguments.quick, arguments.out, wheel)
        # Once ranks.json has the result, torchrun need not report an error.
        return 0 if os.environ.get(_LAUNCHED) else status
    if arguments.device == "cuda" and torch.cuda.device_count() < count:
        raise NotInstalledError(
            f"--ranks: expected at most {torch.cuda.device_count()}, the GPUs of this machine, got "
            f"{count}; use torchrun over several machines, or --device cpu"
        )
    with without_settings():
        # If a rank hangs, torch's watchdog of NCCL ends the others after the group's timeout and
        # four times this, which is time for debug information that this command does not use. The
        # default is 15,000.
        defaults = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
        environment = {**defaults, **os.environ, _LAUNCHED: "1"}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={count}", "-m", "flash_attn_deterministic", "verify"),
        *("--ranks", str(count), "--device", arguments.device),
        *("--out", str(arguments.out.resolve()), *["--quick"] * arguments.quick),
    ]
    if wheel is not None:
        command += ["--wheel", str(wheel.path.resolve())]
        command += ["--allow-source"] * arguments.allow_source
    if run_command(command, environment) != 0:
        return 1  # torchrun has said which rank ended, and why
    # Of this run: no rank ends with 0 before it is written.
    record = json.loads((arguments.out / "ranks.json").read_text(encoding="utf-8"))
    return Exit.PASSED if record["status"] == PASSED else Exit.CONTRACT


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs torchrun, which ends its ranks when it gets SIGTERM; returns its exit status.

    Raises:
        KeyboardInterrupt: this process got SIGINT or SIGTERM; the command has ended.
    """
    with sigterm_interrupts():
        process = subprocess.Popen(command, env=environment)
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
