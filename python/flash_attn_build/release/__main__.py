"""Passes the wheels in dist/ through the gate, and writes what is published into build/release."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..compile import manifest
from ..errors import BuildError, RefusedError, exit_status
from ..files import ROOT, sha256_of, write_text
from . import kernels_hub
from .gate import Verdict, find_runs, find_wheels, judge
from .policy import POLICY
from .report import at


def release(
    dist: Path, reports: Path, out: Path, attested: tuple[str, str] | None, root: Path = ROOT
) -> None:
    """Passes wheels through the gate, and writes what is published.

    Args:
        dist: Folder for wheels.
        reports: Folder that holds the verification reports.
        out: Folder for what is published: `assets/` for the release page, `package-index/` for the
            wheel that has no local version, `kernels-hub/` for a repository of the kernel hub,
            notes.md and SHA256SUMS; replaced as a whole, removed if the gate refuses.
        attested: Repository and commit whose attestations wheels and manifests must have; there
            may be no reports of other wheels then.
        root: The source tree.

    Raises:
        RefusedError: The gate refuses a wheel; the message has every reason.
    """
    if attested:
        repository, commit = attested
        check_attestations(dist, repository, f"--source-digest={commit}", root)
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        made = Path(name, "made")
        assets = made / "assets"
        assets.mkdir(parents=True)
        # Copies, so that what is judged is what is published.
        for wheel in find_wheels(dist):
            for path in (wheel, manifest.path_of(wheel)):
                if path.exists():
                    shutil.copyfile(path, assets / path.name)
        runs = find_runs(reports)
        verdicts = judge(find_wheels(assets), runs, POLICY, root, strays=not attested)
        for label, verdict in verdicts.items():
            wheel = verdict.wheel.path
            proofs = sorted({report.path.parent for report in verdict.verified.values()})
            for number, folder in enumerate(proofs, start=1):
                for path in sorted(folder.glob("verification.*")):
                    target = f"{wheel.name}.verification-{number}{path.suffix}"
                    shutil.copyfile(path, assets / target)
            kernels_hub.write(wheel, made / "kernels-hub")
            if not label:
                (made / "package-index").mkdir()
                shutil.copyfile(wheel, made / "package-index" / wheel.name)
        changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
        write_text(made / "notes.md", _notes(verdicts, changelog))
        sums = sorted((path, sha256_of(path)) for path in made.rglob("*") if path.is_file())
        lines = (f"{digest}  {path.relative_to(made).as_posix()}\n" for path, digest in sums)
        write_text(made / "SHA256SUMS", "".join(lines))
        made.rename(out)
    for verdict in verdicts.values():
        print(f"{verdict.wheel.path.name}: {verdict.wheel.sha256}: the gate is open")


def _notes(verdicts: Mapping[str, Verdict], changelog: str) -> str:
    """The notes of a release, in Markdown: changes, what was verified, what was not."""
    version = verdicts[""].wheel.version
    # The version's part, which `## 1.2.3 (date)` opens, without that heading.
    part = rf"^## {re.escape(version)}(?=\s|$)[^\n]*\n(.*?)(?=^## |\Z)"
    found = re.search(part, changelog, re.M | re.S)
    lines = [found[1].strip() if found else "", "", "## Verified", ""]
    lines += ["| wheel | CUDA | architectures | GPU | sha256 |", "|---|---|---|---|---|"]
    for label, verdict in verdicts.items():
        reports = verdict.verified.values()
        gpus = sorted({str(at(report.content, "environment", "gpu")) for report in reports})
        lines.append(
            f"| {version}{'+' + label if label else ', package index'} "
            f"| {verdict.wheel.manifest['cuda_toolkit']} | {', '.join(sorted(verdict.verified))} "
            f"| {', '.join(gpus)} | `{verdict.wheel.sha256}` |"
        )
    unverified = {name: why for each in verdicts.values() for name, why in each.unverified.items()}
    lines += ["", "## Not verified", ""] if unverified else []
    for name, why in sorted(unverified.items()):
        allowed = POLICY.unverified_architectures[name]
        run = f" Its PTX was run on a newer GPU ({allowed.ptx_report})." if allowed.ptx else ""
        lines.append(f"- **{name}**: {why}{run}")
    tools = verdicts[""].wheel.manifest["tools"]
    made = ", ".join(f"{name} {number}" for name, number in list(tools.items())[:3])
    lines += ["", f"Made with {made} and the packages of locks/: the same give the same bytes."]
    return "\n".join(lines).strip() + "\n"


def gh(root: Path, *words: str) -> str:
    """Runs GitHub's command line tool.

    Args:
        root: The source tree, from which it knows the project.
        words: Its arguments.

    Returns:
        What it printed.

    Raises:
        BuildError: It is not there, or failed.
    """
    if not shutil.which("gh"):
        raise BuildError("gh, GitHub's command line tool, is not on PATH")
    done = subprocess.run(["gh", *words], cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BuildError(
            f"`gh {' '.join(words)}` failed (exit status {done.returncode}, see above)"
        )
    return done.stdout


def check_attestations(folder: Path, repository: str, source: str, root: Path = ROOT) -> None:
    """Checks with GitHub that this project's build workflow made the wheels and manifests.

    Args:
        folder: Folder with wheels and their manifests.
        repository: Such as "owner/name".
        source: Option of gh: the commit or the tag that they must be built from.
        root: The source tree.

    Raises:
        RefusedError: It did not make one of them, GitHub cannot be asked, or there is no wheel.
    """
    workflow = f"{repository}/.github/workflows/release.yml"
    options = ["--repo", repository, "--signer-workflow", workflow, "--deny-self-hosted-runners"]
    options.append(source)
    wheels = find_wheels(folder)
    if not wheels:
        raise RefusedError(f"{folder.name}: holds no wheel")
    for path in (*wheels, *map(manifest.path_of, wheels)):
        try:
            gh(root, "attestation", "verify", str(path), *options)
        except BuildError as error:
            raise RefusedError(
                f"{path.name}: has no attestation of this project's build: {error}"
            ) from error


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs the command line.

    Args:
        arguments: Its words; those of the process if None.
        root: The source tree.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="nox -s gate --", description=__doc__)
    parser.add_argument("--dist", type=Path, default=root / "dist", help="wheels (dist)")
    parser.add_argument("--reports", type=Path, help="verification reports (those below --dist)")
    parser.add_argument(
        "--out", type=Path, default=root / "build" / "release", help="build/release"
    )
    parser.add_argument(
        "--attested", nargs=2, metavar=("OWNER/NAME", "COMMIT"),
        help="wheels and manifests must have attestations of that repository and commit",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    reports, out = given.reports or given.dist, given.out.resolve()
    return exit_status(
        lambda: release(given.dist, reports, out, given.attested, root), "Nothing may be published."
    )


if __name__ == "__main__":
    sys.exit(main())
