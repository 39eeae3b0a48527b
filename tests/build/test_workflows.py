"""The workflows run sessions that exist, and jobs of a release pass on what nobody can exchange.

`nox -s lint` runs actionlint and zizmor: syntax, pinned actions, credentials, injected expressions.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from flash_attn_build.files import ROOT, sha256_of
from flash_attn_build.release import __main__ as release
from flash_attn_build.release import attestations

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
JOBS = {
    f"{workflow}.{name}": job
    for workflow, content in WORKFLOWS.items()
    for name, job in content["jobs"].items()
}
RELEASE = WORKFLOWS["release"]["jobs"]
NOX = re.compile(r"\.ci/nox -s (?P<sessions>[^-]\S*(?: \w+)*)(?: -- (?P<arguments>.+))?\Z")
# Compares every file of a folder with the list that the gate passed.
SUMS = (
    'diff <(base64 --decode <<< "$SHA256SUMS") <(find . ! -type d ! -path ./SHA256SUMS '
    "-printf '%P\\0' | LC_ALL=C sort --zero-terminated | xargs --null sha256sum)"
)


def runs(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def sessions_of(job: dict[str, Any]) -> Iterator[str]:
    """Names of nox's sessions that a job runs, one for each value of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for match in filter(None, map(NOX.match, runs(job))):
        for name in match["sessions"].replace('"', "").split():
            if "$PYTHON" in name:
                yield from (name.replace("$PYTHON", version) for version in matrix["python"])
            elif "$CELL" in name:
                for cuda in matrix["cuda"]:
                    for torch in matrix["torch"]:
                        for python in matrix["python"]:
                            if {"torch": torch, "python": python} not in matrix["exclude"]:
                                yield f"matrix(cuda{cuda}-torch{torch}-{python})"
            else:
                yield name


def test_the_sessions_that_are_run_exist_and_every_cell_of_the_matrix_is_run() -> None:
    command = [sys.executable, "-m", "nox", "--nocolor", "--list", "-f", str(ROOT / "noxfile.py")]
    listed = subprocess.check_output(command, text=True)
    there = set(re.findall(r"^[*-] ([\w.()-]+)", listed, re.M))
    run = {name for job in JOBS.values() for name in sessions_of(job)}
    assert run <= there
    assert {name for name in there if name.startswith("matrix(")} <= run
    script = re.search(r"--sessions ((?:\w+ )+)", (ROOT / ".ci" / "run").read_text())
    assert script
    ours = {*sessions_of(JOBS["test.lint"]), *sessions_of(JOBS["test.test"])}
    assert {*script[1].split()} == ours


def test_who_may_write_sign_or_upload_runs_no_code_of_packages_or_of_this_repository() -> None:
    assert all(content["permissions"] == {} for content in WORKFLOWS.values())
    writes = {
        name: {key for key, value in job["permissions"].items() if value == "write"}
        for name, job in JOBS.items()
        if "write" in job["permissions"].values()
    }
    assert writes == {
        "release.attest-build": {"id-token", "attestations"},
        "release.attest-result": {"id-token", "attestations"},
        "release.github-release": {"contents"},
        "release.deploy-index": {"pages", "id-token"},
        "release.publish": {"id-token"},
    }
    for name in writes:
        assert not any("actions/checkout@" in step.get("uses", "") for step in JOBS[name]["steps"])
        for run in runs(JOBS[name]):
            known = ("gh release create ", "sha256sum --check --strict <<< ")
            assert run == SUMS or run.startswith(known), name
    assert "--require-hashes --requirement locks/nox.txt" in (ROOT / ".ci" / "nox").read_text()
    for path in FILES:
        assert not re.search(r"pipx|pip install|secrets\.", path.read_text())
    # A fresh machine for the release alone, whose workflow no pull request starts.
    own = [name for name, job in JOBS.items() if "self-hosted" in job["runs-on"]]
    assert own == ["release.verify"]
    assert {"ephemeral"} <= {*RELEASE["verify"]["runs-on"]}
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}  # YAML reads "on" as true


def needs(name: str) -> list[str]:
    found = RELEASE[name].get("needs", [])
    return [found] if isinstance(found, str) else list(found)


def before(name: str) -> set[str]:
    """Jobs of the release that have to succeed before one begins."""
    return set(needs(name)).union(*(before(other) for other in needs(name)))


def test_nothing_leaves_before_the_gate_and_what_attests_it() -> None:
    for name in ("github-release", "build-index", "deploy-index", "publish"):
        assert {"build", "attest-build", "verify", "gate", "attest-result"} <= before(name)
        assert "if" not in RELEASE[name]  # all of them must have succeeded
        assert "github-release" in {*before(name), name}  # what cannot be undone is last
    assert before("attest-build") == {"build"}
    assert "attest-build" in needs("verify")  # the GPU runner cannot exchange what is attested
    subjects = [step["with"] for step in RELEASE["attest-build"]["steps"][1:]]
    assert subjects == [{"subject-path": "dist/*.whl"}, {"subject-path": "dist/*.json"}]


