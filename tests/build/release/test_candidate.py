"""A wheel is held to its manifest, both to the source tree, and damage is a reason against it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import release_samples
from flash_attn_build.compile import sources
from flash_attn_build.files import ROOT
from flash_attn_build.release.candidate import instance_problems, read_candidate
from flash_attn_build.wheel import check
from release_samples import TAG, Change, Project, edit, put

# Where a manifest says something else than that of a release, and what.
VALUES: dict[str, object] = {
    "wheel.sha256": "0" * 64,
    "upstream.version": "9",
    "upstream": [],
    "build.preset": "dev",
    "build.defines": ["A=1"],
    "build.environment": {"CXXFLAGS": "-ffast-math"},
    "build.locked": False,
    "build.compiled_in_this_run": 0,
    "sources.cpp": "0" * 64,
    "deterministic": False,
    "architectures": ["90-real"],
    "bits_version": 2,
    "tools.nvcc": "12.4.131",
    "totals.translation_units": 3,
}
MANIFESTS: dict[str, tuple[Change, str]] = {
    **{path: (put(path, value), f"manifest: {path}") for path, value in VALUES.items()},
    "schema": (lambda m: m.update(schema=1), "manifest: expected schema 4"),
    "no environment": (lambda m: m["build"].pop("environment"), "build.environment: expected {}"),
    "build": (put("build", "x"), "manifest: cannot be compared with the tree"),
    "tools": (put("tools", []), "manifest: cannot be compared with the tree"),
    "no flags": (lambda m: m.pop("flags"), "manifest: cannot be compared with the tree"),
    "another linker": (
        lambda m: m["tools"].update(ziglang="0.13.0"),
        "built with ziglang 0.13.0, but locks/ has ziglang==0.17.0",
    ),
    "headers": (lambda m: m["tools"].update(torch="2.12.0"), "built with torch 2.12.0"),
    "no nvcc of a package": (
        lambda m: m["tools"].pop("nvidia-cuda-nvcc"),
        "built with nvidia-cuda-nvcc None, but locks/ has nvidia-cuda-nvcc==13.0.88",
    ),
    "a package for an older Python": (
        lambda m: m["tools"].update(h11="2"), "built with h11 2, but locks/ has"
    ),
    "an older Python": (lambda m: m["tools"].update(python="3.11.9"), "built with h11 None"),
    "fewer units": (
        lambda m: m["translation_units"].pop(), "1 CUDA translation units for 2 kernels"
    ),
    "another date": (put("build.source_date_epoch", 10**9), "source_date_epoch is not the date in"),
    "a definition": (put("flags", {"fad_ops cxx": ["-DX"]}), "compiled with '-DX'"),
    "a header of elsewhere": (
        put("flags", {"fad_ops cxx": ["-include", "/opt/evil.h"]}), "'/opt/evil.h', which no CMake"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_wrong_manifest(project: Project, change: Change, expected: str) -> None:
    edit(project.manifest_path, change)
    assert expected in project.problems()


def test_a_single_byte_more(project: Project) -> None:
    with project.wheel.open("ab") as file:
        file.write(b"\0")
    found = project.problems()
    assert "archive: " in found
    assert "wheel.sha256: expected" in found
    assert "no complete, passing report" in found


def test_a_foreign_name(project: Project) -> None:
    wrong = project.wheel.with_name("other-1.0-py3-none-any.whl")
    shutil.copy(project.wheel, wrong)
    project.wheel = wrong
    found = project.problems()
    assert "name: expected flash_attn_deterministic-" in found
    assert f"is not tagged v1.0: it has {TAG}" in found


@pytest.mark.parametrize("change", ["edited", "new", "gone"])
def test_a_wheel_of_another_tree(project: Project, change: str) -> None:
    path = project.root / "python/flash_attn_deterministic/__init__.py"
    path = path.with_name("new.py") if change == "new" else path
    path.unlink() if change == "gone" else path.write_text("a = 1\n")
    project.tag()
    expected = f"wheel: built from another tree: flash_attn_deterministic/{path.name}"
    assert project.decide().problems == (expected,)


@pytest.mark.parametrize("name", release_samples.NATIVE)
def test_a_wheel_whose_machine_code_is_of_another_tree(project: Project, name: str) -> None:
    # A file that was put back after the build, before the tag, is not in git.
    with (project.root / name).open("a") as file:
        file.write(" ")
    part = next(part for part in sources.PARTS if name == part or name.startswith(f"{part}/"))
    problems = read_candidate(project.wheel, project.root, project.policy).problems
    assert f"wheel: built from another tree: {part}" in problems


def test_a_tree_that_lacks_what_the_wheel_is_held_to(project: Project) -> None:
    (project.root / "cpp" / "upstream" / "upstream.json").unlink()
    shutil.rmtree(project.root / "cmake")
    found = "\n".join(read_candidate(project.wheel, project.root, project.policy).problems)
    assert "upstream.json" in found
    assert "wheel: cannot be compared with manifest and tree (FileNotFoundError" in found


@pytest.mark.parametrize(
    ("held", "missing"),
    [
        ([("fwd", 64)], "bwd bf16 64"),
        ([("fwd", 64), ("bwd", 64), ("bwd", 64)], "none"),
        ([("fwd", 64), ("bwd", 64), ("fwd", 32)], "none"),
    ],
    ids=["no backward", "twice", "one more"],
)
def test_a_wheel_with_other_kernels_than_the_tree_has(
    intact: Project, held: list[tuple[str, int]], missing: str
) -> None:
    instances = [{"direction": d, "dtype": "bf16", "head_dim": n} for d, n in held]
    (found,) = instance_problems({"instances": instances}, intact.root)
    assert found.endswith(f"not those of cpp/instances.json: missing are {missing}")


def test_several_families_of_a_kernel_are_one_kernel_of_the_real_table() -> None:
    table = json.loads((ROOT / "cpp" / "instances.json").read_text())
    instances = [
        {"direction": direction, "dtype": dtype, "head_dim": int(head_dim), "family": family}
        for dtype in table["dtypes"]
        for head_dim in table["bwd_tiles"]
        for direction in ("fwd", "bwd")
        for family in ("sm80", "sm90")
    ]
    assert list(instance_problems({"instances": instances}, ROOT)) == []
    for wrong in ([*instances, instances[0]], instances[2:]):
        assert len(list(instance_problems({"instances": wrong}, ROOT))) == 1


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
