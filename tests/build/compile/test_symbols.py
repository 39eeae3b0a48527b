"""A library's imports against those of manylinux_2_28, on libraries that this machine links."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from flash_attn_build.compile import symbols
from flash_attn_build.files import ROOT

# What a C library of the given version would define.
LIBRARY = """
void old(void) {} void new_one(void) {} void theirs(void) {}
__asm__(".symver old,old@@GLIBC_2.28");
__asm__(".symver new_one,new_one@@GLIBC_2.38");
__asm__(".symver theirs,theirs@@OWN_9");
"""
VERSIONS = "GLIBC_2.28 { old; }; GLIBC_2.38 { new_one; }; OWN_9 { theirs; };"


def link(folder: Path, *calls: str) -> Path:
    """Links a library that calls these functions of LIBRARY."""
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.28", "-shared"]
    (folder / "versions").write_text(VERSIONS)
    (folder / "own.c").write_text(LIBRARY)
    options = [f"-Wl,--version-script={folder}/versions", "-Wl,-soname,libc.so.9"]
    own = folder / "libown.so"
    subprocess.run([*zig, *options, "-o", own, folder / "own.c"], check=True)
    lines = [f"void {name}(void);\nvoid call_{name}(void) {{ {name}(); }}\n" for name in calls]
    (folder / "lib.c").write_text("".join(lines))
    subprocess.run([*zig, "-o", folder / "lib.so", folder / "lib.c", own], check=True)
    return folder / "lib.so"


def test_what_is_too_new_is_named(tmp_path: Path) -> None:
    """Of libraries that the policy does not speak of, every version is fine."""
    assert list(symbols.too_new(link(tmp_path, "old", "theirs"))) == []
    assert list(symbols.too_new(link(tmp_path, "old", "new_one", "theirs"))) == [
        "new_one (GLIBC_2.38 of libc.so.9)"
    ]


def test_the_link_fails_with_the_names(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flash_attn_build.compile.symbols"]
    command.append(str(link(tmp_path, "new_one")))
    environ = {"PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 4
    assert "what manylinux_2_28 does not have: new_one (GLIBC_2.38 of libc.so.9)" in done.stderr
