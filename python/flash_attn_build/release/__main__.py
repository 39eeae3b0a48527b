"""Passes the wheels in dist/ through the gate, and writes to build/to-publish what is published."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..compile import manifest
from ..errors import RefusedError, exit_status
from ..files import ROOT, replacing_folder, sha256_of, write_json, write_text
from . import attestations
from .gate import Verdict, find_runs, find_wheels, gpu_test_modules, judge
from .policy import POLICY

RESULT = "test-result.json"  # beside the folder of the release: the predicate to be attested


def release(
    dist: Path, reports: Path, out: Path, attested: Sequence[str] = (), root: Path = ROOT
) -> None:
    """Passes the wheels in `dist` through the gate, with the reports below a folder.

    What is published is written into `out`: `assets/` for the GitHub release, `package-index/` for
    the wheels without a local version, notes.md and SHA256SUMS; it is removed if the gate refuses.
    test-result.json beside it tells that the wheels passed, or failed for good. `attested`:
    repository, commit and tag whose attestations wheels and manifests must have; there may be no
    reports of other wheels then.
    """
    shutil.rmtree(out, ignore_errors=True)
    (out.parent / RESULT).unlink(missing_ok=True)
    with replacing_folder(out) as made:
        assets, index = made / "assets", made / "package-index"
        assets.mkdir()
        index.mkdir()
        # Copies, so that what is judged is what is published.
        for wheel in find_wheels(dist):
            for path in filter(Path.exists, (wheel, manifest.path_of(wheel))):
                shutil.copyfile(path, assets / path.name)
        wheels = find_wheels(assets)
        tag = attested[2] if attested else None
        verdicts, problems = judge(wheels, find_runs(reports), POLICY, root, tag)
        failed = [failure for verdict in verdicts.values() for failure in verdict.failed]
        if failed:  # before anything that may raise for another reason
            write_json(out.parent / RESULT, test_result(verdicts, failed, root, assets))
        if attested:
            repository, commit, _ = attested
            sources = (f"--source-digest={commit}", f"--source-ref=refs/tags/{tag}")
            attestations.check_built(sorted(assets.iterdir()), repository, *sources)
            for wheel in wheels:
                attestations.check_never_failed(wheel, repository)
        if not problems:
            _write(made, verdicts, (root / "CHANGELOG.md").read_text(encoding="utf-8"))
            write_json(out.parent / RESULT, test_result(verdicts, failed, root, assets))
        if problems:
            raise RefusedError("not published, because of\n" + "\n".join(problems))
    for verdict in verdicts.values():
        print(f"{verdict.wheel.path.name}: {verdict.wheel.sha256}: the gate is open")


def _write(made: Path, verdicts: Mapping[str, Verdict], changelog: str) -> None:
    """Adds reports, notes and the list of all files to the wheels and manifests in `made`."""
    for kind, verdict in verdicts.items():
        wheel = verdict.wheel.path
        proofs = {report.path: report for report in verdict.verified.values()}
        for number, path in enumerate(sorted(proofs), start=1):
            # Written again: nothing of the GPU machine's files but what the schema names.
            target = made / "assets" / f"{wheel.name}.verification-{number}.json"
            write_json(target, proofs[path].content)
        if "+" not in kind:
            shutil.copyfile(wheel, made / "package-index" / wheel.name)
    write_text(made / "notes.md", _notes(verdicts, changelog))
    paths = sorted(path for path in made.rglob("*") if path.is_file())
    sums = {path.relative_to(made).as_posix(): sha256_of(path) for path in paths}
    judged = {verdict.wheel.sha256 for verdict in verdicts.values()}
    if {found for name, found in sums.items() if name.endswith(".whl")} != judged:
        raise RefusedError("the bytes of a wheel are no longer those that were judged")
    write_text(made / "SHA256SUMS", "".join(f"{sums[name]}  {name}\n" for name in sums))


def test_result(
    verdicts: Mapping[str, Verdict], failed: Sequence[str], root: Path, assets: Path
) -> dict[str, Any]:
    """The predicate (in-toto, test-result v0.1) that the workflow attests of the wheels."""
    passed = [
        *POLICY.required_sections,
        *(f"contract: {name}" for name in POLICY.required_checks),
        *gpu_test_modules(root, POLICY),
    ]
    lacking = {name for verdict in verdicts.values() for name in verdict.unverified}
    # By what it was judged, and what is published of that.
    paths = [ROOT / "python/flash_attn_build/release/policy.py", *sorted(assets.iterdir())]
    return {
        "result": "FAILED" if failed else "PASSED",
        "configuration": [
            {"name": path.name, "digest": {"sha256": sha256_of(path)}} for path in paths
        ],
        "passedTests": [] if failed else passed,
        "warnedTests": [f"{name}: not verified" for name in sorted(lacking)],
        "failedTests": failed,
    }


def _notes(verdicts: Mapping[str, Verdict], changelog: str) -> str:
    """The notes of a release, in Markdown: changes, what was verified, what was not."""
    first = next(iter(verdicts.values())).wheel
    # The version's part, which `## 1.2.3 (date)` opens, without that heading.
    part = rf"^## {re.escape(first.version)} \(\d{{4}}-\d\d-\d\d\)\n(.*?)(?=^## |\Z)"
    found = re.search(part, changelog, re.M | re.S)
    if found is None:
        raise RefusedError(f"CHANGELOG.md: has no part `## {first.version} (YYYY-MM-DD)`")
    lines = [found[1].strip(), "", "## Verified", ""]
    lines += ["| wheel | CUDA | architectures | GPU | sha256 |", "|---|---|---|---|---|"]
    for kind, verdict in verdicts.items():
        # The policy's patterns of names leave room for Markdown.
        gpus = {str(report.content["environment"]["gpu"]) for report in verdict.verified.values()}
        lines.append(
            f"| {first.version}, {kind}{'' if '+' in kind else ', package index'} "
            f"| {verdict.wheel.manifest['cuda_toolkit']} | {', '.join(sorted(verdict.verified))} "
            f"| {_plain(', '.join(sorted(gpus)))} | `{verdict.wheel.sha256}` |"
        )
    unverified = {name: why for each in verdicts.values() for name, why in each.unverified.items()}
    lines += ["", "## Not verified", ""] if unverified else []
    for name, why in sorted(unverified.items()):
        report = POLICY.unverified_architectures[name].ptx_report
        lines.append(f"- **{name}**: {why} Its PTX was run on a newer GPU ({report}).")
    return "\n".join(lines).strip() + "\n"


def _plain(text: str) -> str:
    """Text that Markdown and HTML show as it is."""
    return re.sub(r"[^\w .,:;()/+-]|_", lambda c: f"&#{ord(c[0])};", " ".join(text.split()))


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="nox -s gate --", description=__doc__)
    parser.add_argument("--reports", type=Path, help="verification reports (those below dist)")
    parser.add_argument(
        "--attested", nargs=3, default=(), metavar=("OWNER/NAME", "COMMIT", "TAG"),
        help="wheels and manifests must have attestations of that repository, commit and tag",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    dist, out = root / "dist", root / "build" / "to-publish"
    return exit_status(
        lambda: release(dist, given.reports or dist, out, given.attested, root),
        "Nothing may be published.",
    )


if __name__ == "__main__":
    sys.exit(main())
