"""The workflows hold no logic of their own, run what exists, and may do no more than they need."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from flash_attn_build.files import ROOT, sha256_of
from flash_attn_build.release import __main__ as release
from flash_attn_build.release import attestations

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
RELEASE = WORKFLOWS["release"]["jobs"]
NOX = re.compile(r'\.ci/nox -s (?P<sessions>"?[\w$.()-]+"?(?: \w+)*)(?: -- (?P<arguments>.+))?\Z')
# Compares every file of a folder with the list that the gate passed.
SUMS = (
    'diff <(base64 --decode <<< "$SHA256SUMS") <(find . ! -type d ! -path ./SHA256SUMS '
    "-printf '%P\\0' | LC_ALL=C sort --zero-terminated | xargs --null sha256sum)"
)


def jobs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for workflow, content in WORKFLOWS.items():
        for name, job in content["jobs"].items():
            yield workflow, name, job


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for workflow, name, job in jobs():
        for step in job["steps"]:
            yield f"{workflow}.{name}", step


RUNS = [(where, step["run"]) for where, step in steps() if "run" in step]
USES = [(where, step["uses"]) for where, step in steps() if "uses" in step]
# Those that could let bytes out, or sign them.
PRIVILEGED = [
    (f"{workflow}.{name}", job)
    for workflow, name, job in jobs()
    if "write" in job["permissions"].values()
]


@pytest.fixture(scope="module")
def sessions() -> set[str]:
    command = [sys.executable, "-m", "nox", "--nocolor", "--list", "-f", str(ROOT / "noxfile.py")]
    listed = subprocess.check_output(command, text=True)
    return set(re.findall(r"^[*-] ([\w.()-]+)", listed, re.M))


def combinations(matrix: dict[str, Any]) -> Iterator[str]:
    for cuda, torch, python in product(*(matrix[key] for key in ("cuda", "torch", "python"))):
        if {"torch": torch, "python": python} not in matrix["exclude"]:
            yield f"cuda{cuda}-torch{torch}-{python}"


def sessions_of(job: dict[str, Any]) -> set[str]:
    found = (NOX.match(step["run"]) for step in job["steps"] if "run" in step)
    words = (word for match in found if match for word in match["sessions"].split())
    return {word.strip('"') for word in words}


@pytest.mark.parametrize(("where", "run"), RUNS, ids=[f"{w}: {r}" for w, r in RUNS])
def test_every_session_that_is_run_exists(where: str, run: str, sessions: set[str]) -> None:
    match = NOX.match(run)
    if not match:
        assert run in {SUMS, "cmp one/*.whl two/*.whl"} or run.startswith(
            ("gh release create ", 'echo "sha256', "sha256sum --check ")
        )
        return
    for name in match["sessions"].replace('"', "").split():
        if "$PYTHON" in name:
            versions = WORKFLOWS["test"]["jobs"]["pythons"]["strategy"]["matrix"]["python"]
            assert {name.replace("$PYTHON", version) for version in versions} <= sessions
        elif "$CELL" in name:
            cells = WORKFLOWS["wheels"]["jobs"]["cell"]["strategy"]["matrix"]
            assert {name.replace("$CELL", cell) for cell in combinations(cells)} == {
                session for session in sessions if session.startswith("matrix(")
            }
        else:
            assert name in sessions, where


def test_the_script_and_the_workflow_run_the_same() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    found = re.search(r"--sessions ((?:\w+ )+)", script)
    assert found
    run = sessions_of(WORKFLOWS["test"]["jobs"]["lint"])
    run |= sessions_of(WORKFLOWS["test"]["jobs"]["test"])
    assert set(found[1].split()) == run
    (line,) = re.findall(
        r"`\.ci/run` runs what the jobs lint and test of CI run: (.+)\.$",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.M,
    )
    assert set(re.findall(r"`(\w+)`", line)) == run


def test_the_newest_of_everything_is_tried_every_week_and_stops_nobody() -> None:
    for name in ("newest", "wheels"):
        assert set(WORKFLOWS[name][True]) == {"schedule", "workflow_dispatch"}  # "on" reads as true
    (job,) = WORKFLOWS["newest"]["jobs"].values()
    assert job["steps"][-1]["env"] == {"NEWEST": 1}
    assert sessions_of(job) >= {"test", "verify_dev"}


def test_every_action_is_pinned_by_one_commit() -> None:
    pins: dict[str, str] = {}
    for where, uses in USES:
        assert re.fullmatch(r"(actions|pypa)/[\w-]+@[0-9a-f]{40}", uses), where
        name, _, commit = uses.partition("@")
        assert pins.setdefault(name, commit) == commit, where


def test_nothing_is_permitted_but_by_job() -> None:
    for content in WORKFLOWS.values():
        assert content["permissions"] == {}
        assert all(job["timeout-minutes"] <= 180 for job in content["jobs"].values())
    writes = {
        where: {key for key, value in job["permissions"].items() if value == "write"}
        for where, job in PRIVILEGED
    }
    assert writes == {
        "release.attest-build": {"id-token", "attestations"},
        "release.attest-result": {"id-token", "attestations"},
        "release.github-release": {"contents"},
        "release.deploy-index": {"pages", "id-token"},
        "release.publish": {"id-token"},
    }


def test_a_job_with_privileges_runs_no_code_of_packages() -> None:
    """Pinned actions, and programs of the runner's image; not even this repository's code."""
    for where, step in ((where, step) for where, job in PRIVILEGED for step in job["steps"]):
        if "run" in step:
            known = ("gh release create ", "sha256sum --check --strict <<< ")
            assert step["run"] == SUMS or step["run"].startswith(known), where
        else:
            assert not step["uses"].startswith("actions/checkout@"), where


def test_nothing_is_installed_but_by_nox_and_no_secret_is_used() -> None:
    script = (ROOT / ".ci" / "nox").read_text()
    assert "--require-hashes --requirement locks/nox.txt" in script
    for path in FILES:
        assert not re.search(r"pipx|pip install|secrets\.", path.read_text())
    with_token = [where for where, step in steps() if "GH_TOKEN" in step.get("env", {})]
    assert with_token == ["release.gate", "release.github-release", "release.build-index"]


def needs(job: dict[str, Any]) -> list[str]:
    found = job.get("needs", [])
    return [found] if isinstance(found, str) else list(found)


def before(name: str) -> set[str]:
    """Jobs of the release that have to succeed before one begins."""
    direct = needs(RELEASE[name])
    return set(direct).union(*(before(other) for other in direct)) if direct else set()


@pytest.mark.parametrize("name", ["github-release", "build-index", "deploy-index", "publish"])
def test_nothing_leaves_before_the_gate_and_what_attests_it(name: str) -> None:
    assert {"build", "attest-build", "verify", "gate", "attest-result"} <= before(name)
    assert "if" not in RELEASE[name]  # all of them must have succeeded
    assert "github-release" in {*before(name), name}  # the upload that cannot be undone is last
    # YAML reads the key "on" as true.
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}


def test_what_was_built_is_attested_before_the_gpu_runner_starts() -> None:
    assert before("attest-build") == {"build"}
    assert "attest-build" in needs(RELEASE["verify"])
    subjects = [step["with"] for step in RELEASE["attest-build"]["steps"][1:]]
    assert subjects == [{"subject-path": "dist/*.whl"}, {"subject-path": "dist/*.json"}]
    (gate,) = (step["run"] for step in RELEASE["gate"]["steps"] if "nox" in step.get("run", ""))
    assert '--attested "$GITHUB_REPOSITORY" "$GITHUB_SHA" "$GITHUB_REF_NAME"' in gate


def test_the_gates_result_is_attested_passed_or_failed() -> None:
    """Also where the gate refuses: bytes that failed stay refused, whatever runs next."""
    job, gate = RELEASE["attest-result"], RELEASE["gate"]
    assert job["if"] == "${{ !cancelled() && needs.gate.outputs.result != '' }}"
    assert job["steps"][-1]["with"] == {
        "subject-path": "dist/*.whl",
        "predicate-type": attestations.TEST_RESULT,
        "predicate-path": f"result/{release.RESULT}",
    }
    # The gate judges a failed run, too, and one of a second attempt with the first one's reports.
    assert gate["if"] == "${{ !cancelled() && needs.attest-build.result == 'success' }}"
    (reports,) = (s["with"] for s in gate["steps"] if "pattern" in s.get("with", {}))
    assert reports["pattern"] == "verification-*"
    (result,) = (step for step in gate["steps"] if step.get("id") == "result")
    assert result["if"] == "always()"
    assert result["with"]["path"] == f"build/{release.RESULT}"


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
                assert found[1] in needs(job)
                output = RELEASE[found[1]]["outputs"][found[2]]
                assert re.fullmatch(r"\$\{\{ steps\.\w+\.outputs\.artifact[_-]id \}\}", output)


@pytest.mark.parametrize("name", ["github-release", "publish"])
def test_what_is_published_is_what_the_gate_wrote(name: str) -> None:
    _, compare, *_ = RELEASE[name]["steps"]
    assert compare["run"] == SUMS
    assert compare["working-directory"] == "release"
    assert compare["env"] == {"SHA256SUMS": "${{ needs.gate.outputs.sha256sums }}"}


def in_folder(folder: Path) -> bool:
    environ = {**os.environ, "SHA256SUMS": (folder / "list").read_text()}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", SUMS]
    return subprocess.run(command, cwd=folder / "release", env=environ, check=False).returncode == 0


FOLDERS: dict[str, Callable[[Path], object]] = {
    "one more": lambda folder: (folder / "assets" / "evil.whl").write_text("x"),
    "hidden": lambda folder: (folder / ".evil").write_text("x"),
    "a link": lambda folder: (folder / "assets" / "evil").symlink_to("/etc/passwd"),
    "less": lambda folder: (folder / "notes.md").unlink(),
    "edited": lambda folder: (folder / "notes.md").write_text("x"),
    "another name": lambda folder: (folder / "notes.md").rename(folder / "notes2.md"),
    "nothing": lambda folder: shutil.rmtree(folder / "assets"),
}


@pytest.mark.parametrize("change", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_that_is_not_as_listed(tmp_path: Path, change: Callable[[Path], object]) -> None:
    folder = tmp_path / "release"
    (folder / "assets").mkdir(parents=True)
    lines = []
    for name in ("assets/a-0.1.0+cu12.whl", "assets/a.whl", "notes.md"):  # as the gate sorts them
        (folder / name).write_text(name)
        lines.append(f"{sha256_of(folder / name)}  {name}\n")
    (folder / "SHA256SUMS").write_text("".join(lines))
    (tmp_path / "list").write_text(base64.b64encode("".join(lines).encode()).decode())
    assert in_folder(tmp_path)
    change(folder)
    assert not in_folder(tmp_path)


def test_the_index_that_is_deployed_is_the_one_that_was_made() -> None:
    _, check, upload, deploy = RELEASE["deploy-index"]["steps"]
    assert check["run"] == 'sha256sum --check --strict <<< "$SHA256  index/artifact.tar"'
    assert check["env"] == {"SHA256": "${{ needs.build-index.outputs.sha256 }}"}
    assert upload["with"]["path"] == "index/artifact.tar"
    # A name that the content gives, and that no earlier job could use.
    assert upload["with"]["name"] == deploy["with"]["artifact_name"]
    assert "needs.build-index.outputs.sha256" in upload["with"]["name"]


def test_the_gpu_runner_is_used_by_the_release_alone() -> None:
    own = [(w, name) for w, name, job in jobs() if "self-hosted" in job["runs-on"]]
    assert own == [("release", "verify")]
    verify = RELEASE["verify"]
    assert "ephemeral" in verify["runs-on"]
    assert verify["environment"] == "gpu"
    assert verify["steps"][-1]["if"] == "always()"


def test_the_readme_leads_to_the_question_that_the_workflow_answers() -> None:
    assert "](docs/releasing.md#by-the-workflow)" in (ROOT / "README.md").read_text()
    _, part = (ROOT / "docs" / "releasing.md").read_text().split("\n## By the workflow\n")
    asked = "--signer-workflow OWNER/NAME/.github/workflows/release.yml"
    assert asked in part
    assert f"--predicate-type {attestations.TEST_RESULT}" in part
