"""What GitHub attests of a wheel: the release workflow built it, and it passed the gate."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from ..errors import BuildError, RefusedError, printable
from ..files import ROOT

TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"


def gh(*words: str) -> str:
    """Runs GitHub's command line tool; returns what it printed."""
    if not shutil.which("gh"):
        raise BuildError("gh, GitHub's command line tool, is not on PATH")
    done = subprocess.run(["gh", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise _refused(f"`gh {' '.join(words)}` failed (status {done.returncode}): {said}")
    return done.stdout


def _refused(text: str) -> RefusedError:
    return RefusedError(printable(text))


def check_built(paths: Iterable[Path], repository: str, *sources: str) -> None:
    """Refuses files that the release workflow of a repository ("owner/name") did not build.

    `sources`: options of gh: the commit and the tag that they must be built from.
    """
    for path in paths:
        try:
            verify(path, repository, *sources)
        except RefusedError as error:
            raise _refused(f"{path.name}: has no attestation of its build: {error}") from error


def check_passed(wheel: Path, repository: str, tag: str) -> None:
    """Refuses a wheel that did not pass the gate of a tag, or ever failed."""
    if not _results(wheel, repository, f"--source-ref=refs/tags/{tag}"):
        raise _refused(f"{wheel.name}: has no attestation that it passed verification as {tag}")
    check_never_failed(wheel, repository)


def check_never_failed(wheel: Path, repository: str) -> None:
    """Refuses bytes whose verification failed, in whatever run and under whatever tag."""
    if _results(wheel, repository) - {"PASSED"}:
        raise _refused(
            f"{wheel.name}: the verification of these bytes failed, which is attested; correct the "
            "cause, and build again"
        )


def _results(wheel: Path, repository: str, *sources: str) -> set[str]:
    """The results of the attested verifications of a wheel."""
    options = ("--predicate-type", TEST_RESULT, "--format", "json", *sources)
    try:
        said = json.loads(verify(wheel, repository, *options))
        statements = [each["verificationResult"]["statement"] for each in said]
        return {str(statement["predicate"]["result"]) for statement in statements}
    except (ValueError, LookupError, TypeError) as error:
        raise _refused(f"{wheel.name}: gh answered in an unknown form ({error!r})") from error
    except RefusedError as error:
        if "no attestations found" in str(error).lower():
            return set()
        raise


def verify(path: Path, repository: str, *options: str) -> str:
    """What gh says of a file that a hosted runner attested in the repository's release workflow."""
    workflow = f"{repository}/.github/workflows/release.yml"
    signer = ("--repo", repository, "--signer-workflow", workflow, "--deny-self-hosted-runners")
    # gh looks at 30 attestations by itself, and at 1000 at most.
    return gh("attestation", "verify", str(path), *signer, "--limit=1000", *options)
