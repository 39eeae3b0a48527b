"""What GitHub attests is asked for, and no answer is taken for a good one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from flash_attn_build.errors import BuildError, RefusedError
from flash_attn_build.release import attestations
from release_samples import results

NONE = 'echo "x No attestations found for subject sha256:0" >&2; exit 1'
WHEEL = Path("a.whl")


def answer(*states: str) -> str:
    return f"echo '{results(*states)}'"


def test_what_is_asked_for(gh: Callable[[str], Path]) -> None:
    """The build by its commit and tag, what passed by its tag, what ever failed by none."""
    calls, sources = gh(answer("PASSED")), ("--source-digest=c0ffee", "--source-ref=refs/tags/v1")
    attestations.check_built([WHEEL], "o/n", *sources)
    attestations.check_passed(WHEEL, "o/n", "v1")
    workflow = "o/n/.github/workflows/release.yml --deny-self-hosted-runners --limit=1000"
    asked = f"attestation verify a.whl --repo o/n --signer-workflow {workflow} "
    result = f"--predicate-type {attestations.TEST_RESULT} --format json"
    assert calls.read_text().splitlines() == [
        asked + " ".join(sources), f"{asked}{result} {sources[1]}", asked + result
    ]  # fmt: skip


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
    refused = pytest.raises(RefusedError, match=message) if message else nullcontext()
    with refused:
        attestations.check_passed(WHEEL, "o/n", "v1")
    with nullcontext() if program == NONE else refused:
        attestations.check_never_failed(WHEEL, "o/n")


def test_names_and_words_of_others_are_printed_escaped(gh: Callable[[str], Path]) -> None:
    gh("echo '##[error]' >&2; exit 1")
    with pytest.raises(RefusedError) as refused:
        attestations.check_built([Path("a\n::error::.whl")], "o/n")
    assert str(refused.value).isprintable()
    assert "##[" not in str(refused.value)


def test_no_gh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match="gh, GitHub's command line tool, is not on PATH"):
        attestations.gh("x")
