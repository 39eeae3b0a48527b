"""Wrong calls of every function: the exception and its message, the same on every device.

`mistakes.json` has the wrong calls of each message, where {device} is that of the call and {other}
another one, {argument} and {value} are those in the name of a call, and those that only the CPU
finds, where the values of tensors are read. After a wanted change of a message,
`python -m tests.unit.interface.test_mistakes` writes the file again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from calls import CALLS, PAGES, READ_ONLY, Call, int32, normal, paged_call
from flash_attn_deterministic.checks.describe import shown
from flash_attn_deterministic.errors import FlashAttnError
from flash_attn_deterministic.ops import autograd
from flash_attn_deterministic.schemas import FORWARD
from flash_attn_deterministic.verify import tasks

RECORD = Path(__file__).with_name("mistakes.json")
MAKERS: dict[str, Callable[[], Call]] = {
    **{name: (lambda make=make: make(32)) for name, make in CALLS.items()},  # type: ignore[misc]
    "paged": paged_call,
}
OTHER = {"cpu": "meta", "meta": "cpu", "cuda": "cpu"}
Tensor = torch.Tensor


def _widened(tensor: Tensor) -> Tensor:
    return torch.cat([tensor] * 9, -1)[..., :264]


# What is done to a tensor, by the name of the mistake.
TO_TENSOR: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda t: [[1.0]],
    "none": lambda t: None,
    "rank": lambda t: t[0],
    "float32": lambda t: t.float(),
    "other-device": lambda t: torch.empty_like(t, device=OTHER[t.device.type]),
    "sparse": lambda t: torch.empty(
        t.shape, dtype=t.dtype, device=t.device, layout=torch.sparse_coo
    ),
    "no-batch": lambda t: t[:0],
    "no-heads": lambda t: t[..., :0, :],
    "odd-heads": lambda t: torch.cat([t, t], -2)[..., :3, :],
    "transposed": lambda t: t.transpose(-3, -2).contiguous(),
    "no-head-dim": lambda t: t[..., :0],
    "wide": _widened,
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
}
# Which function reads a flag or a length is seen from one value; how, from those of the first.
FLAGS = ("return_attn_probs", "return_max_logits", "return_softmax_lse", "rotary_interleaved")
# In the kernels' float32 these would be subnormal, or infinite after the factor log2(e).
TOO_SMALL, TOO_LARGE = 2.0**-126 * (1 - 2.0**-50), 2.0**127 * (1 + 2.0**-50)
# Numbers and flags, by the argument; functions without it are left out.
NUMBERS: dict[str, list[Any]] = {
    "dropout_p": [1.0, -0.1, math.nan, 10**5000, "0.5"],
    "softmax_scale": [0.0, -0.125, math.nan, math.inf, TOO_SMALL, TOO_LARGE, 10**400, "0.5"],
    "causal": [0.125, None, "yes"],
    **{name: [0.125] for name in FLAGS},
    "window_size": [
        *((1.0, 2.0), (1, 2, 3), (None, 0), {3, 0}, {1: 10**5000}, 5, "ab", None),
        # Messages show no values of tensors and arrays.
        *(torch.tensor([[3, 0]]), torch.zeros(2), {"left": torch.ones(3)}, np.ones(3)),
    ],
    "softcap": [math.nan, math.inf, 1e38, 1e-50, TOO_SMALL, 10**20000, None, "1"],
    "alibi_slopes": [1.0],
    "learnable_sink": [1.0],
    "deterministic": [0.5, "True"],
    "num_splits": [-1, 1.5, None],
    "split_size": [100, True, -64, 2**29 + 64, 10**5000, 1.5],
    "max_seqlen_q": [5.0, -1, 2**30, 2**63],
    **{name: [5.0, -1] for name in ("max_seqlen", "max_seqlen_k")},
    "cache_seqlens": [18, -1, 4.5],
}
# Other combinations, and wrong values in tensors, which are read on the CPU only.
LONGER_Q = {"q": normal(2, 5, 4, 32)}


def keys(tokens: int, heads: int = 2) -> dict[str, Any]:
    """New keys and values for the caches."""
    return {name: normal(2, tokens, heads, 32) for name in "kv"}


def heads_first(
    tokens_q: int, heads_q: int, tokens_k: int, heads_k: int, more: str = ""
) -> dict[str, Any]:
    """q, k and v of lengths, and of heads in the next dimension."""
    keys_and_values = {f"{n}{more}": normal(2, tokens_k, heads_k, 32) for n in "kv"}
    return {"q": normal(2, tokens_q, heads_q, 32), **keys_and_values}


def rotary(pairs: int) -> dict[str, Any]:
    """Tables that rotate so many pairs."""
    return {name: normal(20, pairs) for name in ("rotary_cos", "rotary_sin")}


def pages(size: int) -> dict[str, Any]:
    """Keys and values in pages of a size."""
    return {name: normal(4, size, 2, 32) for name in "kv"}


def table(*numbers: int) -> dict[str, Any]:
    """A block table of a page each."""
    return {"block_table": int32(*numbers).reshape(-1, 1)}


OTHERS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "flash_attn_func": [
        ("slopes-int", {"alibi_slopes": int32(1, 1, 1, 1)}),
        ("slopes-shape", {"alibi_slopes": torch.ones(3)}),
        ("slopes-half", {"alibi_slopes": torch.ones(4).half()}),
        ("sink-shape", {"learnable_sink": torch.ones(2)}),
        ("sink-rank", {"learnable_sink": torch.ones(1, 4)}),
        ("sink-double", {"learnable_sink": torch.ones(4).double()}),
        ("slopes-transposed", {"alibi_slopes": torch.ones(4, 2)}),
        ("head-dim-257", {name: normal(2, 5, 4, 257) for name in "qkv"}),
        # Heads before tokens, where they can be.
        ("heads-first", heads_first(8, 3, 2, 7)),
        ("heads-first-of-one-token", heads_first(1, 20, 1, 12)),
        ("heads-first-of-as-many", heads_first(8, 1, 8, 12)),
        ("heads-of-as-many-tokens", heads_first(8, 4, 8, 3)),
        ("scale-over-softcap-subnormal", {"softmax_scale": 2.0**-100, "softcap": 2.0**30}),
        ("scale-over-softcap-infinite", {"softmax_scale": 2.0**100, "softcap": 2.0**-30}),
    ],
    "flash_attn_qkvpacked_func": [("parts", {"qkv": normal(2, 5, 2, 4, 32)})],
    "flash_attn_kvpacked_func": [
        ("parts", {"kv": normal(2, 5, 3, 4, 32)}),
        ("heads", {"kv": normal(2, 5, 2, 3, 32)}),
    ],
    "flash_attn_with_kvcache": [
        ("heads-first", {**READ_ONLY, **heads_first(8, 3, 2, 7, "_cache")}),
        ("slopes-shape", {"alibi_slopes": torch.ones(3)}),
        ("sink-shape", {"learnable_sink": torch.ones(8)}),
        ("no-lengths", {"cache_seqlens": None}),
        ("rotary-without-k", {"k": None, "v": None}),
        ("rotary-short", {"rotary_cos": normal(19, 8)}),
        ("rotary-24", rotary(12)),
        ("rotary-48", rotary(24)),
        ("rotary-0", rotary(0)),
        ("rotary-queries", {**LONGER_Q, "cache_seqlens": 16}),
        (
            "rotary-window",
            {**LONGER_Q, "causal": False, "window_size": (2, -1), "cache_seqlens": 17},
        ),
        ("rotary-nothing-new", {**keys(0), "causal": False, "cache_seqlens": 20}),
        ("rotary-sin", {"rotary_sin": normal(21, 8)}),
        ("heads-of-k", keys(3, heads=4)),
        ("k-too-long", keys(21)),
        ("index-shape", {"cache_batch_idx": int32(1)}),
        ("leftpad-shape", {"cache_leftpad": int32(1)}),
        ("leftpad-dtype", {"cache_leftpad": torch.zeros(2)}),
        ("pages-of-17", {**PAGES, **{f"{n}_cache": x for n, x in pages(17).items()}}),
        ("pages-and-index", {**PAGES, "cache_batch_idx": int32(0, 1)}),
        ("pages-and-leftpad", {**PAGES, "cache_leftpad": int32(0, 1)}),
        ("pages-full", {**PAGES, "cache_seqlens": 30}),
        ("value-length", {"cache_seqlens": int32(9, 18)}),
        ("value-length-negative", {"cache_seqlens": int32(9, -4)}),
        ("value-length-read-only", {**READ_ONLY, "cache_seqlens": int32(20, 21)}),
        ("value-rotary", {**LONGER_Q, "cache_seqlens": int32(15, 16)}),
        ("value-index", {"cache_batch_idx": int32(0, 2)}),
        ("value-index-negative", {"cache_batch_idx": int32(-1, 0)}),
        ("value-leftpad", {"cache_leftpad": int32(0, 8)}),
        ("value-leftpad-negative", {"cache_leftpad": int32(0, -1)}),
        (
            "value-page",
            {**PAGES, "block_table": int32(0, 1, 2, 4).view(2, 2), "cache_seqlens": int32(9, 14)},
        ),
        ("value-page-negative", {**PAGES, "block_table": int32(0, 1, -1, 3).view(2, 2)}),
    ],
    "flash_attn_varlen_func": [
        ("heads-first", {"q": normal(8, 3, 32), **{n: normal(2, 7, 32) for n in "kv"}}),
        ("slopes-shape", {"alibi_slopes": torch.ones(2, 4)}),
        ("sink-shape", {"learnable_sink": torch.ones(8)}),
        ("seqused-shape", {"seqused_k": int32(1)}),
        ("seqused-dtype", {"seqused_k": torch.ones(3)}),
        ("leftpad-shape", {"leftpad_k": int32(1)}),
        ("starts-shape", {"cu_seqlens_k": int32(0, 16)}),
        ("starts-rank", {"cu_seqlens_q": int32(0, 3, 3, 8)[None]}),
        ("starts-empty", {"cu_seqlens_q": int32()}),
        ("no-sequence", {"cu_seqlens_q": int32(0), "cu_seqlens_k": int32(0)}),
        ("pages-without-table", {"k": normal(4, 16, 2, 32)}),
        ("value-first", {"cu_seqlens_q": int32(1, 3, 3, 8)}),
        ("value-first-k", {"cu_seqlens_k": int32(-1, 5, 7, 16)}),
        ("value-falls", {"cu_seqlens_k": int32(0, 5, 4, 16)}),
        ("value-falls-q", {"cu_seqlens_q": int32(0, 3, 2, 8)}),
        ("value-last", {"cu_seqlens_k": int32(0, 5, 7, 17)}),
        ("value-last-q", {"cu_seqlens_q": int32(0, 3, 4, 9)}),
        ("value-longest", {"max_seqlen_q": 4}),
        ("value-longest-k", {"max_seqlen_k": 8}),
        ("value-seqused", {"seqused_k": int32(6, 0, 0)}),
        ("value-seqused-negative", {"seqused_k": int32(4, -1, 9)}),
        ("value-leftpad", {"leftpad_k": int32(0, 3, 0)}),
        ("value-leftpad-negative", {"leftpad_k": int32(0, 0, -2)}),
        ("value-leftpad-used", {"seqused_k": int32(4, 2, 9), "leftpad_k": int32(5, 0, 0)}),
    ],
    "flash_attn_varlen_qkvpacked_func": [
        ("value-last", {"cu_seqlens": int32(0, 3, 9)}),
        ("value-longest", {"max_seqlen": 4}),
    ],
    "paged": [
        ("leftpad", {"leftpad_k": int32(0, 0, 0)}),
        ("pages-of-17", pages(17)),
        ("pages-of-0", pages(0)),
        ("table-shape", table(1, 2)),
        ("value-page", table(2, 0, 4)),
        ("value-page-negative", table(-1, 0, 3)),
        ("value-used", {"seqused_k": int32(17, 0, 0)}),
        ("value-falls", {"cu_seqlens_k": int32(0, 7, 5, 16)}),
        ("value-too-short", {"cu_seqlens_k": int32(0, 5, 7, 24), "max_seqlen_k": 17}),
    ],
}


def mistakes() -> Iterator[tuple[str, str, Callable[[str], dict[str, Any]]]]:
    """Function, name and a function of the device that makes the changed arguments."""
    for function, make in MAKERS.items():
        call = make()
        slots = {n: t for n, t in call.arguments.items() if isinstance(t, Tensor)}
        for argument, tensor in slots.items():
            for mistake, change in TO_TENSOR.items():
                try:
                    change(tensor)
                except (IndexError, RuntimeError):
                    continue

                def changed(
                    device: str, n: str = argument, t: Tensor = tensor, c: Any = change
                ) -> dict[str, Any]:
                    return {n: c(t.to(device))}

                yield function, f"{argument}-{mistake}", changed
        for argument, values in NUMBERS.items():
            if argument not in call.function.__annotations__:
                continue
            for value in values:
                name = f"{argument}={shown(value)}"
                yield function, name, lambda device, n=argument, v=value: {n: v}  # type: ignore[misc]
    for function, others in OTHERS.items():
        for name, changes in others:
            yield function, name, lambda device, c=changes: moved(c, device)  # type: ignore[misc]


def moved(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    """The arguments with their tensors on a device."""
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in arguments.items()}


def outcome(
    function: str, changes: Callable[[str], dict[str, Any]], device: str, run: Any = None
) -> str:
    """Name and message of the exception of a wrong call; "" if the call is right after all."""
    call = MAKERS[function]()
    good = moved(call.arguments, device)
    caches = [x for n, x in good.items() if n.endswith("_cache") and device != "meta"]
    before = [cache.clone() for cache in caches]
    try:
        (run or call.function)(**{**good, **changes(device)})
    except FlashAttnError as error:
        assert all(map(torch.equal, caches, before))
        shown = device if device != "cuda" else "cuda:0"
        text = str(error).replace(shown, "{device}")
        return f"{type(error).__name__}: " + text.replace(OTHER[device], "{other}")
    return ""


def template(case: str, text: str) -> str:
    """The message of a case, without the argument and the value that its name has."""
    mistake, _, value = case.partition(": ")[2].partition("=")
    argument = mistake.partition("-")[0]
    if f": {argument}: " in text:
        text = re.sub(rf"\b{argument}\b", "{argument}", text)
    return re.sub(rf"got {re.escape(value)}(?!\w)", "got {value}", text) if value else text


CASES = {f"{function}: {name}": (function, change) for function, name, change in mistakes()}
RECORDED: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {"messages": {}}
EXPECTED = {n: text for text, names in RECORDED["messages"].items() for n in names.split(" | ")}
DEVICES = [
    "cpu",
    "meta",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every op refuse its calls, as those for CUDA tensors do, in words of its own."""

    def refuse(*arguments: Any) -> NoReturn:
        raise RuntimeError("refused by the op")

    ops = SimpleNamespace(**dict.fromkeys(FORWARD, refuse))
    monkeypatch.setattr(autograd, "_OPS", ops)


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("function", MAKERS)
def test_mistakes_that_an_op_refuses(function: str) -> None:
    test_mistakes(function, "meta")
    with pytest.raises(RuntimeError, match="refused by the op") as caught:
        MAKERS[function]()()
    assert caught.value.__context__ is None


