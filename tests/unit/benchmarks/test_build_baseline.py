from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from flash_attn_build.compile import jobs, toolchain
from flash_attn_build.errors import SettingError
from flash_attn_build.files import ROOT

from tests.benchmarks import build_baseline as baseline

NAMES = (
    "flash_fwd_hdim64_bf16_sm80.cu",
    "flash_fwd_split_hdim128_fp16_causal_sm80.cu",
    "flash_bwd_hdim64_fp16_sm80.cu",
)


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    folder = tmp_path / "flash_attn" / "src"
    folder.mkdir(parents=True)
    for name in NAMES:
        (folder / name).touch()
    return tmp_path


def test_short_names_stand_for_upstreams_files(upstream: Path) -> None:
    found = baseline.source_of(upstream, "fwd_split_hdim128_fp16_causal")
    assert found == upstream / "flash_attn" / "src" / NAMES[1]
    with pytest.raises(SettingError, match=r"bwd_hdim64_fp16, fwd_hdim64_bf16,.*got 'fwd_hdim7'"):
        baseline.source_of(upstream, "fwd_hdim7")
    # Our headers come before upstream's.
    first, *rest = baseline.include_flags(upstream)
    assert first == f"-I{ROOT / 'cpp' / 'torch_free'}"
    assert all(flag.startswith(f"-I{upstream}") for flag in rest)


def test_architectures_become_flags() -> None:
    assert baseline.architecture_flags(("80-real", "90-real", "90-virtual")) == [
        "--generate-code=arch=compute_80,code=sm_80",
        "--generate-code=arch=compute_90,code=sm_90",
        "--generate-code=arch=compute_90,code=compute_90",
    ]


@pytest.mark.parametrize("name", ["90", "sm_90", "90-imaginary", ""])
def test_wrong_architecture(name: str) -> None:
    with pytest.raises(SettingError, match="architecture: expected"):
        baseline.architecture_flags((name,))


def test_costs_are_read_by_short_name_without_trial_compilations(tmp_path: Path) -> None:
    costs = {"cpu_seconds": 3.0, "wall_seconds": 6.0, "peak_rss_bytes": 10}
    for number, output in enumerate((
        "CMakeFiles/fa2.dir/x/flash_fwd_split_hdim64_bf16_causal_sm80.cu.o", "bwd_hdim128_fp16.o",
        "/somewhere/a.out",
    )):  # fmt: skip
        record = {"output": output, "command": ["nvcc"], **costs}
        (tmp_path / f"{number}.json").write_text(json.dumps(record))
    assert baseline.read_costs(tmp_path) == [
        {"name": "bwd_hdim128_fp16", **costs},
        {"name": "fwd_split_hdim64_bf16_causal", **costs},
    ]


@pytest.mark.parametrize(
    ("given", "cores", "memory", "expected"),
    [
        ("", 16, 24 * jobs.GIB, 4), ("", 2, 64 * jobs.GIB, 2), ("", 8, 3 * jobs.GIB, 1),
        ("", 8, None, 8), ("7", 8, jobs.GIB, 7),
    ],
    ids=["memory-bound", "core-bound", "tiny", "unknown-memory", "MAX_JOBS"],
)  # fmt: skip
def test_jobs_leave_room_for_upstreams_large_files(
    monkeypatch: pytest.MonkeyPatch, given: str, cores: int, memory: int | None, expected: int
) -> None:
    monkeypatch.setenv("MAX_JOBS", given)
    monkeypatch.setattr(jobs, "count", lambda: int(given or cores))
    monkeypatch.setattr(jobs, "available_memory", lambda: memory)
    assert baseline.default_jobs() == expected


def test_bad_name_is_an_exit_status_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], upstream: Path
) -> None:
    monkeypatch.setattr(toolchain, "find", lambda: None)
    monkeypatch.setattr(baseline, "prepare", lambda dest: {"dest": str(upstream)})
    result = upstream / "result.json"
    arguments = ["--cost", "--tus", "nothing", "--out", str(upstream), "--result", str(result)]
    assert baseline.main(arguments) == SettingError.exit_code
    assert "--tus: expected names out of" in capsys.readouterr().err
    assert not result.exists()


def test_python_mirrors_the_c_structs() -> None:
    """ctypes takes field names and order on trust."""
    from flash_attn_deterministic.verify.speed import upstream as api

    header = (ROOT / "cpp" / "baseline" / "api.h").read_text()
    assert f"#define FA2_BASELINE_VERSION {api.VERSION}\n" in header
    for struct, name in ((api._Tensor, "fa2_tensor"), (api._Problem, "fa2_problem")):
        match = re.search(rf"typedef struct {{([^}}]*)}} {name};", header)
        assert match is not None
        fields = re.findall(r"(\w+)\s*[,;]", match[1])
        assert fields == [field[0] for field in struct._fields_]
