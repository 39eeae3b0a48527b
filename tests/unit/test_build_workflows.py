"""The workflows hold no logic of their own, run what exists, and may do no more than they need."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml
from flash_attn_build.gate.policy import load_policy

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
NOX = re.compile(r"pipx run nox -s (?P<sessions>\w+(?: \w+)*)(?: -- (?P<arguments>.+))?\Z")
# What lets bytes out, and the sessions that ask the gate first.
GATED = {"gate", "publish", "release_page"}


def jobs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for workflow, content in WORKFLOWS.items():
        for name, job in content["jobs"].items():
            yield workflow, name, job


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for workflow, name, job in jobs():
        for step in job.get("steps", []):
            yield f"{workflow}.{name}", step


RUNS = [(where, step["run"]) for where, step in steps() if "run" in step]
USES = [(where, step["uses"]) for where, step in steps() if "uses" in step]


@pytest.fixture(scope="module")
def sessions() -> set[str]:
    command = [sys.executable, "-m", "nox", "--nocolor", "--list", "-f", str(ROOT / "noxfile.py")]
    listed = subprocess.check_output(command, text=True)
    return set(re.findall(r"^[*-] (\w+)", listed, re.M))


def sessions_of(job: dict[str, Any]) -> set[str]:
    found = (NOX.match(step["run"]) for step in job.get("steps", []) if "run" in step)
    return {name for match in found if match for name in match["sessions"].split()}


@pytest.mark.parametrize(("where", "run"), RUNS, ids=[f"{w}: {r}" for w, r in RUNS])
def test_every_command_is_a_session_that_exists(where: str, run: str, sessions: set[str]) -> None:
    match = NOX.match(run)
    assert match, f"{where}: {run!r} is more than `pipx run nox -s SESSION`"
    assert set(match["sessions"].split()) <= sessions


def test_every_session_that_releases_is_run_somewhere(sessions: set[str]) -> None:
    run = {name for _, _, job in jobs() for name in sessions_of(job)}
    release = {
        "wheels",
        "toolkits",
        "digests",
        "verify",
        "gate",
        "publish",
        "release_page",
        "index",
    }
    assert release | {"lint", "test", "verify_dev", "deviation"} == run
    assert run <= sessions


def test_the_script_and_the_workflow_run_the_same() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    run = {name for job in WORKFLOWS["test"]["jobs"].values() for name in sessions_of(job)}
    found = re.search(r"--sessions ((?:\w+ )+)", script)
    assert found
    assert set(found[1].split()) == run
    (line,) = re.findall(
        r"`\.ci/run` is what CI runs: (.+)\.$", (ROOT / "CONTRIBUTING.md").read_text(), re.M
    )
    assert set(re.findall(r"`(\w+)`", line)) == run


@pytest.mark.parametrize(("where", "uses"), USES, ids=[f"{w}: {u}" for w, u in USES])
def test_every_action_is_pinned_by_commit(where: str, uses: str) -> None:
    assert re.fullmatch(r"(actions|pypa)/[\w-]+@[0-9a-f]{40}", uses), where


def test_one_action_has_one_commit() -> None:
    pins: dict[str, set[str]] = {}
    for path in FILES:
        for name, pin in re.findall(r"uses: ([\w/-]+)@(\S+ # v[\d.]+)$", path.read_text(), re.M):
            pins.setdefault(name, set()).add(pin)
    assert len(pins) == len({uses.split("@")[0] for _, uses in USES})
    assert {name: len(found) for name, found in pins.items() if len(found) > 1} == {}


def test_nothing_is_permitted_but_by_job() -> None:
    for content in WORKFLOWS.values():
        assert content["permissions"] == {}
    writes = {
        f"{workflow}.{name}": {key for key, value in job["permissions"].items() if value == "write"}
        for workflow, name, job in jobs()
    }
    assert {where: found for where, found in writes.items() if found} == {
        "release.attest": {"id-token", "attestations"},
        "release.page": {"contents"},
        "release.pages": {"pages", "id-token"},
        "release.publish": {"id-token"},
    }


def test_no_secret_is_used() -> None:
    for path in FILES:
        assert "secrets." not in path.read_text()
    with_token = [where for where, step in steps() if "GH_TOKEN" in step.get("env", {})]
    assert with_token == ["release.page", "release.index"]


def test_every_job_has_an_end() -> None:
    for workflow, name, job in jobs():
        assert "uses" in job or job["timeout-minutes"] <= 180, (workflow, name)


def needs(job: dict[str, Any]) -> list[str]:
    found = job.get("needs", [])
    return [found] if isinstance(found, str) else list(found)


def before(name: str) -> set[str]:
    """Jobs of the release that have to succeed before one begins."""
    release = WORKFLOWS["release"]["jobs"]
    direct = needs(release[name])
    return set(direct).union(*(before(other) for other in direct)) if direct else set()


@pytest.mark.parametrize("name", ["attest", "page", "index", "pages", "publish"])
def test_nothing_leaves_before_it_is_verified(name: str) -> None:
    assert {"build", "digests", "verify"} <= before(name)


@pytest.mark.parametrize("name", ["attest", "page", "publish"])
def test_what_lets_bytes_out_asks_the_gate_first(name: str) -> None:
    job = WORKFLOWS["release"]["jobs"][name]
    assert sessions_of(job) & GATED
    # Only artifacts of this run, and the gate before anything else is done with them.
    words = [step.get("run", step.get("uses", "")).split("@")[0] for step in job["steps"]]
    assert words[:3] == ["actions/checkout", *["actions/download-artifact"] * 2]
    assert words[3].startswith("pipx run nox")
    wheels, reports = (step["with"] for step in job["steps"][1:3])
    assert wheels == {"pattern": "cu*", "path": "dist"}
    assert reports == {"pattern": "verification-*", "path": "build/reports"}
    assert "--reports build/reports" in words[3]


@pytest.mark.parametrize("name", ["attest", "page", "publish"])
def test_what_lets_bytes_out_compares_them_with_what_was_built(name: str) -> None:
    job = WORKFLOWS["release"]["jobs"][name]
    step = job["steps"][3]
    assert step["run"].endswith('--built-sha256 "$BUILT_SHA256"')
    assert step["env"]["BUILT_SHA256"] == "${{ needs.digests.outputs.sha256 }}"
    assert "digests" in needs(job)


def test_what_was_built_is_told_before_the_gpu_runner_starts() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    assert before("digests") == {"build"}
    assert "digests" in needs(jobs["verify"])
    assert jobs["digests"]["runs-on"] == "ubuntu-24.04"
    assert sessions_of(jobs["digests"]) == {"digests"}
    own = [name for _, name, job in jobs_of_runners() if "self-hosted" in job["runs-on"]]
    assert own == ["verify"]


def jobs_of_runners() -> Iterator[tuple[str, str, dict[str, Any]]]:
    return ((workflow, name, job) for workflow, name, job in jobs() if "runs-on" in job)


def test_artifacts_are_asked_for_by_name() -> None:
    # What the GPU runner puts into the run's store must not lie among the wheels.
    for where, step in steps():
        if step.get("uses", "").startswith("actions/download-artifact@"):
            assert {"name", "pattern"} & set(step["with"]), where


def test_no_attempt_to_verify_takes_the_place_of_another() -> None:
    (upload,) = (
        step for step in WORKFLOWS["release"]["jobs"]["verify"]["steps"]
        if step.get("uses", "").startswith("actions/upload-artifact@")
    )  # fmt: skip
    expected = "verification-${{ matrix.toolkit.label }}-${{ github.run_attempt }}"
    assert upload["with"]["name"] == expected
    assert upload["if"] == "always()"


def test_only_what_the_gate_judged_is_signed() -> None:
    gate, sign = WORKFLOWS["release"]["jobs"]["attest"]["steps"][3:]
    assert "--checksums build/checksums.txt " in gate["run"]
    assert sign["with"] == {"subject-checksums": "build/checksums.txt"}


def test_the_upload_that_cannot_be_undone_is_the_last() -> None:
    assert {"attest", "page"} <= before("publish")


def test_the_release_is_of_a_tag() -> None:
    # YAML reads the key "on" as true.
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}


def test_the_matrix_is_the_release_policy() -> None:
    for workflow, name in (("wheels", "wheel"), ("release", "verify")):
        matrix = WORKFLOWS[workflow]["jobs"][name]["strategy"]["matrix"]
        assert set(matrix) == {"toolkit"}
        assert re.fullmatch(r"\$\{\{ fromJSON\(needs\..*\.toolkits\) \}\}", matrix["toolkit"])


def test_cibuildwheel_and_the_release_policy_name_the_same_images() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    toolkits = load_policy().toolkits.values()
    assert sorted(project["build"]) == sorted(kit.cibuildwheel for kit in toolkits)
    for kit in toolkits:
        (chosen,) = (
            each for each in project["overrides"]
            if kit.cibuildwheel.startswith(each["select"].removesuffix("*"))
        )  # fmt: skip
        assert chosen["manylinux-x86_64-image"].endswith(f":cuda{kit.series}")
