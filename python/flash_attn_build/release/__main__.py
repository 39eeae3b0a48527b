"""Passes the wheels in dist/ through the gate, and writes what is published into build/release."""

from __future__ import annotations

import argparse
import html
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..compile import manifest
from ..errors import RefusedError, exit_status
from ..files import ROOT, sha256_of, write_json, write_text
from . import attestations
from .gate import Verdict, find_runs, find_wheels, gpu_test_modules, judge
from .policy import POLICY

RESULT = "test-result.json"  # beside the folder of the release: the predicate to be attested


def release(
    dist: Path, reports: Path, out: Path, attested: Sequence[str] = (), root: Path = ROOT
) -> None:
    """Passes wheels through the gate, and writes what is published.

    Args:
        dist: Folder for wheels.
        reports: Folder that holds the verification reports.
        out: Folder for what is published: `assets/` for the GitHub release, `package-index/` for
            the wheels without a local version, notes.md and SHA256SUMS; removed if the gate
            refuses. test-result.json beside it tells that the wheels passed, or failed for good.
        attested: Repository, commit and tag whose attestations wheels and manifests must have;
            there may be no reports of other wheels then. None: by hand.
        root: The source tree.
    """
    shutil.rmtree(out, ignore_errors=True)
    (out.parent / RESULT).unlink(missing_ok=True)
    wheels = find_wheels(dist)
    repository, commit, tag = attested or ("", "", "")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        made = Path(name, "made")
        assets = made / "assets"
        assets.mkdir(parents=True)
        # Copies, so that what is judged is what is published.
        for wheel in wheels:
            for path in (wheel, manifest.path_of(wheel)):
                if path.exists():
                    shutil.copyfile(path, assets / path.name)
        if attested:
            sources = (f"--source-digest={commit}", f"--source-ref=refs/tags/{tag}")
            attestations.check_built(sorted(assets.iterdir()), repository, *sources)
            for wheel in find_wheels(assets):
                attestations.check_never_failed(wheel, repository)
        verdicts, problems = judge(
            find_wheels(assets), find_runs(reports), POLICY, root,
            tag=tag, allow_other_reports=not attested,
        )  # fmt: skip
        if problems or any(verdict.failed for verdict in verdicts.values()):
            if any(verdict.failed for verdict in verdicts.values()):
                write_json(out.parent / RESULT, test_result(verdicts, root, assets))
            raise RefusedError("not published, because of\n" + "\n".join(problems))
        (made / "package-index").mkdir()
        for kind, verdict in verdicts.items():
            wheel = verdict.wheel.path
            proofs = {report.path: report for report in verdict.verified.values()}
            for number, path in enumerate(sorted(proofs), start=1):
                # Written again: nothing of the GPU machine's files but what the schema names.
                target = assets / f"{wheel.name}.verification-{number}.json"
                write_json(target, proofs[path].content)
            if "+" not in kind:
                shutil.copyfile(wheel, made / "package-index" / wheel.name)
        changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
        write_text(made / "notes.md", _notes(verdicts, changelog))
        paths = [path for path in made.rglob("*") if path.is_file()]
        paths.sort(key=lambda path: path.relative_to(made).as_posix())
        sums = [f"{sha256_of(path)}  {path.relative_to(made).as_posix()}\n" for path in paths]
        write_text(made / "SHA256SUMS", "".join(sums))
        write_json(out.parent / RESULT, test_result(verdicts, root, assets))
        made.rename(out)
    for verdict in verdicts.values():
        print(f"{verdict.wheel.path.name}: {verdict.wheel.sha256}: the gate is open")


def test_result(verdicts: Mapping[str, Verdict], root: Path, assets: Path) -> dict[str, Any]:
    """The predicate (in-toto, test-result v0.1) that the workflow attests of the wheels."""
    failed = [failure for verdict in verdicts.values() for failure in verdict.failed]
    passed = [] if failed else [*POLICY.required_sections]
    if not failed:
        passed += [f"contract: {name}" for name in POLICY.required_checks]
        passed += gpu_test_modules(root, POLICY)
    lacking = {name for verdict in verdicts.values() for name in verdict.unverified}
    # By what it was judged, and what is published of that.
    paths = [ROOT / "python/flash_attn_build/release/policy.py", *sorted(assets.iterdir())]
    return {
        "result": "FAILED" if failed else "PASSED",
        "configuration": [
            {"name": path.name, "digest": {"sha256": sha256_of(path)}} for path in paths
        ],
        "passedTests": passed,
        "warnedTests": [f"{name}: not verified" for name in sorted(lacking)],
        "failedTests": failed,
    }


def _notes(verdicts: Mapping[str, Verdict], changelog: str) -> str:
    """The notes of a release, in Markdown: changes, what was verified, what was not."""
    first = next(iter(verdicts.values())).wheel
    version = first.version
    # The version's part, which `## 1.2.3 (date)` opens, without that heading.
    part = rf"^## {re.escape(version)}(?=\s|$)[^\n]*\n(.*?)(?=^## |\Z)"
    found = re.search(part, changelog, re.M | re.S)
    lines = [found[1].strip() if found else "", "", "## Verified", ""]
    lines += ["| wheel | CUDA | architectures | GPU | sha256 |", "|---|---|---|---|---|"]
    for kind, verdict in verdicts.items():
        reports = verdict.verified.values()
        gpus = sorted({str(report.content["environment"]["gpu"]) for report in reports})
        lines.append(
            f"| {version}, {kind}{'' if '+' in kind else ', package index'} "
            f"| {verdict.wheel.manifest['cuda_toolkit']} | {', '.join(sorted(verdict.verified))} "
            f"| {_plain(', '.join(gpus))} | `{verdict.wheel.sha256}` |"
        )
    unverified = {name: why for each in verdicts.values() for name, why in each.unverified.items()}
    lines += ["", "## Not verified", ""] if unverified else []
    for name, why in sorted(unverified.items()):
        allowed = POLICY.unverified_architectures[name]
        run = f" Its PTX was run on a newer GPU ({allowed.ptx_report})." if allowed.ptx else ""
        lines.append(f"- **{name}**: {why}{run}")
    made = ", ".join(f"{name} {number}" for name, number in [*first.manifest["tools"].items()][:3])
    lines += ["", f"Made with {_plain(made)} and the packages of locks/: the same give the same "
              "bytes."]  # fmt: skip
    return "\n".join(lines).strip() + "\n"


def _plain(text: str) -> str:
    """Text that Markdown and HTML show as it is."""
    return re.sub(r"([\\`*_{}\[\]<>#!|~])", r"\\\1", html.escape(" ".join(text.split())))


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="nox -s gate --", description=__doc__)
    parser.add_argument("--dist", type=Path, default=root / "dist", help="wheels (dist)")
    parser.add_argument("--reports", type=Path, help="verification reports (those below --dist)")
    parser.add_argument(
        "--out", type=Path, default=root / "build" / "release", help="build/release"
    )
    parser.add_argument(
        "--attested", nargs=3, default=(), metavar=("OWNER/NAME", "COMMIT", "TAG"),
        help="wheels and manifests must have attestations of that repository, commit and tag",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    reports, out = given.reports or given.dist, given.out.resolve()
    return exit_status(
        lambda: release(given.dist, reports, out, given.attested, root), "Nothing may be published."
    )


if __name__ == "__main__":
    sys.exit(main())
