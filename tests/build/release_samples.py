"""A small project that is ready for release: tagged tree, wheel with manifest, passing report."""

from __future__ import annotations

import json
import subprocess
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fake_wheel
from flash_attn_build import files
from flash_attn_build.compile import manifest, sources
from flash_attn_build.files import ROOT
from flash_attn_build.release import policy as policies
from flash_attn_build.release.gate import Verdict, decide, find_runs
from flash_attn_build.release.policy import Policy
from flash_attn_build.release.report import digest, read_report
from flash_attn_build.wheel import check, dist_info

SCHEMAS = ("docs/verification.schema.json", "docs/manifest.schema.json")
SETTINGS = {
    "preset": "release", "defines": [], "environment": {}, "locked": True, "source_date_epoch": 0,
    "toolkit_sha256": "70" * 32, "compiled_in_this_run": 2, "jobs": 2, "wall_seconds": 9.0,
    "machine": {"system": "Debian", "image": ""},
}  # fmt: skip
TOOLS = {
    "nvcc": "13.0.88", "g++": "(x) 12.2.0", "python": "3.12.3", "ziglang": "0.17.0",
    "torch": "2.13.0+cpu", "nvidia-cuda-nvcc": "13.0.88",
}  # fmt: skip
LOCKS = {
    "build": "ziglang==0.17.0 --hash=sha256:00\n"
    "h11==1 ; python_full_version < '3.12' --hash=sha256:00\n",
    "torch": "torch==2.13.0 --hash=sha256:00\n",
    "cuda": "nvidia-cuda-nvcc==13.0.88 ; sys_platform == 'linux' --hash=sha256:00\n",
}
TAG = f"v{fake_wheel.VERSION}"
Change = Callable[[dict[str, Any]], object]
OTHER_WHEEL = {"filename": "x.whl", "sha256": "1" * 64}  # what a report of another wheel names
# The real one, but for the toolkit: that of the samples.
CUDA = str(fake_wheel.INFO["cuda_toolkit"])
POLICY = replace(policies.POLICY, wheels={"x86_64": CUDA}, toolkits={CUDA: ("70" * 32,)})
# As one GPU runs them.
MODULES = tuple(
    f"tests.{n}" for n in ("gpu.test_b", "gpu.x.test_a", "unit.interface.test_mistakes")
)
BUILD = ("cuda_toolkit", "architectures", "deterministic", "bits_version", "sources")  # in reports
# What the library of the samples is said to be compiled from.
_PIN = {
    "name": fake_wheel.INFO["upstream"]["name"],
    "version": fake_wheel.INFO["upstream"]["version"],
    "sdist": {"sha256": fake_wheel.INFO["upstream"]["sha256"]},
    "patches": fake_wheel.INFO["upstream"]["patches"],
}
_TABLE = {
    "dtypes": {"bf16": "bfloat16_t"}, "fwd_tiles": {"one_cta": {"64": {}}}, "bwd_tiles": {"64": {}}
}  # fmt: skip
NATIVE = {
    "CMakeLists.txt": "project(x)\n", "CMakePresets.json": "{}\n", "cmake/Link.cmake": "# link\n",
    "cpp/instances.json": json.dumps(_TABLE), "cpp/kernels/fwd.cu.in": "__global__ void fwd();\n",
    "cpp/upstream/upstream.json": json.dumps(_PIN),
    "pyproject.toml": (ROOT / "pyproject.toml").read_text(),
}  # fmt: skip


def edit(path: Path, change: Change, *, sign: bool = False) -> None:
    """Changes a JSON file; with `sign`, a report together with its digest."""
    content = json.loads(path.read_text())
    change(content)
    if sign:
        content["digest"] = digest(content)
    files.write_json(path, content)


def put(path: str, value: object) -> Change:
    """Sets a value deep in a JSON object: "build.preset"."""

    def change(content: Any) -> None:
        *way, last = path.split(".")
        for key in way:
            content = content[int(key) if isinstance(content, list) else key]
        content[last] = value

    return change


