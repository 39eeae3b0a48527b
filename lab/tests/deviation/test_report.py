from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from flash_attn_deterministic_lab.cli import main
from flash_attn_deterministic_lab.deviation.instrument.gradients import run_gradients
from flash_attn_deterministic_lab.deviation.instrument.target import ModelPlan, load_target
from flash_attn_deterministic_lab.deviation.report import page as page_module
from flash_attn_deterministic_lab.deviation.report.claims import CLAIMS
from flash_attn_deterministic_lab.deviation.report.judging import (
    LANGUAGE,
    MODEL,
    NOT_TESTED,
    ON_GPU,
    QUICK,
    SINKS,
)
from flash_attn_deterministic_lab.deviation.report.page import _CASES, write_report
from flash_attn_deterministic_lab.deviation.training.training_study import plan_of, run_training
from flash_attn_deterministic_lab.errors import ArgumentError
from flash_attn_deterministic_lab.pictures import held


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("studies")
    for study, *options in (
        ["forward", "--seeds", "2"],
        ["kernels", "--device", "cpu", "--seeds", "1"],
    ):
        arguments = ["deviation", study, "--quick", *options, "--out", str(folder / study)]
        assert main(arguments) == 0
    runs = ("repeat", "paper", "init", "fp16-paper")
    run_training(plan_of("drawings-tiny", "cpu", 4, runs, (0, 1)), folder / "training")
    target = load_target("sinks-small", "", 2, "cpu")
    run_gradients(ModelPlan("sinks-small", ("kernel",)), target, folder / "sinks")
    return [folder / name for name in ("forward", "kernels", "training", "sinks")]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing is what a report takes long for."""
    monkeypatch.setattr(page_module, "held", lambda _: "<svg/>")


@pytest.fixture(scope="module")
def page(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("report")
    assert main(["deviation", "report", *map(str, folders), "--out", str(out)]) == 0
    assert {"report.html", "report.md", "deviation.json"} <= {path.name for path in out.iterdir()}
    return (out / "report.html").read_text()


def test_the_page_needs_no_other_file(page: str) -> None:
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sources
    for source in sources:
        assert source.startswith(("data:image/svg+xml;base64,", "#")), source
    assert "http" not in re.sub(r'base64,[^"]*', "", page)


def test_every_claim_has_a_row_a_section_and_a_verdict(page: str) -> None:
    tested = [claim for claim in CLAIMS if claim.study not in (ON_GPU, LANGUAGE, MODEL)]
    for claim in tested:
        assert page.count(f'href="#{claim.key}"') == 1
        assert page.count(f'id="{claim.key}"') == 1
    assert page.count('<span class="verdict') == 2 * len(tested) < 2 * len(CLAIMS)


def test_every_figure_is_there_once_with_a_caption(page: str) -> None:
    drawn = page.count(_CASES) // 2  # as a caption, and for those who do not see the picture
    assert drawn >= 5  # claims whose cases are drawn
    assert page.count("<figure>") == page.count("<figcaption>") == drawn


def test_figures_are_the_same_bytes_each_time() -> None:
    row = ("a case", (1.0, 20.0, 300.0), (0.5, math.inf), True)
    assert held({"times": [row], "number": [row]}) == held({"times": [row], "number": [row]})


@pytest.mark.usefixtures("undrawn")
def test_the_text_links_the_figures(folders: list[Path], tmp_path: Path) -> None:
    _, text, _ = write_report(folders, tmp_path / "deep" / "report")
    links = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text.read_text())
    assert links
    assert all((text.parent / link).exists() for link in links)


@pytest.mark.usefixtures("undrawn")
def test_a_changed_result_changes_the_verdict(folders: list[Path], tmp_path: Path) -> None:
    """Verdicts come from the data: a repeat that differs is not a control."""
    value = json.loads((folders[2] / "training.json").read_text())
    value["configuration"]["workload"] = "drawings-small"  # not quick
    (tmp_path / "as-it-was").mkdir()
    (tmp_path / "as-it-was" / "training.json").write_text(json.dumps(value))
    _, text, _ = write_report([tmp_path / "as-it-was"], tmp_path / "before")
    claim = next(claim for claim in CLAIMS if claim.key == "repeat")
    row = f"| {claim.text} | {claim.source} | **{{}}** |"
    assert row.format("holds") in text.read_text()
    for histories in value["seeds"].values():
        histories["repeat"]["max_difference"][-1] = 1e-9
    value["seeds"]["2"] = {}  # for which there was no time
    (tmp_path / "changed").mkdir()
    (tmp_path / "changed" / "training.json").write_text(json.dumps(value))
    _, text, _ = write_report([tmp_path / "changed"], tmp_path / "after")
    assert row.format("does not hold") in text.read_text()
    assert "2 paired seeds" in text.read_text()


def test_the_record_names_its_claims_and_where_they_come_from(
    folders: list[Path], tmp_path: Path
) -> None:
    *_, written = write_report(folders[3:], tmp_path)
    record = json.loads(written.read_text())
    assert {"date", "command", "hardware", "versions", "wheel", "sources"} <= record.keys()
    assert record["quick"] == []
    claims = {claim["key"]: claim for claim in record["claims"]}
    assert claims.keys() == {claim.key for claim in CLAIMS if claim.study == SINKS}
    assert claims["failure-remedy"]["verdict"] == NOT_TESTED
    assert claims["failure-kernels"]["numbers"]


def test_gradients_of_a_model_stand_beside_those_of_the_failure(
    folders: list[Path], tmp_path: Path
) -> None:
    text = (folders[3] / "gradients.json").read_text().replace('"kernel"', '"ours"')
    value = json.loads(text)
    value["configuration"]["model"] = "language-100m"
    value["whole"]["ours"] |= {"noise": [0.001, 0.002, 0.003], "systematic": [-0.02, 0.0, 0.01]}
    (tmp_path / "gradients").mkdir()
    (tmp_path / "gradients" / "gradients.json").write_text(json.dumps(value))
    *_, written = write_report([folders[3], tmp_path / "gradients"], tmp_path)
    claims = {claim["key"]: claim for claim in json.loads(written.read_text())["claims"]}
    assert claims["model-noise"]["verdict"] == "holds"
    assert "failure-kernels" in claims
    text = (tmp_path / "report.md").read_text()
    assert "(plots/model-noise.svg)" in text
    assert "| query.weight | flash-attn-deterministic |" in text


def test_quick_studies_get_no_verdict(page: str) -> None:
    top = page[: page.index("<table>")]
    assert "Quick studies (forward, kernels, training): too few draws" in top
    found = re.findall(r'<span class="verdict (\w+)">([^<]*)</span>', page)
    # Only the study of gradients is a whole one.
    of_gradients = {claim.key for claim in CLAIMS if claim.study.startswith("gradients")}
    judged = [text for _, text in found if text not in (QUICK, NOT_TESTED)]
    assert len(judged) <= 2 * len(of_gradients)
    assert ("none", QUICK) in found


@pytest.mark.usefixtures("undrawn")
def test_claims_of_studies_that_are_missing_are_counted(
    folders: list[Path], tmp_path: Path
) -> None:
    _, text, _ = write_report(folders[:1], tmp_path)
    page = text.read_text()
    shown = [claim for claim in CLAIMS if claim.text in page]
    assert 0 < len(shown) < len(CLAIMS)
    assert f"the studies that test {len(CLAIMS) - len(shown)} other claims" in page
    assert not any(claim.study == "training" for claim in shown)


@pytest.mark.parametrize("case", ["none", "empty", "twice"])
@pytest.mark.usefixtures("undrawn")
def test_bad_folders_are_refused(case: str, folders: list[Path], tmp_path: Path) -> None:
    given = {"none": [], "empty": [tmp_path], "twice": [folders[0], folders[0]]}[case]
    with pytest.raises(ArgumentError, match="results: expected"):
        write_report(given, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- The command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["forward", "--seeds", "0"], "seeds: expected", id="draws"),
        pytest.param(
            ["tokens", "--quick", "--attention", "exact"], "attention: expected two", id="tokens"
        ),
        pytest.param(["weights", "no", "no"], "run: expected", id="weights"),
        pytest.param(["kernels", "--device", "cpu", "--seeds", "0"], "seeds: expected", id="seeds"),
        pytest.param(["report"], "results: expected", id="no-results"),
    ],
)
def test_command_says_what_is_wrong(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deviation", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    assert main(["deviation", "forward", "--quick", "--out", str(out)]) == 7
    assert f"cannot write to {out}" in capsys.readouterr().err


def test_the_package_imports_without_the_studies() -> None:
    """Help is printed without importing torch's heavy parts, matplotlib or the studies."""
    code = (
        "import sys, flash_attn_deterministic_lab.cli as m\n"
        "import argparse\n"
        "prefix = 'flash_attn_deterministic_lab.deviation.'\n"
        "names = [name for name in sys.modules if name.startswith(prefix)]\n"
        "assert set(names) <= {prefix + 'cli'}, names\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
