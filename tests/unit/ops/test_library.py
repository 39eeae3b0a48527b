from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import flash_attn_deterministic as package
import pytest
from calls import CALLS

# Modules and subpackages that the import of the package must not import.
LATER = (
    *("bench", "deviation", "integrations", "reference", "verify", "__main__"),
    *("architectures", "info", "plan"),
)


def test_import_stays_light() -> None:
    script = (
        "import sys, torch; before = set(sys.modules); import flash_attn_deterministic;"
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "flash_attn_deterministic.interface" in loaded
    assert [name for name in loaded if not name.startswith("flash_attn_deterministic")] == []
    ours = {name.removeprefix("flash_attn_deterministic.") for name in loaded}
    assert [name for name in ours if any(f"{name}.".startswith(f"{x}.") for x in LATER)] == []


def test_import_is_short(tmp_path: Path) -> None:
    """Some 20 ms of CPU time on top of torch, beside a loop of about 10: machines differ."""
    script = """
import os, time, torch
for _ in range(8):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    times = [time.process_time()]
    sum(i * i for i in range(400_000))
    times.append(time.process_time())
    import flash_attn_deterministic
    times.append(time.process_time())
    print((times[2] - times[1]) / (times[1] - times[0]), flush=True)
    os._exit(0)
"""
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    _, *ratios = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True, text=True, check=True, env=environ,
    ).stdout.split()  # fmt: skip
    assert len(ratios) == 7
    assert min(map(float, ratios)) < 6


@pytest.mark.parametrize("argv", ["sys.argv = [None]", "del sys.argv"])
def test_import_in_a_program_that_embeds_python(argv: str) -> None:
    script = f"import sys; {argv}; import flash_attn_deterministic"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_import_sets_no_signal_handler() -> None:
    script = (
        "import signal, torch; found = lambda: [*map(signal.getsignal, signal.valid_signals())];"
        "before = found(); import flash_attn_deterministic; assert found() == before"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_lazy_names() -> None:
    script = (
        "import flash_attn_deterministic as f; assert 'explain' not in vars(f);"
        "assert {'explain', 'Plan', 'as_flash_attn'} <= set(dir(f));"
        "assert f.explain is f.explain and 'explain' in vars(f);"
        "from flash_attn_deterministic import Plan, as_flash_attn, explain;"
        "print(Plan.__module__, as_flash_attn.__module__, explain.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    modules = ("plan", "integrations.alias", "plan")
    expected = [f"flash_attn_deterministic.{module}" for module in modules]
    assert done.stdout.split() == expected, done.stderr


def test_star_import_of_a_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    names: dict[str, object] = {}
    exec("from flash_attn_deterministic import *", names)
    assert set(package.__all__) <= set(names)
    with pytest.raises(AttributeError, match="this is a source tree"):
        package.__version__  # noqa: B018


def test_all_functions_are_public() -> None:
    assert set(CALLS) <= set(package.__all__)
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__doc__
