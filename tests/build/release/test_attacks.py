"""All that is done to a release, and with what words the gate refuses it: one table.

A changed wheel is made whole again (RECORD, manifest, report), as someone would who controls a
machine after the build; a changed report has the digest of what it now says.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import stat
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_wheel
import pytest
import release_samples
from fake_wheel import VERSION
from flash_attn_build.compile import sources
from flash_attn_build.files import write_text
from flash_attn_build.wheel import archive, dist_info
from release_samples import MODULES, NATIVE, TAG, Change, Project, edit, put, sections

INFO = dist_info.folder(VERSION)
Files = dict[str, bytes]
Attack = Callable[[Project], object]


def files_of(project: Project) -> Files:
    return archive.unpack(project.wheel.read_bytes())[0]


def with_files(change: Callable[[Files], object]) -> Attack:
    """Changes files of the wheel, which is packed as the build does."""

    def attack(project: Project) -> None:
        files = files_of(project)
        change(files)
        project.exchange(fake_wheel.pack(project.root.parent / "evil", files))

    return attack


def adding(name: str, data: bytes = b"import evil\n") -> Attack:
    return with_files(lambda files: files.update({name: data}))


def replacing(name: str, old: bytes, new: bytes) -> Attack:
    return with_files(lambda files: files.update({name: files[name].replace(old, new, 1)}))


def with_bytes(change: Callable[[bytes], bytes], whole: bool = True) -> Attack:
    """Changes the archive itself; one that is not `whole` cannot be described again."""

    def attack(project: Project) -> None:
        project.wheel.write_bytes(change(project.wheel.read_bytes()))
        if whole:
            project.exchange(project.wheel)

    return attack


def recorded(**fields: Any) -> Attack:
    """The same files, py.typed recorded in another way."""

    def pack(data: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
            for item in old.infolist():
                content = old.read(item)
                for name, value in fields.items() if item.filename.endswith("py.typed") else ():
                    setattr(item, name, value)
                new.writestr(item, content)
        return out.getvalue()

    return with_bytes(pack)


def twice(data: bytes) -> bytes:
    out = io.BytesIO(data)
    with zipfile.ZipFile(out, "a") as new, pytest.warns(UserWarning, match="Duplicate name"):
        new.writestr("flash_attn_deterministic/py.typed", b"")
    return out.getvalue()


def another_version(project: Project) -> None:
    """1.2.3.0 is 1.2.3 to installers, and another file name to an index."""
    other = f"{VERSION}.0"
    files = {name.replace(VERSION, other): data for name, data in files_of(project).items()}
    project.wheel.unlink()
    project.wheel = fake_wheel.pack(project.dist, files, version=other)
    project.exchange(project.wheel)


def bill(change: Change) -> Attack:
    """Changes the bill of materials, laid out as the build does."""

    def rewritten(data: bytes) -> bytes:
        content = json.loads(data)
        change(content)
        return (json.dumps(content, indent=2) + "\n").encode()

    return with_files(lambda files: files.update({BILL: rewritten(files[BILL])}))


def manifest(change: Change) -> Attack:
    return lambda project: edit(project.manifest_path, change)


def no_manifest(text: str) -> Attack:
    return lambda project: project.manifest_path.write_text(text)


def tool(**versions: str) -> Attack:
    return manifest(lambda m: m["tools"].update(versions))


def report(change: Change) -> Attack:
    return lambda project: edit(project.report_path, change, sign=True)


def rows(**states: str) -> Change:
    return lambda content: content.update(sections=sections(**states))


def row(**values: object) -> Attack:
    """Changes the first row of the contract."""
    return report(lambda r: r["sections"][1]["data"]["checks"][0].update(values))


def second(damage: Callable[[str], str] = str, **changes: Any) -> Attack:
    """A report beside the one that proves the wheel: it may be of these bytes, and have failed."""

    def attack(project: Project) -> None:
        path = project.add_report(**changes)
        path.write_text(damage(path.read_text()))

    return attack


def gpu_tests(state: str) -> Attack:
    """Lets the tests of a module of tests/gpu end in another state."""

    def attack(project: Project) -> None:
        path, sha256 = project.report_path.with_name("gpu-tests.xml"), project.decide().wheel.sha256
        release_samples.write_gpu_tests(path, sha256, {MODULES[0]: state})

    return attack


def in_tests(old: str, new: str, encoding: str = "utf-8") -> Attack:
    def attack(project: Project) -> None:
        path = project.report_path.with_name("gpu-tests.xml")
        path.write_bytes(path.read_text().replace(old, new).encode(encoding))

    return attack


def ptx(change: Change) -> Attack:
    """Changes the report of PTX that is in the tree."""

    def attack(project: Project) -> None:
        edit(project.ptx_path, change, sign=True)
        project.tag()

    return attack


def policy(**changes: Any) -> Attack:
    return lambda project: setattr(project, "policy", replace(project.policy, **changes))


def tree(name: str, text: str | None, *commands: str, tag: bool = False) -> Attack:
    """Writes a file of the tree, or removes it, after commands of git; `tag`: commits that."""

    def attack(project: Project) -> None:
        for command in commands:
            project.git(*command.split())
        if text is None:
            (project.root / name).unlink()
        else:
            write_text(project.root / name, text)
        if tag:
            project.tag()

    return attack


def all_of(*attacks: Attack) -> Attack:
    return lambda project: [attack(project) for attack in attacks]


def git(*arguments: str) -> Attack:
    return lambda project: project.git(*arguments)


def removed(name: str) -> Attack:
    """Removes a file or a folder of the tree."""
    return lambda project: project.git("rm", "-r", "--quiet", "--", name)


def a_link_to_a_run(project: Project) -> None:
    run = project.add_report(status="failed").parent
    run.symlink_to(run.rename(project.root.parent / "elsewhere"))


def foreign(project: Project) -> None:
    project.wheel = project.wheel.rename(project.wheel.with_name("other-1.0-py3-none-any.whl"))


def executable(project: Project) -> None:
    project.git("config", "core.fileMode", "false")
    (project.root / "CMakeLists.txt").chmod(0o755)


PACKAGE = "flash_attn_deterministic"
BILL = f"{INFO}/sboms/flash-attn-deterministic.cdx.json"
METADATA, WHEEL, COMMANDS = (f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt"))
NO_METADATA = "METADATA is not the one of this tree"
NO_COMMANDS = "entry_points.txt is not the one of this tree"
NO_BILL = "is not the one of this library"
UNPACKED = "archive: is not what the build makes"
PYTHON, HIDDEN = f"python/{PACKAGE}/__init__.py", f"python/{PACKAGE}/hidden.py"
OTHER_PYTHON = "wheel: built from another tree: flash_attn_deterministic/"
CHANGED, EDITED = "tree: differs from its commit: ", ("README.md", "sm_80")
PTX_REPORT = "docs/results/verification-compute_80.json"
WHEELS: dict[str, tuple[Attack, str]] = {
    "a path that climbs": (adding(f"{INFO}/x/../../evil.pth"), "evil.pth' does not belong"),
    "a path that climbs in the package": (
        adding(f"{PACKAGE}/../evil.py"), "evil.py' does not belong"
    ),
    "two slashes": (adding(f"{PACKAGE}//evil.py"), "//evil.py' does not belong"),
    "a backslash": (adding(f"{PACKAGE}\\evil.py"), "evil.py' does not belong"),
    "a new line": (adding(f"{PACKAGE}/ev\nil.py"), "ev\\nil.py' does not belong"),
    "a .pth": (adding("evil.pth"), "'evil.pth' does not belong"),
    "an absolute path": (adding("/etc/evil.pth"), "'/etc/evil.pth' does not belong"),
    "another package": (adding("flash_attn_build/a.py"), "'flash_attn_build/a.py' does not"),
    "scripts": (adding(f"{PACKAGE}-{VERSION}.data/scripts/pip"), "scripts/pip' does not belong"),
    "a licence that is code": (adding(f"{INFO}/licenses/evil.pth"), "evil.pth' does not belong"),
    "a second library": (adding(f"{PACKAGE}/_D.so"), "_D.so' does not belong"),
    "a second bill": (adding(f"{INFO}/sboms/other.cdx.json"), "other.cdx.json' does not belong"),
    "a module more": (adding(f"{PACKAGE}/evil.py"), f"{OTHER_PYTHON}evil.py"),
    "a module that hides another": (adding(f"{PACKAGE}/__init__.pyi"), f"{OTHER_PYTHON}__init__"),
    "another __init__": (adding(f"{PACKAGE}/__init__.py"), f"{OTHER_PYTHON}__init__.py"),
    "a requirement": (
        replacing(METADATA, b"Requires-Dist: ", b"Requires-Dist: evil\nRequires-Dist: "),
        NO_METADATA,
    ),
    "a requirement of elsewhere": (
        replacing(METADATA, b"torch>=2.10", b"torch @ https://evil.example/torch.whl"), NO_METADATA
    ),
    "an extra": (
        replacing(METADATA, b"Provides-Extra: ", b"Provides-Extra: evil\nProvides-Extra: "),
        NO_METADATA,
    ),
    "a home page": (
        replacing(METADATA, b"Keywords: ", b"Project-URL: Home, https://evil.example\nKeywords: "),
        NO_METADATA,
    ),
    "a description": (replacing(METADATA, b"\n\n", b"\n\nRun evil.sh\n"), NO_METADATA),
    "a command": (
        replacing(COMMANDS, b"[console_scripts]", b"[console_scripts]\npip = evil:main"),
        NO_COMMANDS,
    ),
    "a plugin": (
        replacing(COMMANDS, b"[console_scripts]", b"[pytest11]\ne = e\n[x]"), NO_COMMANDS
    ),
    "purelib": (replacing(WHEEL, b"false", b"true"), "WHEEL is not the one of this tree"),
    "another licence": (
        replacing(f"{INFO}/licenses/LICENSE", b"BSD", b"MIT"), "licenses/LICENSE is not the one of"
    ),
    "another bill": (replacing(BILL, b"CUTLASS", b"NOTHING"), NO_BILL),
    "a bill that says another licence": (replacing(BILL, b'"MIT"', b'"WTFPL"'), NO_BILL),
    "a bill of another number": (replacing(BILL, b"urn:uuid:", b"urn:uuid:0"), NO_BILL),
    "a bill that lacks a component": (bill(lambda b: b["components"].pop()), NO_BILL),
    "a bill of one more": (
        bill(lambda b: b["components"].append({**b["components"][2], "name": "x"})), "'x'"
    ),
    "a bill without a hash": (
        bill(put("components.2.hashes.0.content", "")), "has no version or no hash"
    ),
    "a bill of another upstream": (bill(put("components.0.hashes.0.content", "0" * 64)), NO_BILL),
    "a bill without its graph": (bill(lambda b: b.pop("dependencies")), NO_BILL),
    "no bill": (bill(lambda b: b.clear()), "not the bill of materials of this build"),
    "a foreign name": (foreign, f"is not tagged v1.0: it has {TAG}"),
    "another spelling of the version": (
        another_version, f"name: expected {PACKAGE}-{VERSION}-py3"
    ),
    "a link": (recorded(external_attr=(stat.S_IFLNK | 0o777) << 16), UNPACKED),
    "set-user-ID": (recorded(external_attr=(stat.S_IFREG | 0o4755) << 16), UNPACKED),
    "a comment of a file": (recorded(comment=b"x"), UNPACKED),
    "an extra field": (recorded(extra=b"\1\1\0\0"), UNPACKED),
    "a file that is there twice": (with_bytes(twice), f"holds twice: ['{PACKAGE}/py.typed']"),
    "a hidden file": (
        with_bytes(
            lambda d: d.replace(b"PK\1\2", b"PK\3\4" + d[4:30] + b"x.pya" + b"PK\1\2", 1),
            whole=False,
        ),
        "archive: cannot be read",
    ),
    "a program before the archive": (with_bytes(lambda d: b"#!/bin/sh\n" + d), "archive: is not"),
    "bytes behind it": (with_bytes(lambda d: d[:-2] + b"\4\0evil"), "archive: is not what"),
    "a byte more": (with_bytes(lambda d: d + b"\0", whole=False), "wheel.sha256: expected"),
    "cut off": (with_bytes(lambda d: d[:-9], whole=False), "archive: cannot be read"),
    "nothing in it": (
        with_bytes(lambda d: b"PK\5\6" + bytes(18), whole=False), "archive: cannot be read"
    ),
    "a local header": (
        with_bytes(lambda d: d.replace(b"/py.typed", b"/evil.pth", 1)), "archive: cannot be read"
    ),
    "a local header of a compressed file": (
        with_bytes(lambda d: d.replace(b"PK\3\4\24\0\0\0\0", b"PK\3\4\24\0\0\0\10")), "archive: "
    ),
    "compressed": (
        recorded(compress_type=zipfile.ZIP_DEFLATED), "archive: holds compressed files; the build"
    ),
}  # fmt: skip
TREES: dict[str, tuple[Attack, str]] = {
    # A file that was put back after the build, before the tag, is not in git.
    **{
        f"{name} edited": (
            tree(name, f"{text} "), "wheel: built from another tree: "
            + next(part for part in sources.PARTS if name == part or name.startswith(f"{part}/")),
        )
        for name, text in NATIVE.items()
    },
    "other Python": (tree(PYTHON, "a = 1\n", tag=True), f"{OTHER_PYTHON}__init__.py"),
    "Python more": (tree(HIDDEN, "", tag=True), f"{OTHER_PYTHON}hidden.py"),
    "Python gone": (tree(PYTHON, None, tag=True), f"{OTHER_PYTHON}__init__.py"),
    "edited": (tree(*EDITED), f"{CHANGED}README.md"),
    "new": (tree("new file", ""), f"{CHANGED}new file"),
    "assume-unchanged": (
        tree(*EDITED, "update-index --assume-unchanged README.md"), f"{CHANGED}README.md"
    ),
    "skip-worktree": (
        tree(*EDITED, "update-index --skip-worktree README.md"), f"{CHANGED}README.md"
    ),
    "fsmonitor": (tree(*EDITED, "config core.fsmonitor true"), f"{CHANGED}README.md"),
    "excluded": (
        all_of(tree(".git/info/exclude", "hidden.py\n"), tree(HIDDEN, "")), f"{CHANGED}{HIDDEN}"
    ),
    "rules that ignore themselves": (
        tree(f"python/{PACKAGE}/.gitignore", "*\n"), f"{CHANGED}python/{PACKAGE}/.gitignore"
    ),
    "another folder named": (tree(HIDDEN, "", "config core.worktree ../docs"), CHANGED + HIDDEN),
    "a file that may be run suddenly": (executable, f"{CHANGED}CMakeLists.txt"),
    "another tag": (
        all_of(git("tag", "v0.0.2"), git("tag", "--delete", TAG)),
        f"is not tagged {TAG}: it has v0.0.2",
    ),
    "a commit more": (
        git("commit", "--quiet", "--allow-empty", "-m", "later"),
        f"is not tagged {TAG}: it has no tag",
    ),
    "no checkout": (
        lambda p: shutil.rmtree(p.root / ".git"), "tree: git does not know what is checked out"
    ),
    "no pin": (removed("cpp/upstream/upstream.json"), "tree: [Errno 2] No such file"),
    "a part of the sources gone": (
        removed("cmake"), "wheel: cannot be compared with manifest and tree (FileNotFoundError"
    ),
    "a README that names no sm_80": (
        lambda p: write_text(p.root / "README.md", "others"),
        "sm_80: unverified, but README.md does not name it",
    ),
    "another CUDA": (
        policy(wheels={"x86_64": "12.4.131"}),
        "made with CUDA 13.0.88, but the policy wants 12.4.131 for x86_64",
    ),
    "an architecture that nobody allowed": (
        policy(unverified_architectures={}),
        "sm_80: unverified, and the release policy does not allow",
    ),
    "an architecture that the wheel lacks": (
        policy(required_architectures={"sm_90": "NVIDIA H200", "sm_100": "NVIDIA B200"}),
        "sm_100: the wheel holds no machine code for it",
    ),
}  # fmt: skip
MANIFESTS: dict[str, tuple[Attack, str]] = {
    **{
        f"manifest: {path} {value}": (manifest(put(path, value)), f"manifest: {path}: expected ")
        for path, value in (
            ("wheel.sha256", "0" * 64), ("upstream.version", "9"), ("build.preset", "dev"),
            ("build.defines", ["A=1"]), ("build.environment", {"CXXFLAGS": "-ffast-math"}),
            ("build.locked", False), ("build.compiled_in_this_run", 0), ("sources.cpp", "0" * 64),
            ("deterministic", False), ("architectures", ["90-real"]), ("bits_version", 2),
            ("tools.nvcc", "12.4.131"), ("totals.translation_units", 3),
        )
    },
    "no upstream": (manifest(put("upstream", [])), "manifest: upstream.name: expected"),
    "no environment": (
        manifest(lambda m: m["build"].pop("environment")), "build.environment: expected {}"
    ),
    "no manifest": (
        lambda p: p.manifest_path.unlink(), "manifest.json is missing; the build writes it"
    ),
    "a manifest that is cut off": (no_manifest("{"), "manifest.json is unreadable"),
    "a manifest that is a list": (no_manifest("[]"), "manifest: expected schema 4"),
    "an older manifest": (manifest(put("schema", 1)), "manifest: expected schema 4"),
    **{
        f"{key} of another form": (
            manifest(put(key, "x")), "manifest: cannot be compared with the tree"
        )
        for key in ("build", "tools", "flags")
    },
    "another nvcc of that version": (
        manifest(put("build.toolkit_sha256", "0" * 64)), "is not the locked one of nvcc 13.0.88"
    ),
    "another linker": (tool(ziglang="0.13.0"), "built with ziglang 0.13.0, but locks/ has ziglang"),
    "headers": (tool(torch="2.12.0"), "built with torch 2.12.0"),
    "no nvcc of a package": (
        manifest(lambda m: m["tools"].pop("nvidia-cuda-nvcc")),
        "built with nvidia-cuda-nvcc None, but locks/ has nvidia-cuda-nvcc==13.0.88",
    ),
    "a package for an older Python": (tool(h11="2"), "built with h11 2, but locks/ has"),
    "an older Python": (tool(python="3.11.9"), "built with h11 None"),
    "fewer units": (
        manifest(lambda m: m["translation_units"].pop()), "1 CUDA translation units for 2 kernels"
    ),
    "another date": (
        manifest(put("build.source_date_epoch", 10**9)), "source_date_epoch is not the date in"
    ),
    **{
        f"compiled with {flags}": (
            manifest(put("flags", {"a cxx": flags})), f"a cxx was compiled with '{flags[-1]}'"
        )
        for flags in (
            ["-ffast-math"], ["-DX"], ["-include", "/opt/evil.h"], ["-include", "./../evil.h"]
        )
    },
}  # fmt: skip
REPORTS: dict[str, tuple[Attack, str]] = {
    **{
        f"report: {path} {value}": (report(put(path, value)), f"{path}: expected ")
        for path, value in (
            ("status", "incomplete"), ("wheel.sha256", "0" * 64), ("wheel.filename", "x.whl"),
            ("installed.matches_wheel", None), ("pins.upstream.version", "2.8.2"),
            ("pins.patches", []), ("build.cuda_toolkit", "12.4.131"), ("build.bits_version", 9),
        )
    },
    "a report that says it is true": (
        report(put("schema_version", True)), "1/verification.json: $.schema_version: 2 was expected"
    ),
    "a script": (report(put("script", "evil")), "('script' was unexpected)"),
    "a section failed": (report(rows(contract="failed")), "section contract: failed"),
    "a section not run": (report(rows(decode="not-run")), "section decode: not-run"),
    "a section left out": (report(lambda r: r["sections"].pop()), "$.sections: [{"),
    "a section more": (report(lambda r: r["sections"].append({"id": "x"})), "$.sections: "),
    "a section twice": (
        report(lambda r: r["sections"].insert(0, r["sections"][1])),
        "$.sections[0].id: 'environment' was",
    ),
    "a row failed": (report(rows(paged="failed")), "contract, paged: failed"),
    "a row that did not apply": (report(rows(heads="not-applicable")), "contract, heads: not-appl"),
    "Hopper's kernels did not run": (
        report(rows(family="not-applicable")), "contract, family: not-applicable"
    ),
    **{
        f"a row that the policy does not name: {state}": (
            all_of(policy(required_checks=("paged",)), report(rows(dropout=state))),
            f"contract, dropout: {state}",
        )
        for state in ("failed", "error")
    },
    "a row twice": (
        report(
            lambda r: (c := r["sections"][1]["data"]["checks"]).insert(
                0, {**c[0], "status": "failed"}
            )
        ),
        "contract, run-to-run: failed",
    ),
    "a row left out": (
        report(lambda r: r["sections"][1]["data"]["checks"].pop()), "contract, golden: missing"
    ),
    "a row without a case": (row(cases=0), "contract, run-to-run: error: passed without a case"),
    "a row with failed cases": (row(failed=3), "contract, run-to-run: failed: 3 cases"),
    "rows left out": (report(lambda r: r["sections"][1].update(data={})), "'checks' is a required"),
    "a status left out": (report(lambda r: r.pop("status")), "'status' is a required property"),
    "another architecture": (report(put("architectures.ran", ["sm_80"])), "sm_90: no complete, "),
    "another family": (report(put("architectures.ran", ["sm_90"])), "sm_90a: no complete, "),
    "an architecture that is not held": (
        report(put("architectures.ran", ["sm_90", "sm_90a", "sm_90b"])),
        "says that sm_90b ran, which the wheel does not hold",
    ),
    "an unverified architecture that is not named": (
        report(put("architectures.unverified", [])),
        "sm_80: unverified, but 1/verification.json does not say so",
    ),
    "an A100": (
        report(put("environment.compute_capability", "8.0")),
        "says that sm_90 ran on a GPU of compute capability 8.0",
    ),
    "an A100 that says 9.0": (
        report(put("environment.gpu", "NVIDIA A100")),
        "ran sm_90 on 'NVIDIA A100', which is none of NVIDIA",
    ),
    "a GPU's name that is HTML": (
        report(put("environment.gpu", "NVIDIA H200 <img src=x>|[x](https://evil)")),
        "<img src=x>|[x](https://evil)', which is none of NVIDIA",
    ),
    "no capability": (report(put("environment.compute_capability", None)), "capability None"),
    "kernels that are missing": (
        report(
            put("build.missing_kernels", [{"direction": "bwd", "dtype": "bf16", "head_dim": 64}])
        ),
        "says that the wheel lacks kernels",
    ),
    "a run that failed": (
        second(status="failed"), "2/verification.json: status: expected 'passed'"
    ),
    # Cut short: neither the report nor the section says that it failed.
    "a row that failed before the end": (
        second(complete=False, status="incomplete", sections=sections(chunk="failed")),
        "2/verification.json: contract, chunk: failed",
    ),
    "a row that ended in an error": (
        second(sections=sections(chunk="error")), "2/verification.json: contract, chunk: error"
    ),
    "a run that failed, of a later schema": (
        second(status="failed", later=1), "2/verification.json: its status is 'failed'"
    ),
    "a run that left no report": (
        lambda p: (p.dist / "verification" / "2").mkdir(), "2/verification.json: is unreadable"
    ),
    "a link to a run that failed": (a_link_to_a_run, "2/verification.json: its status is 'failed'"),
    "an edited report": (
        second(lambda t: t.replace("true", "false", 1)), "2/verification.json: was changed"
    ),
    "a truncated report": (second(lambda t: t[: len(t) // 2]), "2/verification.json: is unread"),
    "a nested report": (second(lambda t: "[" * 99_999), "2/verification.json: is unreadable"),
    "an emptied report": (second(lambda t: "{}"), "$: 'schema_version' is a required property"),
    "a report that is a list": (second(lambda t: "[]"), "$: [] is not of type 'object'"),
    "a report without its digest": (
        second(lambda t: t.replace('"digest"', '"other"')), "'other' was unexp"
    ),
    "a report that was made to name other bytes": (
        second(lambda t: re.sub('"sha256": "[0-9a-f]{8}', f'"sha256": "{"0" * 8}', t, count=1)),
        "2/verification.json: was changed",
    ),
    "no GPU tests": (
        lambda p: p.report_path.with_name("gpu-tests.xml").unlink(), "gpu-tests.xml: is unreadable"
    ),
    "GPU tests that failed": (gpu_tests("failure"), "gpu-tests.xml: failed: 'tests.gpu.de"),
    "GPU tests that ended": (gpu_tests("error"), "gpu-tests.xml: failed: 'tests.gpu.de"),
    "GPU tests left out": (gpu_tests("skipped"), f"gpu-tests.xml: no test of {MODULES[0]} passed"),
    "GPU tests of another wheel": (in_tests("sha256:", "sha256:0"), "gpu-tests.xml.name: expected"),
    "GPU tests that do not add up": (
        in_tests('failures="0"', 'failures="1"'), "counts failures that it does not list"
    ),
    "GPU tests in another encoding": (in_tests("", "", "utf-16-le"), "gpu-tests.xml: is unread"),
    "two suites": (
        in_tests("</testsuites>", "<testsuite name='x' /></testsuites>"), "gpu-tests.xml: is unrea"
    ),
    "GPU tests with entities": (
        in_tests("<testsuites>", '<!DOCTYPE x [<!ENTITY a "b">]><testsuites>'), "declares entities"
    ),
}  # fmt: skip
PTX: dict[str, tuple[Attack, str]] = {
    f"PTX: {name}": (ptx(change), f"sm_80: {PTX_REPORT}: {expected}")
    for name, change, expected in (
        ("cut short", put("complete", False), "complete: expected True"),
        ("another", put("architectures.ran_as_ptx", []), "did not run compute_80 as PTX"),
        ("nothing checked", put("sections", []), "$.sections: [] "),
        ("accuracy", rows(accuracy="not-run"), "section accuracy: not-run"),
        ("a row left out", rows(paged="not-run"), "contract, paged: not-run"),
        ("another section", rows(forward="failed"), "section forward: failed"),
        ("other patches", put("pins.patches", []), "pins.patches: expected"),
        ("other sources", put("build.sources.cpp", "0" * 64), "build.sources.cpp: expected"),
        ("another toolkit", put("build.cuda_toolkit", "12.4.131"), "build.cuda_toolkit: expected"),
        ("machine code beside it", put("build.architectures", ["80-virtual", "90-real"]),
         "build.architectures: expected"),
    )
}  # fmt: skip
PTX["PTX: no report"] = (removed("docs/results"), f"sm_80: {PTX_REPORT}: is unreadable")
ATTACKS = {**WHEELS, **TREES, **MANIFESTS, **REPORTS, **PTX}
assert len(ATTACKS) == sum(map(len, (WHEELS, TREES, MANIFESTS, REPORTS, PTX)))


@pytest.mark.parametrize(("attack", "expected"), ATTACKS.values(), ids=ATTACKS)
def test_the_gate_refuses(project: Project, attack: Attack, expected: str) -> None:
    attack(project)
    assert expected in project.problems()


def test_a_candidate_that_nobody_touched(project: Project, tmp_path: Path) -> None:
    project.exchange(fake_wheel.pack(tmp_path, files_of(project)))
    assert project.problems() == ""


@pytest.mark.parametrize(
    "harmless",
    [second(quick=True), second(wheel=release_samples.OTHER_WHEEL, status="failed")],
    ids=["quick", "of another wheel"],
)
def test_a_report_that_says_nothing_of_these_bytes(project: Project, harmless: Attack) -> None:
    harmless(project)
    assert project.problems() == ""


def test_what_failed_is_kept_apart_from_what_was_cut_short(project: Project) -> None:
    """The one stands against these bytes for good, the other only until it is run again."""
    report(lambda r: r.update(complete=False, status="incomplete"))(project)
    assert "complete: expected True" in project.problems()
    assert project.decide().failed == ()
    shutil.rmtree(project.report_path.parent)
    assert project.decide().failed == ()
    release_samples.write_report(project.wheel, project.report_path)
    assert project.problems() == ""
    gpu_tests("failure")(project)
    (failed,) = project.decide().failed
    assert failed.startswith("1/verification.json: gpu-tests.xml: failed: ")
    release_samples.write_report(project.wheel, project.report_path)
    # Whatever its layout: what failed is a matter of these bytes, not of the schema.
    layouts: tuple[dict[str, Any], ...] = ({}, {"later": 1})
    for layout in layouts:
        project.add_report(status="failed", **layout)
        assert project.decide().failed == ("2/verification.json: its status is 'failed'",)
    release_samples.write_gpu_tests(
        project.add_report(later=1).with_name("gpu-tests.xml"),
        project.decide().wheel.sha256,
        {MODULES[0]: "failure"},
    )
    assert "2/verification.json: gpu-tests.xml: failed" in "".join(project.decide().failed)