@dataclass
class Project:
    """Where everything lies: source tree (a git checkout), folder of wheels, the wheel."""

    root: Path
    dist: Path
    wheel: Path
    policy: Policy = POLICY

    @property
    def report_path(self) -> Path:
        return self.dist / "verification" / "1" / "verification.json"

    @property
    def ptx_path(self) -> Path:
        return self.root / POLICY.unverified_architectures["sm_80"].ptx_report

    @property
    def manifest_path(self) -> Path:
        return manifest.path_of(self.wheel)

    def add_report(self, name: str = "2", **changes: Any) -> Path:
        """Puts a second report beside the one that proves the wheel."""
        path = self.dist / "verification" / name / "verification.json"
        write_report(self.wheel, path, **changes)
        return path

    def git(self, *arguments: str) -> None:
        # No maintenance beside the tests, which copy the repository.
        own = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "maintenance.auto=0"]
        subprocess.run(["git", *own, "-C", str(self.root), *arguments], check=True)

    def tag(self) -> None:
        """Commits everything, and lets the release be of that commit."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", "y")
        self.git("tag", "--force", f"v{self.wheel.name.split('-')[1]}")

    def decide(self) -> Verdict:
        reports = [read_report(path, self.root) for path in find_runs(self.dist)]
        return decide(self.wheel, reports, self.policy, self.root)

    def problems(self) -> str:
        return "\n".join(self.decide().problems)

    def exchange(self, wheel: Path) -> None:
        """Puts another wheel in the place of the one that is there, with a manifest and a proof."""
        self.wheel.write_bytes(wheel.read_bytes())
        describe(self.wheel)
        write_report(self.wheel, self.report_path)


def make(root: Path, wheel: Path) -> Project:
    """Lays the project out around a wheel, which is copied."""
    dist = root / "dist"
    dist.mkdir(parents=True)
    placed = dist / wheel.name
    placed.write_bytes(wheel.read_bytes())
    describe(placed)
    write_native(root)
    for name in (*fake_wheel.OF_THE_TREE, *SCHEMAS):
        files.write_text(root / name, (ROOT / name).read_text())
    files.write_text(
        root / "CHANGELOG.md",
        f"# Changelog\n\n## {fake_wheel.VERSION} (2026-01-02)\n\n- First.\n\n## 0.0.1\n",
    )
    files.write_text(root / ".gitignore", "/dist/\n/build/\n")
    with zipfile.ZipFile(placed) as archive:
        for name in archive.namelist():
            if name.startswith(f"{dist_info.PACKAGE}/") and name.endswith((".py", ".typed")):
                files.write_text(root / "python" / name, archive.read(name).decode())
    for module in (*MODULES, "tests.gpu.ranks.test_two"):
        files.write_text(root / f"{module.replace('.', '/')}.py", "")
    project = Project(root, dist, placed)
    write_report(placed, project.report_path)
    for name, text in LOCKS.items():
        files.write_text(root / "locks" / f"{name}.txt", text)
    write_ptx_run(project)
    project.git("init", "--quiet", "--template=")
    project.tag()
    return project


def write_ptx_run(project: Project) -> None:
    """Writes the report of the wheel whose PTX stands in for sm_80's machine code."""
    text = {**json.loads(project.manifest_path.read_text()), "architectures": ["80-virtual"]}
    write_report(
        project.wheel, project.ptx_path, quick=True,
        wheel={"filename": project.wheel.name, "sha256": "80" * 32},
        architectures={"ran": [], "ran_as_ptx": ["compute_80"], "unverified": []},
        build={key: text[key] for key in BUILD},
    )  # fmt: skip


def write_native(root: Path) -> None:
    """Writes what the library is said to be compiled from."""
    for name, text in NATIVE.items():
        files.write_text(root / name, text)