@pytest.mark.parametrize("function", MAKERS)
@pytest.mark.parametrize("device", DEVICES)
def test_mistakes(function: str, device: str) -> None:
    if device == "cuda" and not all(tasks.holds("cuda")((32, dtype)) for dtype in ("bf16", "fp16")):
        pytest.skip("this wheel holds no forward of head_dim 32")
    by_device = [] if device == "cpu" else RECORDED["only_on_the_cpu"].split(" | ")
    names = [n for n in EXPECTED if n.startswith(f"{function}: ") and n not in by_device]
    assert len(names) > 25
    wrong = {n: (template(n, outcome(*CASES[n], device)), EXPECTED[n]) for n in names}
    if device == "cuda":
        torch.cuda.synchronize()  # a kernel that had run on bad memory would show here
    assert {n: pair for n, pair in wrong.items() if pair[0] != pair[1]} == {}


@pytest.mark.parametrize("function", ["flash_attn_varlen_func", "paged", "flash_attn_with_kvcache"])
def test_wrong_values_in_a_compiled_call(function: str) -> None:
    torch._dynamo.reset()
    call: Any = torch.compile(MAKERS[function]().function, fullgraph=True, backend="aot_eager")
    names = [f"{function}: {name}" for name, _ in OTHERS[function] if name.startswith("value-")]
    found = {n: template(n, outcome(*CASES[n], "cpu", call)) for n in names}
    assert found == {n: EXPECTED[n] for n in names}


if __name__ == "__main__":
    messages: dict[str, list[str]] = {}
    for _name, _case in CASES.items():
        _text = template(_name, outcome(*_case, "cpu"))
        if _text:
            messages.setdefault(_text, []).append(_name)
    only = [n for names in messages.values() for n in names if not outcome(*CASES[n], "meta")]
    joined = {text: " | ".join(names) for text, names in messages.items()}
    record = {"messages": joined, "only_on_the_cpu": " | ".join(only)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
