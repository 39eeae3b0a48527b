"""With what words the gate refuses what is done to a release: one table.

A changed wheel is made whole again (RECORD, manifest, report), as someone would who controls a
machine after the build; a changed report has the digest of what it now says.
"""

from __future__ import annotations

import io
import json
import os
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
from flash_attn_build.files import ROOT, write_text
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


def replacing(name: str, old: str, new: str) -> Attack:
    swap = (old.encode(), new.encode(), 1)
    return with_files(lambda files: files.update({name: files[name].replace(*swap)}))


def before(name: str, old: str, more: str) -> Attack:
    return replacing(name, old, more + old)


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


def second_on(gpu: str) -> Attack:
    """A second run that says it ran code of sm_80 on some GPU."""

    def change(content: dict[str, Any]) -> None:
        content["environment"].update(gpu=gpu, compute_capability="8.0")
        content["architectures"] = {"ran": ["sm_80"], "ran_as_ptx": [], "unverified": ["sm_90"]}

    return lambda project: edit(project.add_report(), change, sign=True)


def gpu_tests(old: str, new: str, run: int = 1, encoding: str = "utf-8") -> Attack:
    """Changes the results of tests/gpu, of the run that proves the wheel or of a second one."""

    def attack(project: Project) -> None:
        report = project.report_path if run == 1 else project.add_report()
        path = report.with_name("gpu-tests.xml")
        text = path.read_text().replace(old, new)
        text = text.replace('skipped="0"', f'skipped="{text.count("<skipped/>")}"')
        path.write_bytes(text.encode(encoding))

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


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def failed_elsewhere(project: Project) -> None:
    """The report names another wheel, the tests beside it these bytes."""
    path = project.add_report(wheel=release_samples.OTHER_WHEEL).with_name("gpu-tests.xml")
    text = project.report_path.with_name("gpu-tests.xml").read_text()
    path.write_text(text.replace("></testcase>", "><failure /></testcase>"))


def committed(target: str) -> Attack:
    """A link in the commit."""
    return all_of(lambda p: (p.root / "x").symlink_to(target), lambda p: p.tag())


def foreign(project: Project) -> None:
    project.wheel = project.wheel.rename(project.wheel.with_name("other-1.0-py3-none-any.whl"))


def executable(project: Project) -> None:
    project.git("config", "core.fileMode", "false")
    (project.root / "CMakeLists.txt").chmod(0o755)


