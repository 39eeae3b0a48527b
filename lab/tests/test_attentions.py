"""The registry: every attention that runs on a CPU, and what is said of those that can't."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from flash_attn_deterministic_lab.attentions import (
    ATTENTIONS,
    Packed,
    find_attention,
    flashmla,
    others,
    settings_of,
)
from flash_attn_deterministic_lab.attentions.attention import OPTIONS
from flash_attn_deterministic_lab.errors import ArgumentError, UnavailableError

ON_CPU = [name for name, one in ATTENTIONS.items() if "cpu" in one.devices]
PLAIN = [name for name in ON_CPU if not name.startswith("flex")]  # others take time to compile


def inputs(seqlen_q: int = 20, seqlen_k: int = 33) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2))
    return [torch.randn(2, *size, 32, generator=generator).bfloat16() for size in sizes]


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, lengths: list[int]
) -> torch.Tensor:
    """Each sequence of its own length, in float64, causal masks aligned to the bottom right."""
    outs = []
    for one, length in enumerate(lengths):
        rows, keys = torch.arange(q.shape[1])[:, None], torch.arange(length)
        mask = keys <= rows + length - q.shape[1] if causal else keys >= 0
        tensors = (q[one], k[one, :length], v[one, :length])
        q1, k1, v1 = (tensor.transpose(0, 1).double() for tensor in tensors)
        outs.append(
            torch.nn.functional.scaled_dot_product_attention(
                q1, k1, v1, attn_mask=mask.expand(q.shape[1], length), enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.stack(outs)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", PLAIN)
def test_each_is_attention_with_its_mask_at_the_bottom_right(name: str, causal: bool) -> None:
    q, k, v = inputs()
    attention = find_attention(name)
    with attention.inside():
        out = attention(q, k, v, causal=causal)
    torch.testing.assert_close(out.double(), exact(q, k, v, causal, [33, 33]), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "name", ["ours-served", *(n for n in PLAIN if "seqlens_k" in ATTENTIONS[n].takes)]
)
def test_lengths_mean_the_same_in_all(name: str, causal: bool) -> None:
    q, k, v = inputs(3)
    attention = find_attention(name)
    lengths = torch.tensor([9, 30], dtype=torch.int32)
    with attention.inside():
        out = attention(q, k, v, causal=causal, seqlens_k=lengths)
    torch.testing.assert_close(out.double(), exact(q, k, v, causal, [9, 30]), atol=0.02, rtol=0.02)


# torch compiles Flex on the CPU with g++ and headers that a Debian without python3-dev lacks.
HEADER = Path(sysconfig.get_path("include"), "Python.h")


@pytest.mark.skipif(not (shutil.which("g++") and HEADER.exists()), reason="no g++ or no Python.h")
def test_flex_is_attention_too() -> None:
    q, k, v = inputs()
    lengths = torch.tensor([9, 30], dtype=torch.int32)
    flex = ATTENTIONS["flex"]
    with flex.inside():
        out = flex(q[:, :3], k, v, causal=True, seqlens_k=lengths)
    expected = exact(q[:, :3], k, v, True, [9, 30])
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn-deterministic"])
def test_pages_of_packed_sequences_reach_flash_attention_2(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {}

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: object) -> object:
        given.update(arguments)
        return q, None

    module = types.ModuleType("flash_attn")
    module.__dict__.update(flash_attn_func=None, flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.delenv("FA2_BASELINE", raising=False)
    q, k, v = inputs()
    packed, table = Packed.of([20, 20], [33, 33], "cpu"), torch.zeros(2, 3, dtype=torch.int32)
    out = ATTENTIONS[name].make()(q, k, v, packed=packed, block_table=table, window=(4, 0))
    assert out is q
    assert given == {
        "block_table": table, "window_size": (4, 0), "deterministic": name != "flash_attn",
        **packed.arguments(),
    }  # fmt: skip


def test_kernels_of_flash_attention_3_are_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def bwd(dout: torch.Tensor, *tensors: torch.Tensor, **given: object) -> None:
        calls.append(given)
        for number, gradient in enumerate(tensors[5:], 1):
            gradient.fill_(number)

    def fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: object) -> list[object]:
        calls.append(given)
        return [q + 1, torch.zeros(1), None, None]

    namespace = types.SimpleNamespace(fwd=fwd, bwd=bwd)
    monkeypatch.setattr(torch.ops, "flash_attn_3", namespace, raising=False)
    monkeypatch.setenv("FA3_LIBRARY", "here")
    leaves = [tensor.requires_grad_() for tensor in inputs()]
    out = ATTENTIONS["fa3-deterministic"].make()(*leaves, causal=True, scale=0.5, window=(8, 0))
    found = torch.autograd.grad(out.sum(), leaves)
    assert [float(gradient.mean()) for gradient in found] == [1, 2, 3]
    given = {"is_causal": True, "softmax_scale": 0.5, "window_size_left": 8, "window_size_right": 0}
    assert calls == [{"num_splits": 1, **given}, {"deterministic": True, **given}]


def test_flashmla_plans_once_for_the_same_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def decode(q: torch.Tensor, k: torch.Tensor, *given: object) -> tuple[object, ...]:
        calls.append(given)
        return q[..., :512], None, "metadata", "splits"

    monkeypatch.setattr(flashmla, "load_library", lambda *_: None)
    monkeypatch.setenv("FLASHMLA_LIBRARY", "here")
    namespace = types.SimpleNamespace(dense_decode_fwd=decode)
    monkeypatch.setattr(torch.ops, "_flashmla_C", namespace, raising=False)
    q, k = torch.zeros(2, 1, 16, 576), torch.zeros(4, 64, 1, 576)
    lengths, table = torch.full((2,), 100), torch.zeros(2, 2)
    attend = ATTENTIONS["flashmla"].make()
    options = {"causal": True, "scale": 0.5, "seqlens_k": lengths, "block_table": table}
    for each in (q, q.clone(), q[:, :, :8]):
        assert attend(each, k, k[..., :512], **options).shape[-1] == 512
    of_all = (512, lengths, table, 0.5, True)
    assert [given[:5] for given in calls] == [of_all] * 3
    assert [given[5:] for given in calls] == [
        (None, None, None), ("metadata", "splits", None), (None, None, None)
    ]  # fmt: skip
    with pytest.raises(UnavailableError, match="FlashMLA takes pages of keys alone"):
        attend(q, k, k[..., :512].clone(), **options)


class Planned:
    """A wrapper of FlashInfer: the plan of pages, and attention over them."""

    made: ClassVar[list[dict[str, object]]] = []

    def __init__(self, workspace: torch.Tensor, layout: str, **given: object) -> None:
        assert (layout, workspace.dtype) == ("NHD", torch.uint8)
        self.made.append(given)

    def plan(self, *tensors: Any, causal: bool = False, **options: object) -> None:
        *first, starts, indices, last, nheads, nheads_k, head_dim, page_size = tensors
        assert (nheads, nheads_k, head_dim) == (4, 2, 32)
        self.made[-1].update(options, page_size=page_size)
        self.causal, self.counts = causal, starts.diff().tolist()
        self.rows = first[0].diff().tolist() if first else [1] * len(self.counts)
        self.indices, self.lengths = indices, [
            (count - 1) * page_size + own for count, own in zip(self.counts, last, strict=True)
        ]  # fmt: skip

    def run(self, rows: torch.Tensor, cache: tuple[torch.Tensor, ...]) -> torch.Tensor:
        found = []
        sides = torch.split(rows, self.rows), torch.split(self.indices, self.counts), self.lengths
        for q, pages, length in zip(*sides, strict=True):
            k, v = (side[pages.long()].flatten(0, 1)[None, :length] for side in cache)
            found.append(exact(q[None], k, v, self.causal, [length])[0])
        return torch.cat(found)


@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer-fixed-split"])
def test_flashinfer_takes_pages(name: str, seqlen_q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flashinfer")
    kinds = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    module.__dict__.update(dict.fromkeys(kinds, Planned))
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(others, "_WORKSPACE_BYTES", 16)
    monkeypatch.setattr(Planned, "made", [])
    monkeypatch.setitem(vars(ATTENTIONS[name]), "function", ATTENTIONS[name].make())
    q, k, v = inputs(seqlen_q, 48)
    lengths = torch.tensor([35, 48], dtype=torch.int32)
    for attend, of in ((find_attention(f"{name}-served").make(), {"seqlens_k": lengths}),
                       (ATTENTIONS[name].function, {})):  # fmt: skip
        for _ in range(2):  # the same lengths again: in dense calls of one plan
            out = attend(q, k, v, causal=True, **of)
            expected = exact(q, k, v, True, [35, 48] if of else [48, 48])
            torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)
    plans = Planned.made
    assert len(plans) == 3
    assert {plan.get("fixed_split_size") for plan in plans} == {
        2048 // 16 if name != "flashinfer" else None
    }
    with pytest.raises(UnavailableError, match="multiple of 16 keys, got 33"):
        ATTENTIONS[name].function(*inputs())
    with pytest.raises(UnavailableError, match="lengths of keys in pages alone"):
        ATTENTIONS[name].function(q, k, v, seqlens_k=lengths)


def test_splits_of_ours_are_a_name() -> None:
    q, k, v = inputs(20, 200)
    assert torch.equal(find_attention("ours@256")(q, k, v), ATTENTIONS["ours"](q, k, v))
    assert not torch.equal(find_attention("ours@64")(q, k, v), ATTENTIONS["ours"](q, k, v))


def test_settings_and_what_they_run_in(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [one.name for one in settings_of(ATTENTIONS["sdpa-math"])]
    assert names == ["sdpa-math", "sdpa-math-deterministic"]
    with ATTENTIONS[names[1]].inside():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv("FLASH_ATTENTION_FAMILY", raising=False)
    with ATTENTIONS["ours-sm80"].inside():
        assert os.environ["FLASH_ATTENTION_FAMILY"] == "sm80"
    assert "FLASH_ATTENTION_FAMILY" not in os.environ
    for attention in ATTENTIONS.values():
        assert all(one.name in ATTENTIONS for one in settings_of(attention))
        assert attention.takes <= {*OPTIONS, "gradients", "float32"}


def test_what_an_attention_does_not_take_is_named() -> None:
    q, k, v = inputs()
    with pytest.raises(UnavailableError, match="sdpa-flash takes no windows"):
        ATTENTIONS["sdpa-flash"](q, k, v, window=(8, 0))
    with pytest.raises(UnavailableError, match="fa3 does not run on cpu"):
        ATTENTIONS["fa3"](q, k, v)
    with pytest.raises(UnavailableError, match="flashinfer has no backward"):
        ATTENTIONS["flashinfer"].gradients(q, k, v, q)


@pytest.mark.parametrize(
    ("name", "module"),
    [("flash_attn", "flash_attn"), ("fa4", "flash_attn.cute"), ("flashinfer", "flashinfer"),
     ("fa3", "flash_attn_interface"), ("ours", "flash_attn_deterministic")],
)  # fmt: skip
def test_a_package_that_is_not_there_is_named(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delenv("FA3_LIBRARY", raising=False)
    with pytest.raises(UnavailableError, match=r"flash.*(cannot be imported|is not installed)"):
        ATTENTIONS[name].make()


def test_a_namespace_in_the_way_of_flash_attention_2_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention-4 installs flash_attn/cute, without flash_attn/__init__.py."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(UnavailableError, match="namespace package of another project here") as e:
        ATTENTIONS["flash_attn"].make()
    assert str(tmp_path) in str(e.value)
    monkeypatch.delitem(sys.modules, "flash_attn")


@pytest.mark.parametrize(
    ("name", "variable"),
    [("fa3", "FA3_LIBRARY"), ("flash_attn", "FA2_BASELINE"), ("flashmla", "FLASHMLA_LIBRARY")],
)
def test_a_library_that_does_not_load_is_named(
    name: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "peer.so").write_bytes(b"no library")
    monkeypatch.setenv(variable, str(tmp_path / "peer.so"))
    with pytest.raises(UnavailableError, match=r"peer\.so cannot be loaded"):
        ATTENTIONS[name].make()


def test_functions_of_a_module_and_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def attend(q, k, v, causal, seqlens_k=None):\n    return q, k\n"
    (tmp_path / "attention_of_mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    q, k, v = inputs()
    for name in ("attention_of_mine:attend", f"{tmp_path}/attention_of_mine.py:attend"):
        found = find_attention(name)
        assert found(q, k, v) is q
        assert found.takes == {"seqlens_k", "gradients", "float32"}
    module = types.ModuleType("no_signature")
    module.attend = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "no_signature", module)
    assert "seqlens_k" not in find_attention("no_signature:attend").takes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "--attention: expected ours, .* or MODULE:FUNCTION, got 'nothing'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        (":f", "expected MODULE:NAME or .*, got ':f'"),
        ("math:pi", "expected math:pi to be a callable"),
    ],
)
def test_names_that_are_none(name: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        find_attention(name)
