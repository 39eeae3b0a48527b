"""What an adversary does to a candidate, and with what words the gate or the index refuses it.

Each wheel is made whole again (RECORD, manifest, report), as someone would who controls a machine
after the build.
"""

from __future__ import annotations

import io
import json
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import fake_wheel
import pytest
import release_samples
from fake_wheel import VERSION
from flash_attn_build.compile import build_folder
from flash_attn_build.wheel import archive, dist_info
from release_samples import MODULES, Project, edit

INFO = dist_info.folder(VERSION)
Files = dict[str, bytes]


def files_of(project: Project) -> Files:
    return archive.unpack(project.wheel.read_bytes())[0]


def with_files(change: Callable[[Files], object]) -> Callable[[Project], object]:
    """Changes files of the wheel, which is packed as the build does."""

    def attack(project: Project) -> None:
        files = files_of(project)
        change(files)
        project.exchange(fake_wheel.pack(project.root.parent / "evil", files))

    return attack


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Project], object]:
    """Changes the archive itself."""

    def attack(project: Project) -> None:
        project.wheel.write_bytes(change(project.wheel.read_bytes()))
        project.exchange(project.wheel)

    return attack


def adding(name: str, data: bytes = b"import evil\n") -> Callable[[Project], object]:
    return with_files(lambda files: files.update({name: data}))


def replacing(name: str, old: bytes, new: bytes) -> Callable[[Project], object]:
    return with_files(lambda files: files.update({name: files[name].replace(old, new, 1)}))


