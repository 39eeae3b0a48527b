"""`verify --vllm`: what differs is found, and the module that differs first is named."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic.__main__ import main
from flash_attn_deterministic.errors import ArgumentError
from flash_attn_deterministic.verify import vllm as check
from flash_attn_deterministic.verify.outcome import Exit
from flash_attn_deterministic.verify.shared.files import json_text
from flash_attn_deterministic.verify.vllm import Answer

LENGTHS = (3, 8, 17)
VOCABULARY = 64


class Rows(torch.nn.Module):
    """A function of each row; a planted fault makes it one of the number of rows, too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(VOCABULARY, generator=generator)
        self.fault: bool = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * (1 + len(x) / 256 if self.fault else 1)


class Attention(torch.nn.Module):
    """Adds to each row what its request has seen before it."""

    seen: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.seen[:, None] / 512


class Layer(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm, self.attention = Rows(seed), Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x)
        result: torch.Tensor = self.attention(normed)
        return result


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, VOCABULARY)
        self.layers = torch.nn.ModuleList([Layer(0), Layer(1)])
        self.head = Rows(2)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = x
        return result


class Engine:
    """A scheduler around the model, with the interface that the checks use."""

    vocabulary, longest = VOCABULARY, 100

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self._limit = 10**6

    def forget(self) -> None:
        pass

    @contextmanager
    def steps_of(self, tokens: int) -> Iterator[None]:
        self._limit = tokens
        yield
        self._limit = 10**6

    def _step(self, parts: Sequence[tuple[list[int], int, int]]) -> list[torch.Tensor]:
        """Returns the log-probabilities after tokens [begin, end) of each request."""
        places = [(tokens, at) for tokens, begin, end in parts for at in range(begin, end)]
        seen = torch.tensor([float(sum(tokens[:at])) for tokens, at in places])
        for layer in self.model.layers:
            layer.get_submodule("attention").seen = seen
        rows = self.model(
            input_ids=torch.tensor([tokens[at] for tokens, at in places]),
            positions=torch.tensor([at for _, at in places]),
        )
        ends = torch.tensor([end - begin for _, begin, end in parts]).cumsum(0)
        scored: list[torch.Tensor] = list(self.model.head(rows[ends - 1]))
        return [row.log_softmax(0) for row in scored]

    @torch.no_grad()
    def ask(self, prompts: Sequence[list[int]], new_tokens: int = 4) -> list[Answer]:
        answers = [Answer(list(prompt), []) for prompt in prompts]
        done = [0] * len(prompts)
        while active := [i for i, a in enumerate(answers) if len(a.logprobs) < new_tokens]:
            parts = []
            for i in active:
                tokens = answers[i].tokens
                parts.append((tokens, done[i], min(len(tokens), done[i] + self._limit)))
            for i, logprobs, (_, _, end) in zip(active, self._step(parts), parts, strict=True):
                done[i] = end
                if end == len(answers[i].tokens):
                    token = int(logprobs.argmax())
                    answers[i].tokens.append(token)
                    answers[i].logprobs.append(float(logprobs[token]))
        return answers

    @torch.no_grad()
    def score(self, answers: Sequence[Answer]) -> list[Answer]:
        found = []
        for tokens, logprobs in answers:
            first = len(tokens) - len(logprobs)
            steps = [self._step([(tokens, 0, at)])[0] for at in range(first, len(tokens))]
            chosen = [float(step[tokens[first + i]]) for i, step in enumerate(steps)]
            found.append(Answer(tokens, chosen))
        return found


@pytest.mark.parametrize("fault", [
    pytest.param("layers.0.norm", id="first-layer"),
    pytest.param("layers.1.norm", id="second-layer"),
    pytest.param("head", id="logits"),
])  # fmt: skip
def test_the_planted_module_is_named(fault: str) -> None:
    engine = Engine()
    planted = engine.model.get_submodule(fault)
    assert isinstance(planted, Rows)
    planted.fault = True
    outcomes = check.run_checks(check.list_checks(engine, LENGTHS), engine.model)
    different = [outcome for outcome in outcomes if outcome.equal < outcome.requests]
    assert "alone, in a batch" in {outcome.check for outcome in different}
    for outcome in different:
        assert outcome.first is not None
        assert (outcome.first.name, outcome.first.kind) == (fault, "Rows")


def test_nothing_is_named_without_a_fault() -> None:
    engine = Engine()
    for outcome in check.run_checks(check.list_checks(engine, LENGTHS), engine.model):
        assert (outcome.equal, outcome.worst, outcome.first) == (outcome.requests, 0.0, None)


