"""Configuration that no session of ours runs is held to the tools' own rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli
from cibuildwheel.options import CommandLineArguments, Options
from flash_attn_build import repair, wheelcheck

ROOT = Path(__file__).resolve().parents[2]
IDENTIFIERS = {"cp310-manylinux_x86_64": "12.8", "cp311-manylinux_x86_64": "13.0"}


@pytest.fixture(scope="module")
def project() -> Any:
    return tomli.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Options:
    arguments = CommandLineArguments.defaults()
    arguments.package_dir = ROOT
    return Options(platform="linux", command_line_arguments=arguments, env={})


def test_cibuildwheel_builds_one_wheel_per_cuda_version() -> None:
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers"]
    done = subprocess.run(
        [*command, "--platform", "linux", str(ROOT)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == list(IDENTIFIERS)


@pytest.mark.parametrize(("identifier", "cuda"), IDENTIFIERS.items())
def test_cibuildwheel_uses_the_image_of_the_cuda_version(
    options: Options, identifier: str, cuda: str
) -> None:
    chosen = options.build_options(identifier)
    assert chosen.manylinux_images is not None
    assert chosen.manylinux_images["x86_64"] == f"pytorch/manylinux2_28-builder:cuda{cuda}"


def test_cibuildwheel_passes_wheels_through_our_gate(options: Options) -> None:
    chosen = options.build_options(next(iter(IDENTIFIERS)))
    assert chosen.repair_command == f"python -m {repair.__name__} {{wheel}} {{dest_dir}}"
    assert f"py3-none-{repair.PLATFORM}" == wheelcheck.TAG
    assert "cmake.args" in chosen.config_settings
    assert chosen.build_frontend is not None
    assert chosen.build_frontend.name == "build"


def test_a_wrong_option_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.cibuildwheel]\nno-such-option = 'x'\n")
    done = subprocess.run(
        [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux",
         str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "no-such-option" in done.stdout + done.stderr


def test_pyproject_is_valid() -> None:
    command = [sys.executable, "-m", "validate_pyproject", str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_group_that_cibuildwheel_and_nox_name_exists(project: Any) -> None:
    groups = project["dependency-groups"]
    before = project["tool"]["cibuildwheel"]["before-build"]
    named = {words.split()[0] for words in before.split("--group ")[1:]}
    assert named == {"build", "torch"}
    assert {"build", "torch", "cuda", "test", "lint", "matrix"} <= set(groups)


def test_build_requirements_are_in_the_build_group(project: Any) -> None:
    # The build runs without isolation, so nothing else installs them.
    def names(requirements: list[Any]) -> set[str]:
        found = set()
        for item in requirements:
            if isinstance(item, dict):
                found |= names(project["dependency-groups"][item["include-group"]])
            else:
                found.add(item.split(">")[0].split("=")[0])
        return found

    wanted = names(project["build-system"]["requires"])
    assert wanted <= names(project["dependency-groups"]["build"])
