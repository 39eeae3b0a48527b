"""Wrong calls of every function: the exception and its message, the same on every device.

`mistakes.json` has the wrong calls of each message, where {device} is that of the call and {other}
another one, and those that only the CPU finds, where the values of tensors are read. After a wanted
change of a message, `python -m tests.unit.interface.test_mistakes` writes the file again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from calls import CALLS, Call, int32, normal, paged_call
from flash_attn_deterministic.errors import FlashAttnError
from flash_attn_deterministic.ops import autograd
from flash_attn_deterministic.schemas import FORWARD

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
    "float": lambda t: 0.5,
    "rank": lambda t: t[0],
    "other-dtype": lambda t: t.long() if t.dtype == torch.int32 else t.half(),
    "float32": lambda t: t.float(),
    "other-device": lambda t: torch.empty_like(t, device=OTHER[t.device.type]),
    "sparse": lambda t: torch.empty(
        t.shape, dtype=t.dtype, device=t.device, layout=torch.sparse_coo
    ),
    "first": lambda t: t[:1],
    "no-batch": lambda t: t[:0],
    "no-heads": lambda t: t[..., :0, :],
    "odd-heads": lambda t: torch.cat([t, t], -2)[..., :3, :],
    "transposed": lambda t: t.transpose(-3, -2).contiguous(),
    "narrow": lambda t: t[..., :-8].contiguous(),
    "no-head-dim": lambda t: t[..., :0],
    "wide": _widened,
    "shorter": lambda t: t[:, 1:],
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
}
FLAGS: list[Any] = [0.125, None, "yes"]
# Numbers and flags, by the argument; functions without it are left out.
NUMBERS: dict[str, list[Any]] = {
    "dropout_p": [1.0, -0.1, math.nan, "0.5", None],
    "softmax_scale": [0.0, -0.125, math.nan, math.inf, 1e-40, "0.5"],
    "causal": FLAGS,
    "window_size": [(1.0, 2.0), (1,), 5, "ab", None],
    "softcap": [math.nan, math.inf, 1e-40, 1e38, None, "1"],
    "alibi_slopes": [1.0],
    "deterministic": [0.5, "True"],
    "return_attn_probs": FLAGS,
    "return_softmax_lse": FLAGS,
    "rotary_interleaved": FLAGS,
    "num_splits": [-1, 1.5, None],
    "split_size": [100, -64, 2**30, 1.5, "512"],
    "max_seqlen": [5.0, -1, 2**30, None],
    "max_seqlen_q": [5.0, -1, 2**30, None],
    "max_seqlen_k": [5.0, -1, 2**30, None],
    "cache_seqlens": [18, -1, 4.5],
}
# Other combinations, and wrong values in tensors, which are read on the CPU only.
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("flash_attn_func", "slopes-int", {"alibi_slopes": int32(1, 1, 1, 1)}),
    ("flash_attn_func", "slopes-shape", {"alibi_slopes": torch.ones(3)}),
    ("flash_attn_varlen_func", "slopes-shape", {"alibi_slopes": torch.ones(2, 4)}),
    ("flash_attn_with_kvcache", "slopes-shape", {"alibi_slopes": torch.ones(3)}),
    ("flash_attn_with_kvcache", "no-lengths", {"cache_seqlens": None}),
    ("flash_attn_with_kvcache", "rotary-without-k", {"k": None, "v": None}),
    ("flash_attn_with_kvcache", "rotary-dim", {"rotary_cos": normal(20, 4)}),
    ("flash_attn_with_kvcache", "rotary-short", {"rotary_cos": normal(19, 8)}),
    ("flash_attn_with_kvcache", "index-shape", {"cache_batch_idx": int32(1)}),
    ("flash_attn_with_kvcache", "leftpad-shape", {"cache_leftpad": int32(1)}),
    (
        "flash_attn_with_kvcache",
        "pages-of-17",
        {
            "k_cache": normal(4, 17, 2, 32),
            "v_cache": normal(4, 17, 2, 32),
            "block_table": int32(0, 1).reshape(2, 1),
        },
    ),
    (
        "flash_attn_with_kvcache",
        "pages-and-index",
        {
            "k_cache": normal(4, 16, 2, 32),
            "v_cache": normal(4, 16, 2, 32),
            "block_table": int32(0, 1).reshape(2, 1),
            "cache_batch_idx": int32(0, 1),
        },
    ),
    (
        "flash_attn_with_kvcache",
        "pages-and-leftpad",
        {
            "k_cache": normal(4, 16, 2, 32),
            "v_cache": normal(4, 16, 2, 32),
            "block_table": int32(0, 1).reshape(2, 1),
            "cache_leftpad": int32(0, 1),
        },
    ),
    ("paged", "leftpad", {"leftpad_k": int32(0, 0, 0)}),
    ("paged", "pages-of-17", {"k": normal(4, 17, 2, 32), "v": normal(4, 17, 2, 32)}),
    ("paged", "table-shape", {"block_table": int32(1, 2).reshape(2, 1)}),
    ("flash_attn_varlen_func", "seqused-shape", {"seqused_k": int32(1)}),
    ("flash_attn_varlen_func", "leftpad-shape", {"leftpad_k": int32(1)}),
    ("flash_attn_varlen_func", "starts-shape", {"cu_seqlens_k": int32(0, 16)}),
    ("flash_attn_varlen_func", "no-sequence", {"cu_seqlens_q": int32(0), "cu_seqlens_k": int32(0)}),
    ("flash_attn_varlen_func", "value-first", {"cu_seqlens_q": int32(1, 3, 3, 8)}),
    ("flash_attn_varlen_func", "value-falls", {"cu_seqlens_k": int32(0, 5, 4, 16)}),
    ("flash_attn_varlen_func", "value-last", {"cu_seqlens_k": int32(0, 5, 7, 17)}),
    ("flash_attn_varlen_func", "value-longest", {"max_seqlen_q": 4}),
    ("flash_attn_varlen_func", "value-seqused", {"seqused_k": int32(6, 0, 0)}),
    ("flash_attn_varlen_func", "value-leftpad", {"leftpad_k": int32(0, 3, 0)}),
    ("flash_attn_varlen_qkvpacked_func", "value-last", {"cu_seqlens": int32(0, 3, 9)}),
    ("flash_attn_varlen_qkvpacked_func", "value-longest", {"max_seqlen": 4}),
    ("paged", "value-page", {"block_table": int32(2, 0, 4).reshape(3, 1)}),
    ("paged", "value-used", {"seqused_k": int32(17, 0, 0)}),
    ("flash_attn_with_kvcache", "value-length", {"cache_seqlens": int32(9, 18)}),
    ("flash_attn_with_kvcache", "value-index", {"cache_batch_idx": int32(0, 2)}),
    ("flash_attn_with_kvcache", "value-leftpad", {"cache_leftpad": int32(0, 8)}),
]


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
                name = f"{argument}={value!r}"
                yield function, name, lambda device, n=argument, v=value: {n: v}  # type: ignore[misc]
    for function, name, changes in OTHERS:
        yield function, name, lambda device, c=changes: moved(c, device)  # type: ignore[misc]


def moved(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    """The arguments with their tensors on a device."""
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in arguments.items()}


def outcome(function: str, changes: Callable[[str], dict[str, Any]], device: str) -> str:
    """Name and message of the exception of a wrong call; "" if the call is right after all."""
    call = MAKERS[function]()
    arguments = {**moved(call.arguments, device), **changes(device)}
    try:
        call.function(**arguments)
    except FlashAttnError as error:
        shown = device if device != "cuda" else "cuda:0"
        text = str(error).replace(shown, "{device}")
        return f"{type(error).__name__}: " + text.replace(OTHER[device], "{other}")
    return ""


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
    by_device = [] if device == "cpu" else RECORDED["only_on_the_cpu"].split(" | ")
    names = [n for n in EXPECTED if n.startswith(f"{function}: ") and n not in by_device]
    assert len(names) > 40
    wrong = {n: (outcome(*CASES[n], device), EXPECTED[n]) for n in names}
    assert {n: pair for n, pair in wrong.items() if pair[0] != pair[1]} == {}


if __name__ == "__main__":
    messages: dict[str, list[str]] = {}
    for _name, _case in CASES.items():
        _text = outcome(*_case, "cpu")
        if _text:
            messages.setdefault(_text, []).append(_name)
    only = [n for names in messages.values() for n in names if not outcome(*CASES[n], "meta")]
    joined = {text: " | ".join(names) for text, names in messages.items()}
    record = {"messages": joined, "only_on_the_cpu": " | ".join(only)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