def test_a_report_of_other_tokens_is_json() -> None:
    one = check.Check("alone, in a batch", 1, (list, list))
    outcome = check.compare(one, [Answer([5, 6], [-1.0])], [Answer([5, 7], [-2.0])])
    assert (outcome.equal, outcome.worst) == (0, None)
    assert json.loads(json_text(asdict(outcome)))["worst"] is None


def test_prompts_share_no_token_at_a_position() -> None:
    prompts = check.draw_prompts((40, 30, 40), VOCABULARY)
    for tokens in zip(*prompts, strict=False):
        assert len(set(tokens)) == 3


def test_rows_after_different_tokens_are_not_compared() -> None:
    left, right = [Answer([5, 6, 7, 8], [0.0])], [Answer([5, 6, 9, 8], [0.0])]
    keys = check.comparable(1, left, right)
    assert {key >> 32 for key in keys} == {0, 1}


def record(*checks: dict[str, Any]) -> dict[str, Any]:
    return {"vllm": "1", "checks": list(checks)}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is found, but never started."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def test_without_vllm_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["verify", "--vllm", "folder", "--out", str(tmp_path)]) == Exit.ENVIRONMENT
    message = "--vllm: expected an installed vLLM, found none; install vllm in this environment"
    assert capsys.readouterr().err == f"error: {message}\n"


def found(name: str, equal: int, first: Any = None) -> dict[str, Any]:
    return {"check": name, "requests": 3, "equal": equal, "worst": 0.0, "first": first}


@pytest.mark.usefixtures("installed")
def test_what_differs_is_run_again_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def child(model: str, options: dict[str, Any], only: list[str]) -> dict[str, Any]:
        asked.append((model, options, only))
        if not only:
            return record(found("batch", 3), found("decode", 1), found("steps", 2))
        named = {"name": "layers.1.norm", "kind": "RMSNorm", "rows": 4, "of": 9, "position": 0}
        return record(found("decode", 1, named), found("steps", 3))

    monkeypatch.setattr(check, "_child", child)
    words = ["verify", "--vllm", "folder", "--vllm-options", '{"seed": 1}', "--out", str(tmp_path)]
    assert main(words) == Exit.CONTRACT
    eager = {"seed": 1, "enforce_eager": True}
    assert asked == [("folder", {"seed": 1}, []), ("folder", eager, ["decode", "steps"])]
    said = capsys.readouterr().out
    assert "decode: first different: layers.1.norm (RMSNorm), 4 of 9 rows" in said
    assert "steps: nothing differs without CUDA graphs and compilation" in said
    assert len(json.loads((tmp_path / "vllm.json").read_text())["without graphs"]) == 2


@pytest.mark.usefixtures("installed")
def test_over_ranks_answers_alone_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers are other processes there, whose modules have no hooks."""
    monkeypatch.setattr(check, "_child", lambda *arguments: record(found("batch", 1)))
    options = '{"tensor_parallel_size": 2}'
    words = ["verify", "--vllm", "folder", "--vllm-options", options, "--out", str(tmp_path)]
    assert main(words) == Exit.CONTRACT
    assert "no module is named: with tensor_parallel_size" in capsys.readouterr().out
    assert json.loads((tmp_path / "vllm.json").read_text())["checks"][0]["equal"] == 1


@pytest.mark.usefixtures("installed")
def test_answers_are_kept_where_naming_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def child(model: str, options: dict[str, Any], only: list[str]) -> dict[str, Any]:
        if only:
            raise ArgumentError("--vllm: vLLM ended with status 1")
        return record(found("batch", 1))

    monkeypatch.setattr(check, "_child", child)
    assert main(["verify", "--vllm", "folder", "--out", str(tmp_path)]) == Exit.USAGE
    assert json.loads((tmp_path / "vllm.json").read_text())["checks"][0]["equal"] == 1


@pytest.mark.usefixtures("installed")
def test_equal_answers_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_child", lambda *arguments: record(found("batch", 3)))
    arguments = argparse.Namespace(vllm="folder", vllm_options=None, out=tmp_path)
    assert check.run(arguments) == Exit.PASSED


@pytest.mark.parametrize(("words", "message"), [
    pytest.param(["--vllm", "m", "--wheel", "w"], "--wheel: cannot be combined", id="wheel"),
    pytest.param(["--vllm-options", "{}"], "--vllm-options: expected together", id="alone"),
    pytest.param(["--vllm", "m", "--vllm-options", "x"], "expected a JSON object", id="no-json"),
    pytest.param(["--vllm", "m", "--vllm-options", "3"], "a JSON object, got '3'", id="number"),
])  # fmt: skip
def test_wrong_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *words]) == Exit.USAGE
    assert message in capsys.readouterr().err
