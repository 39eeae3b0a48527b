"""What GitHub attests is asked for, and no answer is taken for a good one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from flash_attn_build.errors import RefusedError, ToolchainError
from flash_attn_build.release import attestations

NONE = 'echo "x No attestations found for subject sha256:0" >&2; exit 1'
WHEEL = Path("a.whl")


def answer(*results: str) -> str:
    rows = [
        {"verificationResult": {"statement": {"predicate": {"result": result}}}}
        for result in results
    ]
    return f"echo '{json.dumps(rows)}'"


def test_what_was_built_is_asked_for_by_workflow_commit_and_tag(gh: Callable[[str], Path]) -> None:
    calls = gh("")
    attestations.check_built([WHEEL], "o/n", "--source-digest=c0ffee", "--source-ref=refs/tags/v1")
    assert calls.read_text().split() == [
        "attestation", "verify", "a.whl", "--repo", "o/n", "--signer-workflow",
        "o/n/.github/workflows/release.yml", "--deny-self-hosted-runners",
        "--source-digest=c0ffee", "--source-ref=refs/tags/v1",
    ]  # fmt: skip
    gh("exit 1")
    with pytest.raises(RefusedError, match=r"a\.whl: has no attestation of its build"):
        attestations.check_built([WHEEL], "o/n")


def test_what_passed_is_asked_for_by_its_tag(gh: Callable[[str], Path]) -> None:
    calls = gh(answer("PASSED"))
    attestations.check_passed(WHEEL, "o/n", "v1")
    first, second = calls.read_text().splitlines()
    asked = f"--predicate-type {attestations.TEST_RESULT} --format json"
    assert first.endswith(f"{asked} --source-ref=refs/tags/v1")
    assert second.endswith(asked)  # of whatever tag


ANSWERS: dict[str, tuple[str, str]] = {
    "passed": (answer("PASSED"), ""),
    "none": (NONE, "has no attestation that it passed verification as v1"),
    "failed": (answer("FAILED"), "the verification of these bytes failed"),
    "both": (answer("PASSED", "FAILED"), "the verification of these bytes failed"),
    "warned": (answer("WARNED"), "the verification of these bytes failed"),
    "other form": ("echo '[{}]'", "gh answered in an unknown form"),
    "no JSON": ("echo '{'", "gh answered in an unknown form"),
    "server": ("echo HTTP 500 >&2; exit 1", "HTTP 500"),
    "not logged in": ("exit 4", "failed .status 4"),
}


@pytest.mark.parametrize(("program", "message"), ANSWERS.values(), ids=ANSWERS)
def test_a_wheel_that_did_not_pass_or_ever_failed(
    gh: Callable[[str], Path], program: str, message: str
) -> None:
    """Bytes that failed once are refused, whatever tag they come with."""
    gh(program)
    if not message:
        attestations.check_passed(WHEEL, "o/n", "v1")
    else:
        with pytest.raises(RefusedError, match=message):
            attestations.check_passed(WHEEL, "o/n", "v1")
    if not message or program == NONE:
        attestations.check_never_failed(WHEEL, "o/n")
    else:
        with pytest.raises(RefusedError, match=message):
            attestations.check_never_failed(WHEEL, "o/n")


def test_no_gh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolchainError, match="gh, GitHub's command line tool, is not on PATH"):
        attestations.gh("x")
