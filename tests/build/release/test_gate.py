"""What the gate lets through, what it demands of this project, and damage without a trace.

test_attacks.py has what it refuses.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import release_samples
from flash_attn_build.files import ROOT
from flash_attn_build.release.candidate import instance_problems, read_candidate
from flash_attn_build.release.gate import gpu_test_modules
from flash_attn_build.release.report import digest, proof_problems, read_report, runs_on
from flash_attn_build.wheel import check
from flash_attn_deterministic.verify import environment
from flash_attn_deterministic.verify.contract.checks import CHECKS
from release_samples import POLICY, TAG, Project, edit, put, sections


def test_every_reason_is_told_at_once(project: Project) -> None:
    edit(project.report_path, lambda r: r.update(quick=True, complete=False))
    project.git("tag", "--delete", TAG)
    (project.root / "new").write_text("")
    found = project.problems()
    for expected in ("changed after", "quick: ", "complete: ", "no tag", "new"):
        assert expected in found
    shutil.rmtree(project.dist / "verification")
    assert "sm_90: no complete, passing report for sha256" in project.problems()


@pytest.mark.parametrize(
    ("architecture", "capability", "expected"),
    [
        ("sm_90", "9.0", True), ("sm_80", "8.9", True), ("sm_86", "8.0", False),
        ("sm_80", "9.0", False), ("sm_90a", "9.0", True), ("sm_90a", "9.1", False),
        ("compute_80", "12.0", True), ("compute_100", "9.0", False), ("sm_100", "10.0", True),
        ("sm_90", "None", False), ("sm_", "9.0", False), ("sm_" + "9" * 5000, "9.0", False),
        ("sm_90", "9" * 5000 + ".0", False),
    ],
    ids=lambda value: str(value)[:12],
)  # fmt: skip
def test_what_runs_where(architecture: str, capability: str, expected: bool) -> None:
    assert runs_on(architecture, capability) == expected


def test_a_run_of_ptx_that_stands_in(project: Project) -> None:
    """Golden hashes are of machine code; a new version with the same kernels needs no new run."""
    states = {"golden": "not-applicable", "family": "not-applicable", "forward": "not-run"}
    other = put("build.sources", {**json.loads(project.ptx_path.read_text())["build"]["sources"],
                                  "pyproject.toml": "0" * 64})  # fmt: skip
    for change in (put("sections", sections(**states)), other):
        edit(project.ptx_path, change, sign=True)
    project.tag()
    assert project.problems() == ""


def test_the_schema_takes_the_reports_that_gpus_wrote() -> None:
    for path in (ROOT / "docs" / "results").glob("verification*.json"):
        assert read_report(path, ROOT).problems == (), path.name


def test_no_place_of_a_schema_takes_a_field_without_a_name_for_it() -> None:
    """What it takes is published."""

    def nodes(value: Any) -> Iterator[Any]:
        yield value
        if isinstance(value, (dict, list)):
            for each in value.values() if isinstance(value, dict) else value:
                yield from nodes(each)

    for name in release_samples.SCHEMAS:
        for node in nodes(json.loads((ROOT / name).read_text())):
            if isinstance(node, dict) and "object" in node.get("type", ()):
                assert node.get("additionalProperties") is False or "propertyNames" in node, node


FREE = ("environment", "digest", "started", "seconds", "baseline")  # of a report


def test_no_part_of_a_report_can_be_exchanged(intact: Project, tmp_path: Path) -> None:
    judged = read_candidate(intact.wheel, intact.root, intact.policy)
    content = json.loads(intact.report_path.read_text())
    path = tmp_path / "changed.json"
    release_samples.write_gpu_tests(tmp_path / "gpu-tests.xml", judged.sha256)
    for key in (key for key in content if key not in FREE):
        for value in (None, True, False, 0, 2, "", "x", [], ["x"], {}, {"x": 1}):
            changed = {**content, key: value}
            changed["digest"] = digest(changed)
            path.write_text(json.dumps(changed))
            report = read_report(path, intact.root)
            same = value is content[key] or (value == content[key] and value != 0)
            problems = list(proof_problems(report, judged, intact.policy, ()))
            assert problems or same, (key, value)


def test_the_policy_demands_what_reports_have() -> None:
    schema = json.loads((ROOT / release_samples.SCHEMAS[0]).read_text())
    rows = schema["properties"]["sections"]["prefixItems"]
    assert list(POLICY.required_sections) == [row["properties"]["id"]["const"] for row in rows]
    listed = schema["$defs"]["check"]["properties"]["id"]["enum"]
    assert list(POLICY.required_checks) == listed == [check.id for check in CHECKS]


def test_gpu_tests_that_are_not_asked_for_exist() -> None:
    asked = gpu_test_modules(ROOT, POLICY)
    others = set(gpu_test_modules(ROOT, replace(POLICY, other_gpu_tests=()))) - set(asked)
    assert asked
    for name in POLICY.other_gpu_tests:
        assert any(name in module.split(".") for module in others), name


def test_a_run_on_hopper_proves_what_the_policy_demands_of_the_release() -> None:
    """All machine code of the real preset is demanded or let through by name."""
    presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
    (release,) = (each for each in presets if each["name"] == "release")
    held = release["cacheVariables"]["CMAKE_CUDA_ARCHITECTURES"].split(";")
    found = environment.architectures(held, "9.0")
    assert set(found["ran"]) == set(POLICY.required_architectures)
    assert set(found["unverified"]) == set(POLICY.unverified_architectures)
    assert all(POLICY.required_architectures.values())


def test_a_release_holds_every_head_dim_of_the_table() -> None:
    presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
    table = json.loads((ROOT / "cpp" / "instances.json").read_text())
    head_dims = {head_dim for tiles in table["fwd_tiles"].values() for head_dim in tiles}
    built = presets[0]["cacheVariables"]["FLASH_ATTENTION_HEAD_DIMS"].split(";")
    assert sorted(built) == sorted(head_dims)


def test_the_kernels_are_those_of_the_table_in_as_many_families_as_there_are() -> None:
    table = json.loads((ROOT / "cpp" / "instances.json").read_text())
    instances = [
        {"direction": direction, "dtype": dtype, "head_dim": int(head_dim), "family": family}
        for dtype in table["dtypes"]
        for direction, head_dims in (
            ("fwd", [*table["fwd_tiles"]["one_cta"], *table["fwd_tiles"]["latent"]]),
            ("bwd", table["bwd_tiles"]),
        )
        for head_dim in head_dims
        for family in ("sm80", "sm90")
    ]
    assert list(instance_problems({"instances": instances}, ROOT)) == []
    more = {**instances[0], "head_dim": 7}
    first = "{direction} {dtype} {head_dim}".format(**instances[0])
    real = {**instances[0], "head_dim": float(instances[0]["head_dim"])}
    for wrong, missing in (
        ([*instances, instances[0]], "none"), ([*instances, more], "none"),
        (instances[2:], first), ([*instances, real], "none"),
    ):  # fmt: skip
        (found,) = instance_problems({"instances": wrong}, ROOT)
        assert found.endswith(f"not those of cpp/instances.json: missing are {missing}")


@pytest.mark.parametrize("text", ["[]", "{", '{"instances": 3}', "null", "[" * 99_999])
def test_build_information_of_another_form(intact: Project, tmp_path: Path, text: str) -> None:
    made = release_samples.wheel(tmp_path / "wheel", {check.BUILD_INFO: text.encode()})
    problems = read_candidate(made, intact.root, intact.policy).problems
    assert [problem for problem in problems if problem.startswith("wheel: ")]


def test_no_damage_ends_in_a_trace(project: Project) -> None:
    whole, draw = project.wheel.read_bytes(), random.Random(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for at in draw.sample(range(len(whole)), 5):
            damaged[at] ^= 1 << draw.randrange(8)
        project.wheel.write_bytes(damaged[: draw.choice([None, draw.randrange(len(whole))])])
        problems = read_candidate(project.wheel, project.root, project.policy).problems
        assert any(problem.startswith("wheel: ") for problem in problems)