def describe(wheel: Path) -> None:
    """Writes the manifest beside a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        info = json.loads(archive.read(check.BUILD_INFO))
    units = [
        {"output": f"{each['direction']}_{each['dtype']}_{each['head_dim']}.cu.o", "command": ["x"],
         "wall_seconds": 1.0}
        for each in info["instances"]
    ]  # fmt: skip
    cost = {"cpu_seconds": 9.0, "peak_rss_bytes": 1}
    text = manifest.describe(wheel, info, units, SETTINGS, TOOLS, {}, cost)
    files.write_json(manifest.path_of(wheel), text)


def write_report(wheel: Path, path: Path, /, **changes: Any) -> None:
    """Writes a report as a full run on a GPU of compute capability 9.0 leaves it."""
    text = json.loads(manifest.path_of(wheel).read_text())
    upstream, gpu = text["upstream"], {"gpu": "NVIDIA H200"}
    content: dict[str, Any] = {
        "schema_version": 2, "complete": True, "quick": False, "source_tree": False,
        "device": "cuda", "status": "passed", "started": "2026-01-01T00:00:00Z", "seconds": 200.0,
        "wheel": {"filename": wheel.name, "sha256": text["wheel"]["sha256"]},
        "installed": {
            "version": fake_wheel.VERSION, "files": 9, "matches_wheel": True, "problems": []
        },
        "environment": {**gpu, "compute_capability": "9.0"},
        "provenance": {
            "date": "2026-01-01", "command": "verify", "hardware": gpu, "wheel": None,
            "versions": {"torch": "2.13.0"},
            "sources": text["sources"], "bits_version": text["bits_version"],
        },
        "pins": {
            "upstream": {key: upstream[key] for key in ("name", "version", "sha256")},
            "patches": upstream["patches"],
        },
        "build": {**{key: text[key] for key in BUILD}, "golden": None},
        "architectures": {"ran": ["sm_90", "sm_90a"], "ran_as_ptx": [], "unverified": ["sm_80"]},
        "sections": sections(),
        **changes,
    }  # fmt: skip
    content["digest"] = digest(content)
    files.write_json(path, content)
    write_gpu_tests(path.with_name("gpu-tests.xml"), content["wheel"]["sha256"])


def write_gpu_tests(path: Path, sha256: str, modules: Sequence[str] = MODULES) -> None:
    """Writes results as pytest does: a test of each module passed."""
    cases = "".join(f'<testcase classname="{name}" name="test_a"></testcase>' for name in modules)
    suite = f'name="sha256:{sha256}" errors="0" failures="0" skipped="0" tests="{len(modules)}"'
    collected = f'<properties><property name="collected" value="{len(modules)}" /></properties>'
    text = f"<testsuites><testsuite {suite}>{collected}{cases}</testsuite></testsuites>"
    files.write_text(path, text)


def sections(**states: str) -> list[dict[str, Any]]:
    """The sections of a report; those, and rows of the contract, that are not named have passed."""
    passed = dict.fromkeys((*POLICY.required_checks, *POLICY.required_sections), "passed")
    state = {**passed, **states}
    checks: list[dict[str, Any]] = [
        {"id": name, "promise": "", "status": state[name], "reason": None, "cases": 1, "failed": 0,
         "seconds": 1.0, "by_config": {}, "counter_example": None, "stderr": None}
        for name in POLICY.required_checks
    ]  # fmt: skip
    return [
        {"id": name, "title": name, "status": state[name], "reason": None, "seconds": 1.0,
         "data": {"checks": checks} if name == "contract" else {}}
        for name in POLICY.required_sections
    ]  # fmt: skip


def results(*states: str) -> str:
    """What `gh` says of the attested results of a wheel."""
    predicates = [{"predicate": {"result": state}} for state in states]
    return json.dumps([{"verificationResult": {"statement": each}} for each in predicates])


def wheel(folder: Path, files: Mapping[str, bytes] | None = None, arm: bool = False) -> Path:
    """Makes a wheel that passes every check of the gate, with more files if given."""
    binary, tag = fake_wheel.library(folder / "library"), fake_wheel.TAG
    if arm:
        binary, tag = fake_wheel.for_arm(binary), fake_wheel.ARM_TAG
    write_native(folder / "tree")
    info = {**fake_wheel.INFO, "sources": sources.digests(folder / "tree")}
    contents = fake_wheel.contents(binary, tag, info=info)
    return fake_wheel.pack(folder, {**contents, **(files or {})}, tag)
