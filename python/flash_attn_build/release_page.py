"""Makes the release page: every toolkit's wheel, its reports, and notes; through GitHub's `gh`."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from . import files, manifest, shelf
from .errors import BuildError, UploadError
from .gate.decision import Verdict, decide
from .gate.policy import Policy, Toolkit, load_policy
from .gate.tree import read_tree
from .notes import release_notes
from .publish import ROOT, add_folders, refuse

_DATE = (1980, 1, 1, 0, 0, 0)  # the same wheel and reports give the same bundle


def judge(dist: Path, reports: Path, policy: Policy, root: Path = ROOT) -> dict[Toolkit, Verdict]:
    """Asks the gate about every wheel of a release.

    Args:
        dist: Folder for wheels.
        reports: Folder that holds the verification reports.
        policy: The release policy.
        root: The source tree.

    Returns:
        Verdict by toolkit.

    Raises:
        SettingError: A toolkit of the policy has no wheel, or more than one.
        RefusedError: The gate does not let one through; the message has every reason.
    """
    tree, found = read_tree(root), shelf.find_reports(reports)
    verdicts = {
        kit: decide(shelf.choose(dist, kit.series, policy), found, policy, tree, root)
        for kit in policy.toolkits.values()
    }
    refuse(list(verdicts.values()))
    return verdicts


def bundle(verdict: Verdict, kit: Toolkit, folder: Path) -> Path:
    """Packs a wheel with its manifest and reports.

    All toolkits' wheels of a version have one name, so a page has room for one of them as it is.

    Args:
        verdict: The gate's.
        kit: The toolkit.
        folder: For the bundle.

    Returns:
        The bundle, `<name>-<version>-<toolkit>.zip`.
    """
    wheel = verdict.wheel.path
    proofs = {report.path for report in verdict.verified.values()}
    members = {path.name: path for path in (wheel, manifest_of(wheel))}
    for number, proof in enumerate(sorted(proofs)):
        for path in sorted(proof.parent.glob("verification.*")):
            members[f"verification-{number}/{path.name}"] = path
    made = folder / f"{'-'.join(wheel.name.split('-')[:2])}-{kit.label}.zip"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sorted(members.items()):
            archive.writestr(zipfile.ZipInfo(name, _DATE), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return made


def manifest_of(wheel: Path) -> Path:
    """Names the manifest that lies beside a wheel.

    Args:
        wheel: The wheel.

    Returns:
        Its path.
    """
    return wheel.with_name(manifest.file_name(wheel.name))


def release(
    dist: Path, reports: Path, policy: Policy, *, dry_run: bool = False, root: Path = ROOT
) -> list[str]:
    """Makes the release page of the version that the wheels have.

    Args:
        dist: Folder for wheels.
        reports: Folder that holds the verification reports.
        policy: The release policy.
        dry_run: Show what would be done.
        root: The source tree.

    Returns:
        The command that was, or would be, run.

    Raises:
        SettingError: A toolkit of the policy has no wheel, or more than one.
        RefusedError: The gate does not let one through.
        UploadError: There is no `gh`, or it failed.
    """
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        copies = folder / "dist"
        for wheel in shelf.find_wheels(dist):
            place = copies / (wheel.parent.name if wheel.parent != dist else "")
            place.mkdir(parents=True, exist_ok=True)
            shelf.copy_with_manifest(wheel, place)
        verdicts = judge(copies, reports, policy, root)
        first = verdicts[policy.toolkits[policy.package_index]].wheel
        notes = folder / "notes.md"
        files.write_text(
            notes, release_notes(list(verdicts.values()), policy, root / "CHANGELOG.md")
        )
        assets = [first.path, manifest_of(first.path)]
        assets += [bundle(verdict, kit, folder) for kit, verdict in verdicts.items()]
        tag = f"v{first.version}"
        # gh shows the page only when every file is there.
        command = ["gh", "release", "create", tag, "--verify-tag", "--title", tag]
        command += ["--notes-file", str(notes), *map(str, assets)]
        if dry_run:
            names = [word.replace(f"{folder}/", "") for word in command]
            print("release page: would run: " + " ".join(names))
            print(notes.read_text(encoding="utf-8"), end="", flush=True)
            return names
        if not shutil.which("gh"):
            raise UploadError("gh, GitHub's command line tool, is not installed here")
        if status := subprocess.run(command, cwd=root, check=False).returncode:
            raise UploadError(f"gh did not make the page {tag} (exit status {status}, see above)")
        return command


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Makes the page, or with --check only asks the gate.

    Args:
        arguments: Words of the command line; those of the process if None.
        root: The source tree.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="nox -s release_page --", description=__doc__)
    add_folders(parser, root)
    parser.add_argument("--check", action="store_true", help="only ask the gate about each wheel")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done")
    given = parser.parse_args(arguments)
    reports = given.reports or given.dist
    try:
        if given.check:
            for kit, verdict in judge(given.dist, reports, load_policy(), root).items():
                print(f"CUDA {kit.series}: {verdict.wheel.sha256}: the gate is open")
        else:
            release(given.dist, reports, load_policy(), dry_run=given.dry_run, root=root)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
