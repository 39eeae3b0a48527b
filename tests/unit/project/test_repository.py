"""What no tool checks about the files of this repository."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import flash_attn_deterministic as package
import pytest
from flash_attn_deterministic import tree

from tests import api

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = re.compile(
    r"```python\n(?P<code>.*?)```\n\n<!-- output of the example -->\n```\n(?P<output>.*?)```\n",
    re.DOTALL,
)
NAMED = r"(?<!\w)(?:docs|cpp|tests|python|lab)/[\w./-]*\w"


def tracked() -> list[Path]:
    """Files that are in git, or would be if added now; all of them outside a checkout."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def lines_with(pattern: str) -> list[str]:
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


def test_no_package_registry_is_named() -> None:
    hosts = ["pypi" + r"\.org", "pythonhosted" + r"\.org", r"download\.pytorch" + r"\.org"]
    hosts += [
        "pypi" + r"\.nvidia",
        "registry" + r"\.npmjs",
        "conda" + r"\.anaconda",
        "test" + "pypi",
    ]
    assert lines_with("|".join(hosts)) == []


def test_no_folder_of_a_machine_is_named() -> None:
    assert lines_with(r"(?<![\w.<])/(root|home|work|Users)/\w") == []
    assert lines_with(r"(?<![\w.<])/tm" + r"p/\w") == []


def test_readme_is_short_and_has_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 150
    assert "    .ci/nox -s build " in text
    assert "nox -s test`" in text


def test_links_between_documents_lead_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        text = document.read_text()
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, heading = link.partition("#")
            if "://" in name:
                continue
            target = (document.parent / name).resolve() if name else document
            assert target.exists(), (document.name, link)
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M) if heading else []
            anchors = [re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings]
            assert not heading or heading in anchors, (document.name, link)


def test_every_record_of_a_decision_is_short_and_numbered() -> None:
    records = sorted((ROOT / "docs" / "adr").glob("*.md"))
    assert records
    for number, path in enumerate(records, 1):
        lines = path.read_text().splitlines()
        assert path.name.startswith(f"{number:04}-")
        assert lines[0].startswith(f"# {number}. ")
        status = r"(Status: a|A)ccepted,? \d{4}-\d\d-\d\d|Status: superseded by \d+"
        assert re.match(status, lines[2]), path.name
        assert 20 <= len(lines) <= 45, path.name


def test_files_named_in_the_documents_exist() -> None:
    for document in (*ROOT.glob("*.md"), ROOT / "NOTICE", *ROOT.glob("docs/**/*.md")):
        for name in re.findall(NAMED, document.read_text()):
            assert (ROOT / name).exists() or name.startswith("docs/results"), (document, name)


def test_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    readme = ROOT / "README.md"
    example = EXAMPLE.search(readme.read_text())
    assert example is not None
    exec(compile(example["code"], str(readme), "exec"), {})
    printed, written = capsys.readouterr().out, example["output"]
    # How many rows torch's own attention gets right depends on the CPU.
    number = re.compile(r"(?<=torch: )\d+(?= of 200)")
    assert number.sub("N", printed) == number.sub("N", written)
    assert int(number.search(printed)[0]) < 200  # type: ignore[index]


@pytest.mark.parametrize("name", package.__all__)
def test_every_public_name_is_on_the_page_of_the_api(name: str) -> None:
    assert f"\n### {name}\n" in api.page()


def test_chunks_of_rows_are_those_of_the_kernels() -> None:
    table = json.loads((ROOT / "cpp" / "instances.json").read_text())
    assert table["chunk_rows"] == tree.CHUNK_ROWS
