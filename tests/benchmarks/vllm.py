"""Checks and times this package's attention in vLLM, beside vLLM's own.

    python -m tests.benchmarks.vllm --wheel dist/*.whl --out docs/results/vllm.json

Llamas with random weights, in vLLM's batch-invariant mode with its norm repaired, where FLASH_ATTN
is FlashAttention-3 pinned to one split. Each engine is a process of its own. All start first, and
beside them `verify --vllm` runs with vLLM's norm and with the repaired one. Nothing is timed before
they have ended; then the engines take turns, case by case. The file is written after each case.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from flash_attn_deterministic.environment import REPAIR_VLLM_NORM
from flash_attn_deterministic.verify.shared.files import json_text, write_files
from flash_attn_deterministic.verify.shared.provenance import provenance

# Requests and the tokens of each; the longest set of them decides the size of the cache.
CASES = ((1, 32_000), (4, 32_000), (64, 2000), (16, 8000), (1, 8000))
THEIRS = "FLASH_ATTN"
_NEW_TOKENS, _REPEATS = 38, 3
_WIDTH, _LAYERS = 2048, 16
_VOCABULARY = 8192
# A token has keys and values of a quarter of the width, 2 bytes each, in each layer.
_CACHE_BYTES = _WIDTH * _LAYERS * max(requests * (tokens + 256) for requests, tokens in CASES)
_ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "flash_attn_deterministic",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # greedy samples need none, and it is a package of its own
    REPAIR_VLLM_NORM[0]: "1",
}


class Worker:
    """A process in which a function sends answers through a pipe.

    Args:
        target: gets the process's end of the pipe, and the arguments.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_in_process, args=(other, target, *arguments))
        self._process.start()
        other.close()

    def ask(self, question: Any) -> None:
        """Sends a question; `answer` tells if the process has ended."""
        with contextlib.suppress(OSError):
            self._pipe.send(question)

    def answer(self, end: float) -> Any:
        """Waits for the next answer until `end` on the monotonic clock.

        Raises:
            RuntimeError: there is none, says why; the process is killed.
        """
        try:
            found = RuntimeError("no answer in time")
            if self._pipe.poll(max(0.0, end - time.monotonic())):
                found = self._pipe.recv()
        except (EOFError, OSError):
            found = RuntimeError("its process has ended")
        if isinstance(found, RuntimeError):
            self.kill()
            raise found
        return found

    def kill(self) -> None:
        """Ends the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def _in_process(pipe: Any, target: Callable[..., None], *arguments: Any) -> None:
    os.setsid()
    try:
        target(pipe, *arguments)
    except EOFError:  # the other end is closed
        pass
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"[:500]))
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads do not end


def serve(pipe: Any, model: str, backend: str, options: dict[str, Any]) -> None:
    """Starts vLLM's engine, says so, and times the cases that it is asked for."""
    vllm: Any = importlib.import_module("vllm")
    engine = vllm.LLM(model=model, attention_backend=backend, **options).llm_engine
    params = vllm.SamplingParams(
        temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=_NEW_TOKENS
    )
    pipe.send("ready")
    while True:
        pipe.send(measure(engine, params, *pipe.recv()))


def check(pipe: Any, model: str, options: dict[str, Any], repair: bool, out: str) -> None:
    """Runs `verify --vllm`, and sends its exit status."""
    from flash_attn_deterministic.__main__ import main as command

    os.environ[REPAIR_VLLM_NORM[0]] = str(int(repair))
    words = ["verify", "--vllm", model, "--vllm-options", json.dumps(options), "--out", out]
    pipe.send(command(words))


def measure(engine: Any, params: Any, requests: int, tokens: int) -> dict[str, float]:
    """Returns milliseconds until all requests have a token, and of a later step: medians."""
    draw = random.Random(tokens)
    prefill: list[float] = []
    decode: list[float] = []
    for run in range(_REPEATS + 1):
        for number in range(requests):
            prompt = [draw.randrange(3, _VOCABULARY) for _ in range(tokens)]
            engine.add_request(f"{run}-{number}", {"prompt_token_ids": prompt}, params)
        begin = time.perf_counter()
        times = []  # of the steps in which all requests got a token
        while engine.has_unfinished_requests():
            if len(engine.step()) == requests:
                times.append(time.perf_counter())
        if run:  # the first one warms up
            prefill.append(times[0] - begin)
            decode += [later - earlier for earlier, later in itertools.pairwise(times[2:])]
    return {
        "prefill": 1e3 * statistics.median(prefill),
        "decode": 1e3 * statistics.median(decode),
    }


