"""Attention over several GPUs equals one: `verify --ranks`, the training example, a dead rank.

And over threads on one GPU, which need no second one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flash_attn_deterministic import tree
from flash_attn_deterministic.distributed.plan import Shape
from flash_attn_deterministic.types import Options

from tests.gpu.attention import DTYPES, assert_same, each_config, skip_unless_built
from tests.gpu.ranks import dying_rank
from tests.gpu.ranks.threads import NAMES, on_one, over_ranks, packed_call

pytestmark = pytest.mark.gpu

# (ranks, order, lengths of packed sequences, query heads, KV heads, window, softcap). Ranks are
# threads of one process on one GPU. Parts that begin with chunks of rows, and parts that don't.
CUTS: dict[str, tuple[int, str, tuple[int, ...], int, int, tuple[int, int], float]] = {
    "contiguous": (2, "contiguous", (16384,), 4, 2, (-1, 0), 0.0),
    "zigzag": (2, "zigzag", (16384,), 4, 2, (-1, 0), 0.0),
    "zigzag-full": (2, "zigzag", (16384,), 4, 4, (-1, -1), 0.0),
    "zigzag-4": (4, "zigzag", (32768,), 6, 2, (-1, 0), 0.0),
    "zigzag-borders-in-chunks": (2, "zigzag", (10240,), 4, 2, (-1, 0), 0.0),
    "borders-in-chunks": (3, "contiguous", (7992,), 4, 2, (-1, 0), 0.0),
    "gqa": (2, "zigzag", (12288,), 32, 8, (-1, 0), 0.0),
    "mqa": (2, "contiguous", (12288,), 8, 1, (-1, 0), 0.0),
    "window": (3, "contiguous", (24576,), 4, 2, (300, 100), 0.0),
    "window-zigzag": (2, "zigzag", (16384,), 4, 2, (700, 0), 0.0),
    "softcap": (2, "zigzag", (8192,), 4, 2, (-1, 0), 3.0),
    "packed": (2, "contiguous", (800, 12000, 24, 3560), 4, 2, (-1, 0), 0.0),
    "packed-zigzag": (2, "zigzag", (4096, 10240, 2048), 4, 2, (-1, 0), 0.0),
}

VARIABLE = "FLASH_ATTENTION_FAMILY"
ROOT = Path(__file__).resolve().parents[3]
GPUS = torch.cuda.device_count()
several = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, there are {GPUS}")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@each_config([(64, "bf16"), (128, "bf16"), (128, "fp16"), (96, "bf16")])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_threads_on_one_gpu_equal_one_call(
    cut: tuple[int, str, tuple[int, ...], int, int, tuple[int, int], float],
    head_dim: int,
    dtype: str,
    family: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skip_unless_built(head_dim, dtype, "bwd")
    monkeypatch.setenv(VARIABLE, family)
    size, order, lengths, nheads, nheads_k, (left, right), softcap = cut
    tensors, starts = packed_call(lengths, nheads, nheads_k, head_dim, DTYPES[dtype], "cuda")
    options = Options(0.0, head_dim**-0.5, left, right, softcap, 512, True, True)
    tokens = starts[-1] // size
    for degree in (0, 1):
        shape = Shape(
            *(starts, starts, False, tokens, tokens, size, order, left, right, 512),
            *(tree.CHUNK_ROWS, nheads, nheads_k, head_dim),
            degree=degree,
        )
        one, many = on_one(tensors, shape, options), over_ranks(tensors, shape, options)
        assert_same(tuple(many), tuple(one), NAMES)


@several
@pytest.mark.parametrize("count", sorted({2, min(4, GPUS), min(8, GPUS)}))
def test_ranks_equal_one_gpu(tmp_path: Path, count: int) -> None:
    command = [sys.executable, "-m", "flash_attn_deterministic", "verify", "--quick"]
    command += ["--ranks", str(count), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    report = tmp_path / "ranks.json"
    assert done.returncode == 0, (
        done.stdout + done.stderr + (report.read_text() if report.exists() else "")
    )
    record = json.loads(report.read_text())
    assert record["status"] == "passed"
    assert record["rows"][-1]["ranks"] == count
    assert record["rows"][-1]["cases"] > 20


@several
def test_a_long_sequence_equals_one_gpu(tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    command = [*TORCHRUN, "--nproc-per-node=2", "-m", "tests.benchmarks.ranks", "--out", str(out)]
    command += ["--lengths", "16384", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = json.loads(out.read_text())["cases"]
    assert case["same_bits"] is True
    assert len({"one", "planned", "heads over 1", "heads over 2"} & case["seconds"].keys()) == 3


@several
def test_calls_on_several_streams() -> None:
    command = [*TORCHRUN, "--nproc-per-node=2", "-m", "tests.gpu.ranks.streams", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "same bits"


@several
def test_training_has_the_bits_of_one_gpu() -> None:
    script = ROOT / "examples" / "train_over_ranks.py"
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node=2", str(script), "--length", "1024"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "losses and weights have the same bits: yes"


TIMEOUT = 20.0  # of the process group


@several
@pytest.mark.parametrize("how", ["killed", "silent"])
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_rank_that_dies_is_an_error_on_the_others(how: str, when: str) -> None:
    # `wait` of a message then blocks the host, and raises after the timeout.
    environment = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    ended = dying_rank.run("cuda", how, TIMEOUT, TIMEOUT + 20, environment, when)
    assert ended.status == 1
    assert "RankError: rank 0 of 2: " in ended.text
    assert ended.seconds < TIMEOUT + 20


@several
@pytest.mark.parametrize("when", ["first", "later"])
def test_by_default_a_rank_that_dies_ends_the_others(when: str) -> None:
    # In a first step the host waits for the other rank. Later torch's watchdog of NCCL finds the
    # timeout, sleeps for four times this (by default 15 s) so that other ranks can write debug
    # information, and aborts the process.
    environment = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
    ended = dying_rank.run("cuda", "killed", TIMEOUT, 40, environment, when)
    if when == "first":
        assert "RankError: rank 0 of 2: rank 1 did not make call 1" in ended.text
    else:
        assert ended.status == -signal.SIGABRT
    assert ended.seconds < TIMEOUT + 40