PACKAGE = "flash_attn_deterministic"
BILL = f"{INFO}/sboms/flash-attn-deterministic.cdx.json"
METADATA, WHEEL, COMMANDS = (f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt"))
PYTHON, HIDDEN = f"python/{PACKAGE}/__init__.py", f"python/{PACKAGE}/hidden.py"
OTHER_TREE, CHANGED = "wheel: built from another tree: ", "tree: differs from its commit: "
EDITED = ("README.md", "sm_80")
SECOND, PTX_REPORT = "2/verification.json: ", "docs/results/verification-compute_80.json"


def each(words: str, attacks: dict[str, Attack]) -> list[tuple[str, str, Attack]]:
    return [(words, name, attack) for name, attack in attacks.items()]


# Words of the gate, and every attack that it has to answer with them, by name.
REFUSED: list[tuple[str, str, Attack]] = [
    # Wheels.
    *(
        (f"contents: {name!r} does not belong into the wheel", f"holds {name!r}", adding(name))
        for name in (
            f"{INFO}/x/../../evil.pth", f"{PACKAGE}/../evil.py", f"{PACKAGE}//evil.py",
            f"{PACKAGE}\\evil.py", f"{PACKAGE}/ev\nil.py", "evil.pth", "/etc/evil.pth",
            "flash_attn_build/a.py", f"{PACKAGE}-{VERSION}.data/scripts/pip",
            f"{INFO}/licenses/evil.pth", f"{PACKAGE}/_D.so", f"{INFO}/sboms/other.cdx.json",
            f"{PACKAGE}/.mypy_cache/evil.py",  # in the tree .gitignore would hide it
        )
    ),
    (f"{OTHER_TREE}{PACKAGE}/evil.py", "a module more", adding(f"{PACKAGE}/evil.py")),
    (f"{OTHER_TREE}{PACKAGE}/__init__.pyi", "a stub", adding(f"{PACKAGE}/__init__.pyi")),
    *each(f"{OTHER_TREE}{PACKAGE}/__init__.py", {
        "another __init__": adding(f"{PACKAGE}/__init__.py"),
        "other Python": tree(PYTHON, "a = 1\n", tag=True),
        "Python gone": tree(PYTHON, None, tag=True),
    }),
    *each("METADATA is not the one of this tree", {
        "a requirement": before(METADATA, "Requires-Dist: ", "Requires-Dist: evil\n"),
        "one of elsewhere": replacing(METADATA, "torch>=2.10", "torch @ https://evil.example/t"),
        "an extra": before(METADATA, "Provides-Extra: ", "Provides-Extra: evil\n"),
        "a home page": before(METADATA, "Keywords: ", "Project-URL: Home, https://evil.example\n"),
        "a description": replacing(METADATA, "\n\n", "\n\nRun evil.sh\n"),
    }),
    *each("entry_points.txt is not the one of this tree", {
        "a command": replacing(COMMANDS, "scripts]", "scripts]\npip = evil:main"),
        "a plugin": before(COMMANDS, "[console_scripts]", "[pytest11]\ne = e\n"),
    }),
    ("WHEEL is not the one of this tree", "purelib", replacing(WHEEL, "false", "true")),
    ("licenses/LICENSE is not the one of this tree", "other licence",
     replacing(f"{INFO}/licenses/LICENSE", "BSD", "MIT")),
    ("ValueError('a key is there twice')", "build information twice",
     replacing(f"{PACKAGE}/_build_info.json", '"deterministic"', '"schema": 1, "deterministic"')),
    *each("is not the one of this library", {
        "another bill": replacing(BILL, "CUTLASS", "NOTHING"),
        "a bill that says another licence": replacing(BILL, '"MIT"', '"WTFPL"'),
        "a bill of another number": replacing(BILL, "urn:uuid:", "urn:uuid:0"),
        "a bill that lacks a component": bill(lambda b: b["components"].pop()),
        "a bill of another upstream": bill(put("components.0.hashes.0.content", "0" * 64)),
        "a bill without its graph": bill(lambda b: b.pop("dependencies")),
        "a bill of one more": bill(lambda b: b["components"].append(b["components"][2])),
        "no bill": bill(lambda b: b.clear()),
    }),
    ("has no version or no hash", "no hash", bill(put("components.2.hashes.0.content", ""))),
    (f"is not tagged v1.0: it has {TAG}", "a foreign name", foreign),
    (f"name: expected {PACKAGE}-{VERSION}-py3", "another spelling", another_version),
    *each("archive: is not what the build makes", {
        "a link": recorded(external_attr=(stat.S_IFLNK | 0o777) << 16),
        "set-user-ID": recorded(external_attr=(stat.S_IFREG | 0o4755) << 16),
        "a comment of a file": recorded(comment=b"x"),
        "an extra field": recorded(extra=b"\1\1\0\0"),
        "a program before the archive": with_bytes(lambda d: b"#!/bin/sh\n" + d),
        "bytes behind it": with_bytes(lambda d: d[:-2] + b"\4\0evil"),
    }),
    (f"holds twice: ['{PACKAGE}/py.typed']", "a file that is there twice", with_bytes(twice)),
    ("manifest.json is of another", "a byte more", with_bytes(lambda d: d + b"\0", whole=False)),
    *each("archive: cannot be read", {
        "a hidden file": with_bytes(
            lambda d: d.replace(b"PK\1\2", b"PK\3\4" + d[4:30] + b"x.pya" + b"PK\1\2", 1),
            whole=False,
        ),
        "cut off": with_bytes(lambda d: d[:-9], whole=False),
        "nothing in it": with_bytes(lambda d: b"PK\5\6" + bytes(18), whole=False),
        "a local header": with_bytes(lambda d: d.replace(b"/py.typed", b"/evil.pth", 1)),
    }),
    ("archive: ", "a local header of a compressed file", with_bytes(
        lambda d: d.replace(b"PK\3\4\24\0\0\0\0", b"PK\3\4\24\0\0\0\10")
    )),
    ("archive: holds compressed files; the build", "compressed",
     recorded(compress_type=zipfile.ZIP_DEFLATED)),
    # Trees. A file that was put back after the build, before the tag, is not in git.
    *(
        (OTHER_TREE + name.partition("/")[0], f"{name} edited", tree(name, f"{text} "))
        for name, text in NATIVE.items()
    ),
    (f"{OTHER_TREE}{PACKAGE}/hidden.py", "Python more", tree(HIDDEN, "", tag=True)),
    *each(f"{CHANGED}README.md", {
        "other ends of lines": all_of(
            tree(".gitattributes", "* text=auto eol=lf\n", tag=True),
            tree("README.md", (ROOT / "README.md").read_text().replace("\n", "\r\n")),
        ),
        "edited": tree(*EDITED),
        "assume-unchanged": tree(*EDITED, "update-index --assume-unchanged README.md"),
        "skip-worktree": tree(*EDITED, "update-index --skip-worktree README.md"),
        "fsmonitor": tree(*EDITED, "config core.fsmonitor true"),
    }),
    *each(f"{CHANGED}x (a submodule, or a link to what is not in it)", {
        "a submodule": all_of(git("init", "--quiet", "x"),
                              git("-C", "x", "commit", "--quiet", "--allow-empty", "-m", "x"),
                              lambda p: p.tag()),
        "a link out of the tree": committed("/etc"),
        "a link to ignored files": committed("dist"),
    }),
    (f"{CHANGED}new file", "new", tree("new file", "")),
    *each(CHANGED + HIDDEN, {
        "excluded": all_of(tree(".git/info/exclude", "hidden.py\n"), tree(HIDDEN, "")),
        "another folder named": tree(HIDDEN, "", "config core.worktree ../docs"),
    }),
    (f"{CHANGED}python/{PACKAGE}/.gitignore", "own rules",
     tree(f"python/{PACKAGE}/.gitignore", "*\n")),
    (f"{CHANGED}CMakeLists.txt", "a file that may be run suddenly", executable),
    (f"is not tagged {TAG}: it has v0.0.2", "another tag",
     all_of(git("tag", "v0.0.2"), git("tag", "--delete", TAG))),
    (f"is not tagged {TAG}: it has no tag", "a commit more",
     git("commit", "--quiet", "--allow-empty", "-m", "later")),
    ("tree: git does not know what is checked out", "no checkout",
     lambda p: shutil.rmtree(p.root / ".git")),
    ("tree: [Errno 2] No such file", "no pin", removed("cpp/upstream/upstream.json")),
    ("wheel: cannot be compared with manifest and tree (FileNotFoundError", "cmake gone",
     removed("cmake")),
    ("sm_80: unverified, but README.md does not name it", "not in README",
     tree("README.md", "others")),
    ("made with CUDA 13.0.88, but the policy wants 12.4.131 for x86_64", "another CUDA",
     policy(wheels={"x86_64": "12.4.131"})),
    ("sm_80: unverified, and the release policy does not allow", "allowed by nobody",
     policy(unverified_architectures={})),
    ("sm_100: the wheel holds no machine code for it", "lacking",
     policy(required_architectures={"sm_100": "B200"})),
    # Manifests.
    *(
        (f"manifest: {path}: expected ", f"manifest: {path} {value}", manifest(put(path, value)))
        for path, value in (
            ("upstream.version", "9"), ("build.compiled_in_this_run", 0),
            ("sources.cpp", "0" * 64), ("architectures", ["90-real"]), ("bits_version", 2),
            ("bits_version", 1.0), ("tools.nvcc", "12.4.131"), ("totals.translation_units", 3),
            ("wheel.bytes", 3),
        )
    ),
    *(
        (f"manifest: $.{path}: ", f"manifest: {path} {value}", manifest(put(path, value)))
        for path, value in (
            ("build.preset", "dev"), ("build.defines", ["A=1"]), ("build.locked", False),
            ("build.environment", {"CXXFLAGS": "-ffast-math"}), ("deterministic", False),
            ("schema", 1), ("upstream", []), ("build", "x"), ("tools", "x"), ("flags", "x"),
            ("sources", {"\n::set-output name=x::": "0" * 64}),
        )
    ),
    ("manifest: $.build: 'environment' is a required", "no environment",
     manifest(lambda m: m["build"].pop("environment"))),
    ("manifest.json is of another wheel", "a manifest of other bytes",
     manifest(put("wheel.sha256", "0" * 64))),
    ("it names ['clang++', 'g++'], not the host compiler alone", "a tool that no lock has",
     tool(**{"clang++": "9"})),
    ("manifest.json is missing; the build writes it", "no manifest",
     lambda p: p.manifest_path.unlink()),
    *each("manifest.json is unreadable", {
        "cut off manifest": lambda p: p.manifest_path.write_text("{"),
        "a manifest that is a list": lambda p: p.manifest_path.write_text("[]"),
    }),
    ("is not the locked one of nvcc 13.0.88", "other nvcc",
     manifest(put("build.toolkit_sha256", "0" * 64))),
    ("built with ziglang 0.13.0, but locks/ has ziglang", "linker", tool(ziglang="0.13.0")),
    ("built with torch 2.12.0", "headers", tool(torch="2.12.0")),
    ("built with nvidia-cuda-nvcc None, but locks/ has nvidia-cuda-nvcc==13.0.88", "no nvcc",
     manifest(lambda m: m["tools"].pop("nvidia-cuda-nvcc"))),
    ("built with h11 2, but locks/ has", "a package for an older Python", tool(h11="2")),
    ("built with h11 None", "an older Python", tool(python="3.11.9")),
    ("1 CUDA translation units for 2 kernels", "fewer units",
     manifest(lambda m: m["translation_units"].pop())),
    ("source_date_epoch is not the date in", "another date",
     manifest(put("build.source_date_epoch", 10**9))),
    *(
        (f"a cxx was compiled with '{flags[-1]}'", f"compiled with {flags}",
         manifest(put("flags", {"a cxx": flags})))
        for flags in (
            ["-ffast-math"], ["-DX"], ["-include", "/opt/evil.h"], ["-include", "./../evil.h"]
        )
    ),
    # Reports.
    *(
        (f"{path}: expected ", f"report: {path} {value}", report(put(path, value)))
        for path, value in (
            ("status", "incomplete"), ("wheel.sha256", "0" * 64), ("wheel.filename", "x.whl"),
            ("installed.matches_wheel", None), ("pins.upstream.version", "2.8.2"),
            ("pins.patches", []), ("build.cuda_toolkit", "12.4.131"), ("build.bits_version", 9),
        )
    ),
    ("1/verification.json: $.schema_version: 2 was expected", "true",
     report(put("schema_version", True))),
    *(
        (f"'{field}' was unexpected", f"{field} in '{path}'", report(put(f"{path}.{field}", "")))
        for path, field in (
            ("environment", "evil"), ("provenance", "page"), ("provenance.hardware", "script"),
            ("sections.1", "html"), ("sections.1.data", "x"), ("sections.3.data", "y"),
        )
    ),
    ("('script' was unexpected)", "a script", report(put("script", "evil"))),
    ("section contract: failed", "a section failed", report(rows(contract="failed"))),
    ("section decode: not-run", "a section not run", report(rows(decode="not-run"))),
    *each("$.sections: ", {
        "a section left out": report(lambda r: r["sections"].pop()),
        "a section more": report(lambda r: r["sections"].append({"id": "x"})),
    }),
    ("$.sections[0]", "a section twice",
     report(lambda r: r["sections"].insert(0, r["sections"][1]))),
    ("contract, paged: failed", "a row failed", report(rows(paged="failed"))),
    ("contract, heads: not-appl", "a row not applied", report(rows(heads="not-applicable"))),
    ("contract, family: not-applicable", "no Hopper", report(rows(family="not-applicable"))),
    *(
        (f"contract, dropout: {state}", f"a row that the policy does not name: {state}",
         all_of(policy(required_checks=("paged",)), report(rows(dropout=state))))
        for state in ("failed", "error")
    ),
    ("contract, run-to-run: failed", "a row twice", report(
        lambda r: (c := r["sections"][1]["data"]["checks"]).insert(
            0, {**c[0], "status": "failed"}
        )
    )),
    ("contract, golden: missing", "a row left out",
     report(lambda r: r["sections"][1]["data"]["checks"].pop())),
    ("contract, run-to-run: error: passed without a case", "a row without a case", row(cases=0)),
    ("contract, run-to-run: failed: 3 cases", "a row with failed cases", row(failed=3)),
    ("'checks' is a required", "rows left out", report(lambda r: r["sections"][1].update(data={}))),
    ("'status' is a required property", "no status", report(lambda r: r.pop("status"))),
    ("sm_90: no complete, ", "another GPU", report(put("architectures.ran", ["sm_80"]))),
    ("sm_90a: no complete, ", "another family", report(put("architectures.ran", ["sm_90"]))),
    ("says that sm_90b ran, which the wheel does not hold",
     "an architecture that is not held", report(
        put("architectures.ran", ["sm_90", "sm_90a", "sm_90b"])
    )),
    ("sm_80: unverified, but 1/verification.json does not say so", "not named",
     report(put("architectures.unverified", []))),
    ("says that sm_90 ran on a GPU of compute capability 8.0", "an A100",
     report(put("environment.compute_capability", "8.0"))),
    ("', which is none of those that the policy names", "a GPU that the policy does not name",
     second_on("My Emulator")),
    ("a key is there twice", "a status that is there twice", second(
        lambda t: t.replace('"status"', '"status": "failed", "status"', 1)
    )),
    *each("Out of range float values are not JSON compliant", {
        "a time that is no number": second(lambda t: t.replace("200.0", "NaN")),
        "an endless time": second(lambda t: t.replace("200.0", "1e999")),
    }),
    ("surrogates not allowed", "a GPU's name that is no text", second_on("A\ud800")),
    ("$.started: ", "a line's end behind a date", report(put("started", "2026-01-01T00:00:00Z\n"))),
    ("is unreadable ('utf-8' codec",
     "a report in another encoding", lambda p: p.add_report().write_bytes(
        p.report_path.read_text().encode("utf-16")
    )),
    ("ran sm_90 on 'NVIDIA A100', which is none of NVIDIA", "A100 as 9.0",
     report(put("environment.gpu", "NVIDIA A100"))),
    ("<img src=x>|[x](https://evil)', which is none of NVIDIA", "a GPU's name that is HTML", report(
        put("environment.gpu", "NVIDIA H200 <img src=x>|[x](https://evil)")
    )),
    ("capability None", "no capability", report(put("environment.compute_capability", None))),
    ("says that the wheel lacks kernels", "kernels that are missing", report(
        put("build.missing_kernels", [{"direction": "bwd", "dtype": "bf16", "head_dim": 64}])
    )),
    # A second report.
    (f"{SECOND}status: expected 'passed'", "a run that failed", second(status="failed")),
    (r"\x1b[2J\n::set-output::#\x23[x/verification.json: status: expected",
     "a run whose name is a command", lambda p: p.add_report(
        "\x1b[2J\n::set-output::##[x", status="failed"
    )),
    # Cut short: neither the report nor the section says that it failed.
    (f"{SECOND}contract, chunk: failed", "a row that failed before the end", second(
        complete=False, status="incomplete", sections=sections(chunk="failed")
    )),
    (f"{SECOND}contract, chunk: error", "row in error", second(sections=sections(chunk="error"))),
    (f"{SECOND}its status is 'failed'", "a run that failed, of a later schema",
     second(status="failed", later=1)),
    *each(f"{SECOND}was changed", {
        "an edited report": second(lambda t: t.replace("true", "false", 1)),
        "a report that was made to name other bytes": second(
            lambda t: re.sub('"sha256": "[0-9a-f]{8}', f'"sha256": "{"0" * 8}', t, count=1)
        ),
    }),
    ("verification/2: is unreadable (it is a link, or", "a link to a run", a_link_to_a_run),
    ("2/pipe: is unreadable (it is a link, or", "a pipe",
     lambda p: os.mkfifo(p.add_report().with_name("pipe"))),
    *each(f"{SECOND}is unreadable", {
        "a pipe for a report": lambda p: pipe(p.add_report()),
        "a file for a run": lambda p: (p.dist / "verification" / "2").touch(),
        "a run that left no report": lambda p: (p.dist / "verification" / "2").mkdir(),
        "a truncated report": second(lambda t: t[: len(t) // 2]),
        "a nested report": second(lambda t: "[" * 99_999),
    }),
    ("$: 'schema_version' is a required property", "an emptied report", second(lambda t: "{}")),
    ("$: [] is not of type 'object'", "a report that is a list", second(lambda t: "[]")),
    ("'other' was unexp", "no digest", second(lambda t: t.replace('"digest"', '"other"'))),
    # Tests on the GPU, of a run that proves the wheel and of one beside it.
    *(
        (f"{run}/verification.json: gpu-tests.xml{words}", f"GPU tests: {name}, run {run}",
         gpu_tests(old, new, run))
        for run in (1, 2)
        for name, old, new, words in (
            ("cut off", "</testsuites>", "", ": is unreadable"),
            ("entities", "<testsuites>", '<!DOCTYPE x [<!ENTITY a "b">]><testsuites>',
             ": is unreadable (it declares entities"),
            ("of another wheel", "sha256:", "sha256:0", ".name: expected"),
            ("skipped", "></testcase>", "><skipped/></testcase>",
             f": no test of {MODULES[0]} passed"),
            ("failed", "></testcase>", "><failure /></testcase>", f": failed: '{MODULES[0]}::test"),
            ("ended", "></testcase>", "><error /></testcase>", f": failed: '{MODULES[0]}::test_a'"),
            ("a failure of another namespace", "></testcase>",
             '><failure xmlns="x" /></testcase>', f": failed: '{MODULES[0]}::test_a'"),
            ("a failure outside of the suite", "<testsuites>",
             '<testsuites><testcase name="a"><error /></testcase>', ": failed: 'None::a'"),
            ("a failure in another element", "</testcase>",
             "</testcase><x><testcase><failure /></testcase></x>", ": failed: 'None::None'"),
            ("a failure of no test", "<testsuites>", "<testsuites><failure />", ": failed: "),
            ("a test of another namespace", "</testcase>", '</testcase><testcase xmlns="x" />',
             ": holds '{x}testcase' in 'testsuite'"),
            ("a test more than counted", "</testsuite>", "<testcase /></testsuite>",
             ".tests: expected '4', got '3'"),
            ("interrupted", 'value="3"', 'value="4"', ".collected: expected '3', got '4'"),
            ("not counted", "collected", "x", ".collected: expected '3', got None"),
            ("a test that says by itself", "<testcase ", '<testcase status="failed" ',
             ": holds '@status' in 'testcase'"),
            ("a test that says in words", "></testcase>", ">FAILED</testcase>",
             ": holds '#text' in 'testcase'"),
            ("words between tests", "</testcase>", "</testcase>FAILED",
             ": holds '#text' in 'testsuite'"),
            ("miscounted skips", 'skipped="0"', 'skipped="1"', ".skipped: expected '0', got '1'"),
            ("miscounted", 'failures="0"', 'failures="1"', ".failures: expected '0', got '1'"),
            ("two suites", "</testsuites>", "<testsuite name='x' /></testsuites>",
             ": is not one suite of tests"),
            ("no suites", "testsuites>", "suites>", ": is not one suite of tests"),
        )
    ),
    ("2/verification.json: gpu-tests.xml: failed: ", "a failure beside another wheel's report",
     failed_elsewhere),
    ("x/verification.json: is unreadable", "a run of another name",
     lambda p: (p.dist / "verification" / "x").mkdir()),
    *each("gpu-tests.xml: is unreadable", {
        "a pipe for GPU tests": lambda p: pipe(p.report_path.with_name("gpu-tests.xml")),
        "no GPU tests": lambda p: p.report_path.with_name("gpu-tests.xml").unlink(),
        "GPU tests in another encoding": gpu_tests("", "", encoding="utf-16-le"),
    }),
    # The report of PTX that stands in.
    *(
        (f"sm_80: {PTX_REPORT}: {expected}", f"PTX: {name}", ptx(change))
        for name, change, expected in (
            ("cut short", put("complete", False), "complete: expected True"),
            ("another", put("architectures.ran_as_ptx", []), "did not run compute_80 as PTX"),
            ("nothing checked", put("sections", []), "$.sections: [] "),
            ("accuracy", rows(accuracy="not-run"), "section accuracy: not-run"),
            ("a row left out", rows(paged="not-run"), "contract, paged: not-run"),
            ("another section", rows(forward="failed"), "section forward: failed"),
            ("other patches", put("pins.patches", []), "pins.patches: expected"),
            ("other sources", put("build.sources.cpp", "0" * 64), "build.sources.cpp: expected"),
            ("another toolkit", put("build.cuda_toolkit", "12.4.131"), "build.cuda_toolkit: exp"),
            ("machine code beside it", put("build.architectures", ["80-virtual", "90-real"]),
             "build.architectures: expected"),
        )
    ),
    (f"sm_80: {PTX_REPORT}: is unreadable", "PTX: no report", removed("docs/results")),
]  # fmt: skip
NAMES = [name for _, name, _ in REFUSED]
assert len({*NAMES}) == len(NAMES)


@pytest.mark.parametrize(("words", "name", "attack"), REFUSED, ids=NAMES)
def test_the_gate_refuses(project: Project, words: str, name: str, attack: Attack) -> None:
    attack(project)
    assert words in project.problems()


def test_a_candidate_that_nobody_touched(project: Project, tmp_path: Path) -> None:
    committed("docs/../README.md")(project)
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
    gpu_tests("></testcase>", "><failure /></testcase>")(project)
    failed, *_ = project.decide().failed
    assert failed.startswith("1/verification.json: gpu-tests.xml: failed: ")
    release_samples.write_report(project.wheel, project.report_path)
    # Whatever its layout: what failed is a matter of these bytes, not of the schema.
    layouts: tuple[dict[str, Any], ...] = ({}, {"later": 1})
    for layout in layouts:
        project.add_report(status="failed", **layout)
        assert project.decide().failed == ("2/verification.json: its status is 'failed'",)
    tests = project.add_report(later=1).with_name("gpu-tests.xml")
    tests.write_text(tests.read_text().replace("></testcase>", "><failure /></testcase>"))
    assert "2/verification.json: gpu-tests.xml: failed" in "".join(project.decide().failed)
