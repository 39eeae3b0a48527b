"""Makes the release page: every toolkit's wheel, its reports, and notes; through GitHub's `gh`."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import built, bundles, files, manifest, shelf
from .errors import BuildError, RefusedError, UploadError
from .gate.decision import Verdict, decide
from .gate.policy import Policy, Toolkit, load_policy
from .gate.tree import read_tree
from .notes import release_notes
from .publish import ROOT, add_folders, refuse


def judge(
    dist: Path,
    reports: Path,
    policy: Policy,
    root: Path = ROOT,
    told: Mapping[str, str] | None = None,
) -> dict[Toolkit, Verdict]:
    """Asks the gate about every wheel of a release.

    Args:
        dist: Folder for wheels.
        reports: Folder that holds the verification reports.
        policy: The release policy.
        root: The source tree.
        told: What the build handed over, to compare with; None: this machine built it.

    Returns:
        Verdict by toolkit.

    Raises:
        SettingError: A toolkit of the policy has no wheel, or more than one.
        RefusedError: The gate does not let one through, or there are wheels that are not the
            release's; the message has every reason.
    """
    if told is not None and (wrong := [*built.faults(dist, told)]):
        raise RefusedError("not what was built:\n  " + "\n  ".join(wrong))
    tree, found = read_tree(root), shelf.find_reports(reports)
    verdicts = {
        kit: decide(shelf.choose(dist, kit.series, policy), found, policy, tree, root)
        for kit in policy.toolkits.values()
    }
    judged = {verdict.wheel.path for verdict in verdicts.values()}
    strays = [path for path in shelf.find_wheels(dist) if path not in judged]
    if strays:
        names = ", ".join(path.relative_to(dist).as_posix() for path in strays)
        raise RefusedError(f"{dist}: holds wheels of no toolkit of the release: {names}")
    refuse(list(verdicts.values()))
    return verdicts


def checksums(verdicts: Mapping[Toolkit, Verdict], dist: Path) -> str:
    """Lists the wheels that the gate let through, for whoever signs them.

    Args:
        verdicts: The gate's.
        dist: Folder for wheels.

    Returns:
        Lines as sha256sum writes them.
    """
    wheels = [verdict.wheel for verdict in verdicts.values()]
    rows = sorted((wheel.path.relative_to(dist).as_posix(), wheel.sha256) for wheel in wheels)
    return "".join(f"{sha256}  {name}\n" for name, sha256 in rows)


def manifest_of(wheel: Path) -> Path:
    """Names the manifest that lies beside a wheel.

    Args:
        wheel: The wheel.

    Returns:
        Its path.
    """
    return wheel.with_name(manifest.file_name(wheel.name))


def release(
    dist: Path,
    reports: Path,
    policy: Policy,
    *,
    told: Mapping[str, str] | None = None,
    dry_run: bool = False,
    root: Path = ROOT,
) -> list[str]:
    """Makes the release page of the version that the wheels have.

    Args:
        dist: Folder for wheels.
        reports: Folder that holds the verification reports.
        policy: The release policy.
        told: What the build handed over, to compare with; None: this machine built it.
        dry_run: Show what would be done.
        root: The source tree.

    Returns:
        The command that was, or would be, run.

    Raises:
        SettingError: A toolkit of the policy has no wheel, or more than one.
        RefusedError: The gate does not let one through, or there are wheels that are not the
            release's.
        UploadError: There is no `gh`, or it failed.
    """
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        copies = folder / "dist"
        for wheel in shelf.find_wheels(dist):
            place = copies / (wheel.parent.name if wheel.parent != dist else "")
            place.mkdir(parents=True, exist_ok=True)
            shelf.copy_with_manifest(wheel, place)
        verdicts = judge(copies, reports, policy, root, told)
        first = verdicts[policy.toolkits[policy.package_index]].wheel
        notes = folder / "notes.md"
        files.write_text(
            notes, release_notes(list(verdicts.values()), policy, root / "CHANGELOG.md")
        )
        assets = [first.path, manifest_of(first.path)]
        assets += [bundles.pack(verdict, kit, folder) for kit, verdict in verdicts.items()]
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
    parser.add_argument(
        "--checksums", type=Path, metavar="FILE", help="with --check: list the wheels judged there"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be done")
    given = parser.parse_args(arguments)
    reports = given.reports or given.dist
    try:
        told = None if given.built_sha256 is None else built.read(given.built_sha256)
        if given.check:
            verdicts = judge(given.dist, reports, load_policy(), root, told)
            if given.checksums:
                files.write_text(given.checksums, checksums(verdicts, given.dist))
            for kit, verdict in verdicts.items():
                print(f"CUDA {kit.series}: {verdict.wheel.sha256}: the gate is open")
        else:
            policy = load_policy()
            release(given.dist, reports, policy, told=told, dry_run=given.dry_run, root=root)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}. There is no release page.", file=sys.stderr)
        return UploadError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
