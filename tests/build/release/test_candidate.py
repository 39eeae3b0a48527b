"""A wheel is held to its manifest, both to the source tree, and damage is a reason against it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import release_samples
from flash_attn_build.files import ROOT
from flash_attn_build.release.candidate import instance_problems, read_candidate
from flash_attn_build.wheel import check
from release_samples import TAG, Project


def test_a_foreign_name(project: Project) -> None:
    wrong = project.wheel.with_name("other-1.0-py3-none-any.whl")
    shutil.copy(project.wheel, wrong)
    project.wheel = wrong
    found = project.problems()
    assert "name: expected flash_attn_deterministic-" in found
    assert f"is not tagged v1.0: it has {TAG}" in found


def test_a_tree_that_lacks_what_the_wheel_is_held_to(project: Project) -> None:
    (project.root / "cpp" / "upstream" / "upstream.json").unlink()
    shutil.rmtree(project.root / "cmake")
    found = "\n".join(read_candidate(project.wheel, project.root, project.policy).problems)
    assert "upstream.json" in found
    assert "wheel: cannot be compared with manifest and tree (FileNotFoundError" in found


def test_the_kernels_are_those_of_the_table_in_as_many_families_as_there_are() -> None:
    table = json.loads((ROOT / "cpp" / "instances.json").read_text())
    instances = [
        {"direction": direction, "dtype": dtype, "head_dim": int(head_dim), "family": family}
        for dtype in table["dtypes"]
        for head_dim in table["bwd_tiles"]
        for direction in ("fwd", "bwd")
        for family in ("sm80", "sm90")
    ]
    assert list(instance_problems({"instances": instances}, ROOT)) == []
    more = {**instances[0], "head_dim": 7}
    first = "{direction} {dtype} {head_dim}".format(**instances[0])
    for wrong, missing in (
        ([*instances, instances[0]], "none"), ([*instances, more], "none"), (instances[2:], first)
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
