"""Checks a vLLM installation bit for bit; names the first module whose rows differ.

The command `flash-attn-deterministic verify --vllm MODEL` runs it. Each check asks the same
requests in two ways that must not matter: alone and in a batch, whole and in steps, with and
without cached prefixes, token by token and as one prompt, beside one neighbour and another. Where
answers differ, the engine starts once more without CUDA graphs; hooks on all modules hash each row
of their outputs, rows of one token of one request are compared over both ways, and the first module
(in the order in which they run) with different rows is named, whoever it belongs to. Over several
ranks only answers are compared: vLLM's workers are processes of their own, out of reach of hooks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..environment import REPAIR_VLLM_NORM, read
from ..errors import ArgumentError
from .installed import NotInstalledError
from .outcome import Exit
from .shared.bits import bits
from .shared.files import json_text, write_files

LENGTHS = (7, 16, 17, 33, 64, 100, 128, 129, 255, 511, 700, 1024, 1500, 2047, 2500, 3000)
_NEW_TOKENS = 32
_SHORT = 300  # prompts that are also computed a few tokens a step
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_POSITIONS = 1 << 32  # a row's key: position * _POSITIONS + token


class Answer(NamedTuple):
    """A request's tokens, prompt included, and the log-probabilities of the last ones."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Module:
    """A module whose rows differ between two runs."""

    name: str
    kind: str  # its class
    rows: int  # how many differ
    of: int  # how many were compared
    position: int | None  # of the first token among them; None: rows are not those of tokens


@dataclass
class Outcome:
    """What one check found."""

    check: str
    requests: int
    equal: int
    worst: float | None  # difference of log-probabilities; None where tokens differ
    first: Module | None = None


