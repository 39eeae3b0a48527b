"""The files of a .dist-info that pyproject.toml decides: the build writes, the gate compares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomllib  # type: ignore[import-not-found, unused-ignore]
from packaging.requirements import Requirement

from ..errors import BuildError
from .sbom import LICENCE_TEXTS

PACKAGE = "flash_attn_deterministic"
# Tables and values of [project] that go into METADATA or entry_points.txt.
_KNOWN = {
    "name", "version", "description", "readme", "requires-python", "license", "license-files",
    "keywords", "classifiers", "urls", "dependencies", "optional-dependencies", "scripts",
    "entry-points",
}  # fmt: skip


def folder(version: str) -> str:
    """Names the .dist-info of a version."""
    return f"{PACKAGE}-{version}.dist-info"


def files(root: Path, local: str, tag: str) -> dict[str, bytes]:
    """Those of a source tree's wheel, by name, for a local version (or "") and a platform tag."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if unknown := {*project} - _KNOWN:
        raise BuildError(f"pyproject.toml: no file of the wheel has {', '.join(unknown)} yet")
    version = project["version"] + (f"+{local}" if local else "")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    sections = (
        [f"[{group}]", *(f"{name} = {value}" for name, value in found.items()), ""]
        for group, found in groups.items()
    )
    made = {
        "METADATA": _metadata(project, version, (root / project["readme"]).read_text("utf-8")),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: flash_attn_build\nRoot-Is-Purelib: false\n"
        f"Tag: {tag}\n",
        "entry_points.txt": "\n".join(line for section in sections for line in section),
    }
    texts = {f"licenses/{name}": (root / name).read_bytes() for name in project["license-files"]}
    found = {**{name: text.encode() for name, text in made.items()}, **texts}
    return {f"{folder(version)}/{name}": data for name, data in found.items()}


def _metadata(project: Mapping[str, Any], version: str, readme: str) -> str:
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {version}",
        f"Summary: {project['description']}",
        f"Keywords: {','.join(project['keywords'])}",
        f"License-Expression: {project['license']}",
        *(f"License-File: {each}" for each in (*project["license-files"], *sorted(LICENCE_TEXTS))),
        *(f"Classifier: {each}" for each in project["classifiers"]),
        *(f"Project-URL: {label}, {url}" for label, url in project.get("urls", {}).items()),
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {Requirement(each)}" for each in project["dependencies"]),
    ]
    for extra, wanted in project.get("optional-dependencies", {}).items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {Requirement(f'{e}; extra == {extra!r}')}" for e in wanted]
    return "\n".join([*lines, "Description-Content-Type: text/markdown", "", readme])
