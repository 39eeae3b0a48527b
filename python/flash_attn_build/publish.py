"""Uploads the wheel to a package server, if the gate lets it through.

The server and the credentials are twine's: its configuration file, its environment variables, its
keyring, or trusted publishing where a CI offers it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import built, shelf
from .errors import BuildError, RefusedError, UploadError
from .gate.decision import Verdict, decide
from .gate.policy import Policy, load_policy
from .gate.tree import read_tree
from .notes import release_notes

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Request:
    """What to publish, and where.

    Attributes:
        dist: Folder for wheels.
        reports: Folder that holds the verification reports.
        server: twine's options that name the server.
        told: What the build handed over, to compare with; None: this machine built it.
        dry_run: Show what would be done.
    """

    dist: Path
    reports: Path
    server: tuple[str, ...] = ()
    told: Mapping[str, str] | None = None
    dry_run: bool = False


def publish(request: Request, policy: Policy, root: Path = ROOT) -> Verdict:
    """Publishes the wheel that is meant for the package index.

    Args:
        request: What and where.
        policy: The release policy.
        root: The source tree.

    Returns:
        The gate's verdict, which is in favour.

    Raises:
        SettingError: There is no such wheel, or more than one.
        RefusedError: It is not what was built, or the gate does not let it through; the message
            has every reason.
        UploadError: The server does not take it.
    """
    if request.told is not None and (wrong := [*built.faults(request.dist, request.told)]):
        raise RefusedError("not published: not what was built:\n  " + "\n  ".join(wrong))
    chosen = shelf.choose(request.dist, policy.package_index, policy)
    with tempfile.TemporaryDirectory(prefix="publish-") as folder:
        wheel = shelf.copy_with_manifest(chosen, Path(folder))
        verdict = decide(wheel, shelf.find_reports(request.reports), policy, read_tree(root), root)
        refuse([verdict])
        _say(f"{wheel.name}, sha256 {verdict.wheel.sha256}: the gate is open")
        if request.dry_run:
            command = [*_twine(request.server)[2:], wheel.name]
            _say("would run: " + " ".join(command))
            print(release_notes([verdict], policy, root / "CHANGELOG.md"), end="", flush=True)
        else:
            upload(wheel, request.server)
            _say(f"{wheel.name} is published")
        return verdict


def upload(wheel: Path, server: Sequence[str]) -> None:
    """Uploads a wheel, which the gate was asked about.

    Args:
        wheel: The wheel.
        server: twine's options that name the server.

    Raises:
        UploadError: The server does not take it.
    """
    status = subprocess.run([*_twine(server), str(wheel)], check=False).returncode
    if status:
        raise UploadError(
            f"twine did not upload {wheel.name} (exit status {status}, see above). A server "
            "keeps the first file of a name: after a fault, raise the version."
        )


def _twine(server: Sequence[str]) -> list[str]:
    options = ["--non-interactive", "--disable-progress-bar", *server]
    return [sys.executable, "-m", "twine", "upload", *options]


def refuse(verdicts: Sequence[Verdict]) -> None:
    """Stops if the gate has a reason against any wheel.

    Args:
        verdicts: The gate's.

    Raises:
        RefusedError: It has; the message names each.
    """
    lines = []
    for verdict in verdicts:
        if verdict.reasons:
            lines.append(f"{verdict.wheel.path.name} (sha256 {verdict.wheel.sha256}):")
            lines += [f"  - {reason}" for reason in verdict.reasons]
    if lines:
        raise RefusedError("not published, because of\n" + "\n".join(lines))


def add_folders(parser: argparse.ArgumentParser, root: Path = ROOT) -> None:
    """Adds the options that say where wheels and reports lie.

    Args:
        parser: The parser.
        root: The source tree.
    """
    parser.add_argument("--dist", type=Path, default=root / "dist", help="wheels (dist)")
    parser.add_argument("--reports", type=Path, help="verification reports (those below --dist)")
    parser.add_argument(
        "--built-sha256",
        metavar="JSON",
        help="what the build handed over (`nox -s digests`), to compare with",
    )


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Publishes what the command line asks for.

    Args:
        arguments: Its words; those of the process if None.
        root: The source tree.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="nox -s publish --", description=__doc__)
    add_folders(parser, root)
    server = parser.add_mutually_exclusive_group()
    server.add_argument("--repository", metavar="NAME", help="a section of twine's configuration")
    server.add_argument("--repository-url", metavar="URL", help="address of the package server")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done")
    given = parser.parse_args(arguments)
    options: tuple[str, ...] = ()
    if given.repository:
        options = ("--repository", given.repository)
    elif given.repository_url:
        options = ("--repository-url", given.repository_url)
    try:
        told = None if given.built_sha256 is None else built.read(given.built_sha256)
        reports = given.reports or given.dist
        request = Request(given.dist, reports, options, told, given.dry_run)
        publish(request, load_policy(), root)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}. Nothing was uploaded.", file=sys.stderr)
        return UploadError.exit_code
    return 0


def _say(text: str) -> None:
    print(f"publish: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