def test_the_gates_result_is_attested_passed_or_failed() -> None:
    """Also where the gate refuses: bytes that failed stay refused, whatever runs next."""
    job, gate = RELEASE["attest-result"], RELEASE["gate"]
    assert '--attested "$GITHUB_REPOSITORY" "$GITHUB_SHA" "$GITHUB_REF_NAME"' in runs(gate)[0]
    assert job["if"] == "${{ always() && needs.gate.outputs.result != '' }}"
    assert job["steps"][-1]["with"] == {
        "subject-path": "dist/*.whl",
        "predicate-type": attestations.TEST_RESULT,
        "predicate-path": f"result/{release.RESULT}",
    }
    # The gate judges a failed run, too, and one of a second attempt with the first one's reports.
    assert gate["if"] == "${{ always() && needs.attest-build.result == 'success' }}"
    assert RELEASE["verify"]["steps"][-1]["if"] == "always()"
    (result,) = (step for step in gate["steps"] if step.get("id") == "result")
    assert result["if"] == "always()"
    assert result["with"]["path"] == f"build/{release.RESULT}"
    _, part = (ROOT / "docs" / "releasing.md").read_text().split("\n## By the workflow\n")
    assert f"--predicate-type {attestations.TEST_RESULT}" in part


def test_jobs_pass_artifacts_by_id() -> None:
    """Every job can replace what a name means, also the one on the GPU runner."""
    for name, job in RELEASE.items():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/download-artifact@"):
                asked = step["with"].get("artifact-ids", "")
                found = re.fullmatch(r"\$\{\{ needs\.([\w-]+)\.outputs\.(\w+) \}\}", asked)
                if found is None:
                    assert (name, step["with"]["pattern"]) == ("gate", "verification-*")
                    continue
                assert found[1] in needs(name)
                output = RELEASE[found[1]]["outputs"][found[2]]
                assert re.fullmatch(r"\$\{\{ steps\.\w+\.outputs\.artifact[_-]id \}\}", output)
    for name in ("github-release", "publish"):
        compare = RELEASE[name]["steps"][1]
        assert (compare["run"], compare["working-directory"]) == (SUMS, "release")
        assert compare["env"] == {"SHA256SUMS": "${{ needs.gate.outputs.sha256sums }}"}
    _, check, upload, deploy = RELEASE["deploy-index"]["steps"]
    assert check["run"] == 'sha256sum --check --strict <<< "$SHA256  index/artifact.tar"'
    assert check["env"] == {"SHA256": "${{ needs.build-index.outputs.sha256 }}"}
    assert upload["with"]["path"] == "index/artifact.tar"
    # A name that the content gives, and that no earlier job could use.
    assert upload["with"]["name"] == deploy["with"]["artifact_name"]
    assert "needs.build-index.outputs.sha256" in upload["with"]["name"]


FOLDERS: dict[str, Callable[[Path], object]] = {
    "as listed": lambda folder: None,
    "one more": lambda folder: (folder / "assets" / "evil.whl").write_text("x"),
    "hidden": lambda folder: (folder / ".evil").write_text("x"),
    "a link": lambda folder: (folder / "assets" / "evil").symlink_to("/etc/passwd"),
    "less": lambda folder: (folder / "notes.md").unlink(),
    "edited": lambda folder: (folder / "notes.md").write_text("x"),
    "another name": lambda folder: (folder / "notes.md").rename(folder / "notes2.md"),
    "nothing": lambda folder: shutil.rmtree(folder / "assets"),
}


def test_a_folder_that_is_not_as_listed(tmp_path: Path) -> None:
    for kind, change in FOLDERS.items():
        folder = tmp_path / kind
        (folder / "assets").mkdir(parents=True)
        lines = []
        for name in ("assets/a-0.1.0+cu12.whl", "assets/a.whl", "notes.md"):  # as the gate sorts
            (folder / name).write_text(name)
            lines.append(f"{sha256_of(folder / name)}  {name}\n")
        (folder / "SHA256SUMS").write_text("".join(lines))
        change(folder)
        listed = base64.b64encode("".join(lines).encode()).decode()
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", SUMS]
        environ = {**os.environ, "SHA256SUMS": listed}
        done = subprocess.run(command, cwd=folder, env=environ, check=False, capture_output=True)
        assert (done.returncode == 0) == (kind == "as listed"), kind
