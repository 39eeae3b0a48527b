from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import flash_attn_deterministic as package
import pytest
from flash_attn_deterministic import as_flash_attn, interface


@pytest.fixture(autouse=True)
def leaves_no_alias_behind() -> Iterator[None]:
    before = {name: module for name, module in sys.modules.items() if is_flash_attn(name)}
    yield
    assert {n: m for n, m in sys.modules.items() if is_flash_attn(n)} == before


def is_flash_attn(name: str) -> bool:
    return name == "flash_attn" or name.startswith("flash_attn.")


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Another package flash_attn, installed and imported before the alias."""
    folder = tmp_path / "flash_attn"
    (folder / "layers").mkdir(parents=True)
    (folder / "__init__.py").write_text("flash_attn_func = 'the other one'\n")
    (folder / "layers" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("flash_attn")
    importlib.import_module("flash_attn.layers")
    yield module
    for name in [name for name in sys.modules if is_flash_attn(name)]:
        del sys.modules[name]


@pytest.mark.parametrize("name", interface.__all__)
def test_the_alias_has_the_public_functions(name: str) -> None:
    with as_flash_attn():
        alias = importlib.import_module("flash_attn")
        module = importlib.import_module("flash_attn.flash_attn_interface")
    assert getattr(module, name) is getattr(alias, name) is getattr(package, name)


def test_every_form_of_import() -> None:
    code = """
        from flash_attn_deterministic import as_flash_attn
        as_flash_attn()
        import flash_attn.bert_padding
        from flash_attn import bert_padding
        from flash_attn.bert_padding import pad_input
        import flash_attn.flash_attn_interface as interface
        assert flash_attn.bert_padding.pad_input is bert_padding.pad_input is pad_input
        assert interface._wrapped_flash_attn_forward is interface._flash_attn_forward
        import importlib.util
        assert importlib.util.find_spec("flash_attn") is not None
        assert importlib.util.find_spec("flash_attn.layers") is None
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


@pytest.mark.parametrize("name", ["flash_attn.ops", "flash_attn.layers.rotary", "flash_attn_3.x"])
def test_a_module_that_is_not_in_the_alias_is_named_with_those_that_are(name: str) -> None:
    finders = list(sys.meta_path)
    words = r"flash_attn\S* is not in the alias .* has flash_attn, .*bert_padding, .*undo\(\)"
    with as_flash_attn():
        with pytest.raises(ModuleNotFoundError, match=words):
            importlib.import_module(name)
        # torch asks so whether FlashAttention-4 is there.
        assert importlib.util.find_spec("flash_attn.cute") is None
    assert sys.meta_path == finders
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'flash_attn"):
        importlib.import_module(name)


def test_alias_is_no_distribution() -> None:
    with as_flash_attn():
        version = importlib.import_module("flash_attn").__version__
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("flash-attn")
    assert version.endswith("+deterministic")


def test_undo_removes_the_alias() -> None:
    alias = as_flash_attn()
    assert importlib.util.find_spec("flash_attn") is not None
    alias.undo()
    assert importlib.util.find_spec("flash_attn") is None
    alias.undo()  # once more does nothing


def test_exception_in_the_block_removes_the_alias() -> None:
    with pytest.raises(KeyError), as_flash_attn():
        raise KeyError
    assert "flash_attn" not in sys.modules


def test_another_flash_attn_is_hidden_and_restored(other: ModuleType) -> None:
    with as_flash_attn():
        alias = importlib.import_module("flash_attn")
        assert alias.flash_attn_func != "the other one"
        with pytest.raises(ModuleNotFoundError, match=r"^flash_attn\.layers is not in the alias"):
            importlib.import_module("flash_attn.layers")
    assert importlib.import_module("flash_attn") is other
    assert "flash_attn.layers" in sys.modules


def test_several_may_overlap_in_any_order() -> None:
    first, second = as_flash_attn(), as_flash_attn()
    alias = importlib.import_module("flash_attn")
    first.undo()
    assert importlib.import_module("flash_attn") is alias
    first.undo()
    assert importlib.import_module("flash_attn") is alias
    second.undo()
    assert "flash_attn" not in sys.modules