def packed(kind: int) -> Callable[[bytes], bytes]:
    """py.typed of another kind or mode."""

    def pack(data: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
            for item in old.infolist():
                if item.filename.endswith("py.typed"):
                    item.external_attr = kind << 16
                new.writestr(item, old.read(item))
        return out.getvalue()

    return pack


def other_tests(state: str) -> Callable[[Project], object]:
    """Lets the tests of a module end in another state."""

    def attack(project: Project) -> None:
        path, sha256 = project.report_path.with_name("gpu-tests.xml"), project.decide().wheel.sha256
        release_samples.write_gpu_tests(path, sha256, {MODULES[0]: state})

    return attack


def in_tests(old: str, new: str) -> Callable[[Project], object]:
    def attack(project: Project) -> None:
        path = project.report_path.with_name("gpu-tests.xml")
        path.write_text(path.read_text().replace(old, new))

    return attack


def another_version(project: Project) -> None:
    """1.2.3.0 is 1.2.3 to installers, and another file name to an index."""
    other = f"{VERSION}.0"
    files = {name.replace(VERSION, other): data for name, data in files_of(project).items()}
    project.wheel.unlink()
    project.wheel = fake_wheel.pack(project.dist, files, version=other)
    project.exchange(project.wheel)


BILL = f"{INFO}/sboms/flash-attn-deterministic.cdx.json"
METADATA, WHEEL, COMMANDS = (f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt"))
ATTACKS: dict[str, tuple[Callable[[Project], object], str]] = {
    "a path that climbs": (
        adding(f"{INFO}/entry_points.txt/../../evil.pth"), "evil.pth' does not belong"
    ),
    "a .pth": (adding("evil.pth"), "'evil.pth' does not belong"),
    "an absolute path": (adding("/etc/evil.pth"), "'/etc/evil.pth' does not belong"),
    "scripts": (adding(f"flash_attn_deterministic-{VERSION}.data/scripts/pip"), "does not belong"),
    "a licence that is code": (adding(f"{INFO}/licenses/evil.pth"), "evil.pth' does not belong"),
    "a second library": (adding("flash_attn_deterministic/_D.so"), "does not belong"),
    "a module more": (adding("flash_attn_deterministic/evil.py"), "from another tree: flash_"),
    "a module that hides another": (
        adding("flash_attn_deterministic/__init__.pyi"), "from another tree: flash_"
    ),
    "another __init__": (
        adding("flash_attn_deterministic/__init__.py"), "from another tree: flash_"
    ),
    "a requirement": (
        replacing(METADATA, b"Requires-Dist: ", b"Requires-Dist: evil\nRequires-Dist: "),
        "METADATA is not the one of this tree",
    ),
    "a requirement of elsewhere": (
        replacing(METADATA, b"torch>=2.10", b"torch @ https://evil.example/torch.whl"),
        "METADATA is not the one of this tree",
    ),
    "an extra": (
        replacing(METADATA, b"Provides-Extra: ", b"Provides-Extra: evil\nProvides-Extra: "),
        "METADATA is not the one of this tree",
    ),
    "a home page": (
        replacing(METADATA, b"Keywords: ", b"Project-URL: Home, https://evil.example\nKeywords: "),
        "METADATA is not the one of this tree",
    ),
    "a description": (
        replacing(METADATA, b"\n\n", b"\n\nRun evil.sh\n"), "METADATA is not the one of this tree"
    ),
    "a command": (
        replacing(COMMANDS, b"[console_scripts]", b"[console_scripts]\npip = evil:main"),
        "entry_points.txt is not the one of this tree",
    ),
    "a plugin": (
        replacing(COMMANDS, b"[console_scripts]", b"[pytest11]\ne = e\n[x]"),
        "entry_points.txt is not the one of this tree",
    ),
    "purelib": (replacing(WHEEL, b"false", b"true"), "WHEEL is not the one of this tree"),
    "another licence": (
        replacing(f"{INFO}/licenses/LICENSE", b"BSD", b"MIT"), "licenses/LICENSE is not the one of"
    ),
    "another bill": (
        replacing(BILL, b"CUTLASS", b"NOTHING"),
        "is not the one of this library",
    ),
    "a link": (with_bytes(packed(stat.S_IFLNK | 0o777)), "archive: is not what the build makes"),
    "set-user-ID": (with_bytes(packed(stat.S_IFREG | 0o4755)), "archive: is not what the build"),
    "a program before the archive": (with_bytes(lambda d: b"#!/bin/sh\n" + d), "archive: is not"),
    "bytes behind it": (with_bytes(lambda d: d[:-2] + b"\4\0evil"), "archive: is not what"),
    "a local header": (
        with_bytes(lambda d: d.replace(b"/py.typed", b"/evil.pth", 1)), "archive: cannot be read"
    ),
    "compressed": (
        with_bytes(lambda d: d.replace(b"PK\3\4\24\0\0\0\0", b"PK\3\4\24\0\0\0\10")), "archive: "
    ),
    "a bill that says another licence": (
        with_files(lambda files: files.update({BILL: files[BILL].replace(b'"MIT"', b'"WTFPL"')})),
        "is not the one of this library",
    ),
    "another spelling of the version": (
        another_version, f"name: expected flash_attn_deterministic-{VERSION}-py3"
    ),
    "nothing compiled in this build": (
        lambda p: edit(p.manifest_path, lambda m: m["build"].update(compiled_in_this_run=0)),
        "build.compiled_in_this_run: expected 2, got 0",
    ),
    "a flag of CXX": (
        lambda p: edit(p.manifest_path, lambda m: m.update(flags={"a cxx": ["-ffast-math"]})),
        "a cxx was compiled with '-ffast-math', which no CMake file has",
    ),
    "another nvcc of that version": (
        lambda p: edit(p.manifest_path, lambda m: m["build"].update(toolkit_sha256="0" * 64)),
        "is not the locked one of nvcc 13.0.88",
    ),
    "a GPU's name that is HTML": (
        lambda p: edit(
            p.report_path,
            lambda r: r["environment"].update(gpu="NVIDIA H200 <img src=x>|[x](https://evil)"),
            sign=True,
        ),
        "<img src=x>|[x](https://evil)', which is none of NVIDIA",
    ),
    "Hopper's kernels did not run": (
        lambda p: edit(
            p.report_path,
            lambda r: r.update(sections=release_samples.sections(family="not-applicable")),
            sign=True,
        ),
        "contract, family: not-applicable",
    ),
    "no GPU tests": (
        lambda p: p.report_path.with_name("gpu-tests.xml").unlink(), "gpu-tests.xml: is unreadable"
    ),
    "GPU tests that failed": (other_tests("failure"), "gpu-tests.xml: failed: 'tests.gpu.de"),
    "GPU tests that ended": (other_tests("error"), "gpu-tests.xml: failed: 'tests.gpu.de"),
    "GPU tests left out": (
        other_tests("skipped"), f"gpu-tests.xml: no test of {MODULES[0]} passed"
    ),
    "GPU tests of another wheel": (in_tests("sha256:", "sha256:0"), "gpu-tests.xml.name: expected"),
    "GPU tests that do not add up": (
        in_tests('failures="0"', 'failures="1"'), "counts failures that it does not list"
    ),
    "GPU tests in another encoding": (
        lambda p: (path := p.report_path.with_name("gpu-tests.xml")).write_bytes(
            path.read_text().encode("utf-16-le")
        ),
        "gpu-tests.xml: is unreadable",
    ),
    "two suites": (
        in_tests("</testsuites>", "<testsuite name='x' /></testsuites>"), "gpu-tests.xml: is unrea"
    ),
    "a report that says it is true": (
        lambda p: edit(p.report_path, lambda r: r.update(schema_version=True), sign=True),
        "1/verification.json: $.schema_version: 2 was expected",
    ),
    "a header that climbs": (
        lambda p: edit(
            p.manifest_path, lambda m: m.update(flags={"a cxx": ["-include", "./../evil.h"]})
        ),
        "a cxx was compiled with './../evil.h'",
    ),
    "GPU tests with entities": (
        in_tests("<testsuites>", '<!DOCTYPE x [<!ENTITY a "b">]><testsuites>'), "declares entities"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("attack", "expected"), ATTACKS.values(), ids=ATTACKS)
def test_the_gate_refuses(
    project: Project, attack: Callable[[Project], object], expected: str
) -> None:
    attack(project)
    assert expected in project.problems()


def test_what_failed_is_kept_apart_from_what_was_cut_short(project: Project) -> None:
    """The one stands against these bytes for good, the other only until it is run again."""
    edit(project.report_path, lambda r: r.update(complete=False, status="incomplete"), sign=True)
    assert "complete: expected True" in project.problems()
    assert project.decide().failed == ()
    shutil.rmtree(project.report_path.parent)
    assert project.decide().failed == ()
    release_samples.write_report(project.wheel, project.report_path)
    assert project.problems() == ""
    other_tests("failure")(project)
    (failed,) = project.decide().failed
    assert failed.startswith("1/verification.json: gpu-tests.xml: failed: ")
    release_samples.write_report(project.wheel, project.report_path)
    project.add_report(status="failed")
    assert project.decide().failed == ("2/verification.json: its status is 'failed'",)


@pytest.mark.parametrize(
    ("name", "value"),
    [("CXX", "g++ -ffast-math -DX"), ("CXX", "ccache g++ -O0"), ("CXXFLAGS", "-DX"),
     ("NVCC_APPEND_FLAGS", "-G"), ("CMAKE_ARGS", "-DA=1"), ("LD_PRELOAD", "/opt/evil.so"),
     ("SKBUILD_CMAKE_DEFINE", "A=1"), ("CUDAHOSTCXX", "g++"), ("CPATH", "/opt"),
     ("ZIG_LIB_DIR", "/")],
)  # fmt: skip
def test_flags_of_the_environment_are_recorded(name: str, value: str) -> None:
    harmless = {"CC": "ccache gcc-13", "CUDACXX": "/cuda/bin/nvcc", "CFLAGS": " ", "PATH": "-x",
                "CMAKE_BUILD_PARALLEL_LEVEL": "2"}  # fmt: skip
    assert build_folder.influences({**harmless, name: value}) == {name: value}


def test_the_report_that_is_published_holds_what_the_schema_names(project: Project) -> None:
    found = json.loads(project.report_path.read_text())
    found["script"] = "evil"
    project.report_path.write_text(json.dumps(found))
    assert "Additional properties are not allowed ('script' was unexpected)" in project.problems()


def test_a_candidate_that_nobody_touched(project: Project, tmp_path: Path) -> None:
    project.exchange(fake_wheel.pack(tmp_path, files_of(project)))
    assert project.problems() == ""