def write_model(folder: Path, head_dim: int, layers: int, weights: bool) -> str:
    """Writes a Llama with 4 query heads to a KV head; its weights, too, if they matter."""
    heads = _WIDTH // head_dim
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": _WIDTH, "intermediate_size": 2 * _WIDTH, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads // 4, "head_dim": head_dim,
        "vocab_size": _VOCABULARY, "max_position_embeddings": 32_768, "rope_theta": 500_000.0,
        # So large that a row of attention has few keys that count.
        "initializer_range": 0.06, "tie_word_embeddings": False, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if weights:
        transformers: Any = importlib.import_module("transformers")
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            made = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(str(folder)), dtype=torch.bfloat16
            )
        made.save_pretrained(folder)
    return str(folder)


def next_answer(workers: dict[str, Worker], name: str, end: float, failed: dict[str, str]) -> Any:
    """Returns a worker's next answer; None: it is not there, or has failed and is left out."""
    try:
        return workers[name].answer(end) if name in workers else None
    except RuntimeError as error:
        failed[name] = str(error)
        del workers[name]
        return None


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit status is 1 if something could not be measured, or a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--wheel", type=Path, help="the installed wheel's file")
    parser.add_argument("--backend", help="ours; default: as this vLLM knows it")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64, 256], metavar="D")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON, of vllm.LLM")
    parser.add_argument("--seconds", type=float, default=900, help="of all together")
    parser.add_argument("--start-seconds", type=float, default=400, help="of checks and starts")
    arguments = parser.parse_args(argv)
    os.environ.update({**_ENVIRONMENT, **os.environ})
    # Imported here: vLLM reads the environment.
    from flash_attn_deterministic.integrations.vllm import DeterministicBackend

    own_backend = arguments.backend or DeterministicBackend.get_name()
    begin = time.monotonic()
    end = begin + arguments.seconds
    start = min(end, begin + arguments.start_seconds)
    # Engines share the GPU: sizes are given, not found by filling its memory.
    options = {
        "skip_tokenizer_init": True, "gpu_memory_utilization": 0.03, "max_num_seqs": 64,
        "max_num_batched_tokens": 16_384, **arguments.options,
    }  # fmt: skip
    failed: dict[str, str] = {}
    record: dict[str, Any] = {
        "schema": "vllm/1",
        **provenance(
            ["python", "-m", "tests.benchmarks.vllm", *sys.argv[1:]],
            "cuda" if torch.cuda.is_available() else "cpu",
            arguments.wheel, vllm=metadata.version("vllm"),
        ),
        "options": options, "layers": _LAYERS, "checks": {}, "cases": [], "failed": failed,
    }  # fmt: skip
    workers: dict[str, Worker] = {}
    backends = {"ours": own_backend, THEIRS: THEIRS}

    def write() -> None:
        write_files(arguments.out.parent, {arguments.out.name: json_text(record)})

    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)

        def add(name: str, *target: Any) -> None:
            workers[name] = Worker(*target)
            stack.callback(workers[name].kill)

        for head_dim in arguments.head_dims:
            model = write_model(folder / f"D{head_dim}", head_dim, _LAYERS, weights=False)
            own = {"load_format": "dummy", "enable_prefix_caching": False,
                   "kv_cache_memory_bytes": _CACHE_BYTES, **options}  # fmt: skip
            for title, backend in backends.items():
                add(f"D{head_dim} {title}", serve, model, backend, own)
        model = write_model(folder / "checked", arguments.head_dims[0], 4, weights=True)
        own = {"attention_backend": own_backend, "kv_cache_memory_bytes": 2**31, **options}
        norms = ("norm repaired", "vLLM's norm")
        for norm in norms:
            add(norm, check, model, own, norm == norms[0], str(folder / norm))
        for norm in norms:
            status = next_answer(workers, norm, start, failed)
            path = folder / norm / "vllm.json"
            found = json.loads(path.read_text("utf-8")) if path.exists() else {}
            parts = {key: found[key] for key in ("checks", "without graphs") if key in found}
            record["checks"][norm] = {"status": status, **parts}
            write()
        for name in [name for name in workers if name not in norms]:
            next_answer(workers, name, start, failed)
        record["seconds_to_start"] = time.monotonic() - begin
        for head_dim, (requests, tokens) in itertools.product(arguments.head_dims, CASES):
            case: dict[str, Any] = {"head_dim": head_dim, "requests": requests, "tokens": tokens}
            for title in backends:
                if worker := workers.get(f"D{head_dim} {title}"):
                    worker.ask((requests, tokens))
                limit = min(end, time.monotonic() + 40)
                case[title] = next_answer(workers, f"D{head_dim} {title}", limit, failed)
            record["cases"].append(case)
            print(case, flush=True)
            write()
    print(f"{time.monotonic() - begin:.0f} s, failed: {failed or 'nothing'}", flush=True)
    return int(bool(failed) or record["checks"][norms[0]]["status"] != 0)


if __name__ == "__main__":
    sys.exit(main())