class Engine:
    """vLLM's engine in this process, of a model's name or folder, with arguments of vllm.LLM."""

    def __init__(self, model: str, **options: Any) -> None:
        vllm: Any = importlib.import_module("vllm")
        self._vllm = vllm
        settings = {"skip_tokenizer_init": True, "enable_prefix_caching": True, "seed": 0}
        self._llm = vllm.LLM(model=model, **{**settings, **options})
        engine = self._llm.llm_engine
        self.vocabulary = int(engine.model_config.get_vocab_size())
        self.longest = int(engine.model_config.max_model_len) - _NEW_TOKENS
        self._scheduler = engine.engine_core.engine_core.scheduler

    @property
    def model(self) -> torch.nn.Module:
        """The model, where it runs in this process."""
        model: torch.nn.Module = self._llm.apply_model(lambda model: model)[0]
        return model

    def forget(self) -> None:
        """Empties the cache of prefixes."""
        self._llm.reset_prefix_cache()

    @contextmanager
    def steps_of(self, tokens: int) -> Iterator[None]:
        """Computes at most this many tokens of a request in one step."""
        config = self._scheduler.scheduler_config
        before = config.long_prefill_token_threshold
        config.long_prefill_token_threshold = tokens
        try:
            yield
        finally:
            config.long_prefill_token_threshold = before

    def ask(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """Returns the greedy answers to prompts that run together."""
        outputs = self._generate(prompts, max_tokens=_NEW_TOKENS, logprobs=0)
        answers = []
        for prompt, output in zip(prompts, outputs, strict=True):
            new = output.outputs[0]
            chosen = zip(new.token_ids, new.logprobs, strict=True)
            logprobs = [step[token].logprob for token, step in chosen]
            answers.append(Answer([*prompt, *new.token_ids], logprobs))
        return answers

    def score(self, answers: Sequence[Answer]) -> list[Answer]:
        """Returns the answers with the log-probabilities that prompts of all their tokens have."""
        prompts = [answer.tokens for answer in answers]
        outputs = self._generate(prompts, max_tokens=1, prompt_logprobs=0)
        scored = []
        for (tokens, logprobs), output in zip(answers, outputs, strict=True):
            last = range(len(tokens) - len(logprobs), len(tokens))
            found = [output.prompt_logprobs[at][tokens[at]].logprob for at in last]
            scored.append(Answer(tokens, found))
        return scored

    def _generate(self, prompts: Sequence[list[int]], **options: Any) -> list[Any]:
        params = self._vllm.SamplingParams(
            temperature=0.0, ignore_eos=True, detokenize=False, **options
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: list[Any] = self._llm.generate(requests, params, use_tqdm=False)
        return outputs


class Check(NamedTuple):
    """Two ways to compute the answers to the same requests, the first `requests` of each."""

    name: str
    requests: int
    ways: tuple[Callable[[], list[Answer]], Callable[[], list[Answer]]]


def draw_prompts(lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Returns prompts that have no token at the same position in common."""
    draw = random.Random(1)
    starts = [draw.randrange(vocabulary) for _ in range(max(lengths))]
    count = vocabulary - 3  # the first tokens of a vocabulary may be special
    return [[3 + (start + i) % count for start in starts[:n]] for i, n in enumerate(lengths)]


def list_checks(engine: Any, lengths: Sequence[int] = LENGTHS) -> list[Check]:
    """Returns the checks of an engine; `engine` as `Engine`."""
    lengths = [n for n in lengths if n <= engine.longest]
    *prompts, nine, ten = draw_prompts([*lengths, 9, 10], engine.vocabulary)
    short = [prompt for prompt in prompts if len(prompt) <= _SHORT]

    def fresh(call: Callable[[], list[Answer]]) -> list[Answer]:
        engine.forget()
        return call()

    def alone(some: Sequence[list[int]]) -> list[Answer]:
        return [answer for prompt in some for answer in engine.ask([prompt])]

    def steps(some: Sequence[list[int]], tokens: int) -> list[Answer]:
        with engine.steps_of(tokens):
            return fresh(lambda: engine.ask(some))

    def beside(neighbour: list[int]) -> list[Answer]:
        ways = [fresh(lambda p=prompt: engine.ask([p, neighbour])) for prompt in prompts]  # type: ignore[misc]
        return [way[0] for way in ways] + [way[1] for way in ways]

    def batch() -> list[Answer]:
        return fresh(lambda: engine.ask(prompts))

    decoded: list[Answer] = []

    def decode() -> list[Answer]:
        decoded[:] = batch()
        return decoded

    n, m = len(prompts), len(short)
    return [
        Check("alone, in a batch", n, (lambda: fresh(lambda: alone(prompts)), batch)),
        Check("whole, 512 tokens a step", n, (batch, lambda: steps(prompts, 512))),
        Check(
            "1 token a step, 4 tokens (k + 1)",
            m,
            (lambda: steps(short, 1), lambda: steps(short, 4)),
        ),
        # The second way finds what the first has left in the cache.
        Check("without, with cached prefixes", n, (batch, lambda: engine.ask(prompts))),
        Check("decode, prefill", n, (decode, lambda: engine.score(decoded))),
        Check("beside 9 tokens, beside 10", n, (lambda: beside(nine), lambda: beside(ten))),
    ]


def run_checks(checks: Sequence[Check], model: torch.nn.Module | None = None) -> list[Outcome]:
    """Runs checks; with the engine's model, which runs without graphs, names modules."""
    outcomes = []
    for check in checks:
        traces = [Trace(model) if model is not None else None for _ in check.ways]
        runs = []
        for way, trace in zip(check.ways, traces, strict=True):
            with trace or nullcontext():
                runs.append(way())
        outcome = compare(check, *runs)
        first, second = traces
        if outcome.equal < outcome.requests and first is not None and second is not None:
            outcome.first = first_difference(first, second, comparable(check.requests, *runs))
        outcomes.append(outcome)
    return outcomes


def compare(check: Check, left: Sequence[Answer], right: Sequence[Answer]) -> Outcome:
    """Compares the answers of both ways bit for bit."""
    equal, worst, same_tokens = 0, 0.0, True
    for one, other in zip(left[: check.requests], right[: check.requests], strict=True):
        equal += one == other
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        apart = max((abs(a - b) for a, b in pairs), default=0.0)
        worst = max(worst, apart)
        same_tokens &= one.tokens == other.tokens
    return Outcome(check.name, check.requests, equal, worst if same_tokens else None)


def comparable(requests: int, left: Sequence[Answer], right: Sequence[Answer]) -> set[int]:
    """Returns the keys of rows that belong to one request and have the same tokens before them."""
    owners: dict[int, set[int]] = {}
    for run in (left, right):
        for i, answer in enumerate(run):
            for key in _keys(answer.tokens):
                owners.setdefault(key, set()).add(i)
    keys = set()
    for i, (one, other) in enumerate(zip(left[:requests], right[:requests], strict=True)):
        pairs = zip(_keys(one.tokens), _keys(other.tokens), strict=False)
        for key, other_key in pairs:
            if key != other_key:
                break
            if owners[key] == {i}:
                keys.add(key)
    return keys


def _keys(tokens: Sequence[int]) -> list[int]:
    return [position * _POSITIONS + token for position, token in enumerate(tokens)]


class Trace:
    """Hashes of the rows of all modules' outputs, while it is entered.

    Rows inside of the model's forward are keyed by position and token, those after it (of what
    computes the logits) by the hash of the row that the module got.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.kinds: dict[str, str] = {}
        self.rows: dict[str, dict[int, int]] = {}
        self.after_model: set[str] = set()
        self._model = model
        self._keys: list[int] | None = None  # of the step's tokens, inside of the model's forward
        self._calls: dict[str, int] = {}
        self._pending: list[tuple[str, list[int] | torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> Trace:
        start = self._model.register_forward_pre_hook(self._start, with_kwargs=True)
        self._handles = [start]
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name)))
        self._handles.append(self._model.register_forward_hook(self._end))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        for name, keys, outputs in self._pending:
            inputs = keys if isinstance(keys, list) else keys.tolist()
            if len(inputs) == len(outputs):
                self.rows.setdefault(name, {}).update(zip(inputs, outputs.tolist(), strict=True))
        self._pending.clear()

    def _start(self, module: torch.nn.Module, args: Any, options: dict[str, Any]) -> None:
        named = dict(zip(("input_ids", "positions"), args, strict=False))
        tokens, positions = ({**named, **options}.get(n) for n in ("input_ids", "positions"))
        if tokens is None or positions is None or positions.dim() != 1:
            raise ArgumentError("--vllm: expected a text model with one position per token")
        self._keys = (positions.long() * _POSITIONS + tokens.long()).tolist()
        self._calls.clear()

    def _end(self, *arguments: Any) -> None:
        self._keys = None

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            outputs = _hash_rows(output)
            keys = _hash_rows(args) if self._keys is None else self._keys
            if outputs is None or keys is None:
                return
            # Layers share modules, such as rotary embeddings.
            calls = self._calls[name] = self._calls.get(name, 0) + 1
            if self._keys is None:
                self.after_model.add(name)
                label = name
            else:
                label = name if calls == 1 else f"{name}, call {calls}"
            self.kinds.setdefault(label, type(module).__name__)
            self._pending.append((label, keys, outputs))

        return hook


def _hash_rows(value: Any) -> torch.Tensor | None:
    """Returns a number for each row of one or more tensors: (rows,), int64."""
    tensors = [value] if isinstance(value, torch.Tensor) else value
    if not isinstance(tensors, (tuple, list)):
        return None
    tensors = [t for t in tensors if isinstance(t, torch.Tensor) and t.dim() > 1]
    if not tensors:
        return None
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        if tensor.shape[0] != tensors[0].shape[0]:
            return None
        integers = bits(tensor.detach().flatten(1)).long()
        # Sums of integers wrap around: to the same number in any order.
        total = total * 3 + (integers * _factors(integers.shape[1], integers.device)).sum(1)
    return total


@cache
def _factors(count: int, device: torch.device) -> torch.Tensor:
    draw = torch.Generator().manual_seed(count)
    return (torch.randint(-(2**62), 2**62, (count,), generator=draw) | 1).to(device)


def first_difference(left: Trace, right: Trace, keys: set[int]) -> Module | None:
    """Returns the first module, in the order of the first run, whose rows differ."""
    for name, kind in left.kinds.items():
        one, other = left.rows.get(name, {}), right.rows.get(name, {})
        after = name in left.after_model
        common = [key for key in one if key in other and (after or key in keys)]
        differing = [key for key in common if one[key] != other[key]]
        if differing:
            position = None if after else min(differing) // _POSITIONS
            return Module(name, kind, len(differing), len(common), position)
    return None


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        Exit status: CONTRACT where bits differ.

    Raises:
        ArgumentError: options that are no JSON object, or vLLM does not start.
        NotInstalledError: there is no vLLM.
    """
    try:
        options = json.loads(arguments.vllm_options or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        given = arguments.vllm_options
        raise ArgumentError(f"--vllm-options: expected a JSON object, got {given!r}")
    if importlib.util.find_spec("vllm") is None:
        raise NotInstalledError(
            "--vllm: expected an installed vLLM, found none; install vllm in this environment"
        )
    record = _child(arguments.vllm, options, [])
    write_files(arguments.out, {"vllm.json": json_text(record)})
    failed = [c["check"] for c in record["checks"] if c["equal"] < c["requests"]]
    ranks = [name for name in _RANKS if options.get(name, 1) != 1]
    if failed and not ranks:
        traced = _child(arguments.vllm, {**options, "enforce_eager": True}, failed)
        record["without graphs"] = traced["checks"]
        write_files(arguments.out, {"vllm.json": json_text(record)})
    print(render(record))
    if failed and ranks:
        print(f"no module is named: with {ranks[0]} the model is in other processes")
    return Exit.CONTRACT if failed else Exit.PASSED


def render(record: dict[str, Any]) -> str:
    """Returns a line per check, and what differs first."""
    lines = []
    for found in record["checks"]:
        same = f"{found['equal']} of {found['requests']} requests"
        lines.append(f"{found['check']:<36} {same} have the same bits")
    for found in record.get("without graphs", ()):
        first = found["first"]
        if found["equal"] == found["requests"]:
            words = "nothing differs without CUDA graphs and compilation"
        elif first is None:
            words = "no module: what differs is outside of the model, or not comparable"
        else:
            rows = f"{first['rows']} of {first['of']} rows"
            words = f"first different: {first['name']} ({first['kind']}), {rows}"
        lines.append(f"{found['check']}: {words}")
    return "\n".join(lines)


def _child(model: str, options: dict[str, Any], only: list[str]) -> dict[str, Any]:
    """Runs the checks in a process of their own, which gives its memory back."""
    environment = {"VLLM_BATCH_INVARIANT": "1", **os.environ}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # hooks and the scheduler are within reach
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "vllm.json"
        words = [model, json.dumps(options), json.dumps(only), str(out)]
        status = subprocess.run(
            [sys.executable, "-m", __name__, *words], env=environment
        ).returncode
        if not out.exists():
            raise ArgumentError(f"--vllm: vLLM ended with status {status}; its messages are above")
        record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return record


def main(model: str, options: str, only: str, out: str) -> None:
    """Runs checks in this process: all, or some with the names of modules."""
    vllm: Any = importlib.import_module("vllm")
    engine, names = Engine(model, **json.loads(options)), json.loads(only)
    checks = [c for c in list_checks(engine) if not names or c.name in names]
    outcomes = run_checks(checks, engine.model if names else None)
    record = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "model": model,
        "options": json.loads(options),
        "VLLM_BATCH_INVARIANT": os.environ.get("VLLM_BATCH_INVARIANT"),
        REPAIR_VLLM_NORM[0]: read(os.environ, REPAIR_VLLM_NORM)[1] or None,
        "checks": [asdict(outcome) for outcome in outcomes],
    }
    Path(out).write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads do not end
