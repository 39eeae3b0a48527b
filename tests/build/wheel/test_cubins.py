from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_wheel import INFO, contents, fatbin, library, pack
from flash_attn_build.errors import RefusedError
from flash_attn_build.wheel import archive, check, cubins, only_ptx

# As nvcc 13.0.88 wrote it for an empty kernel: sm_80 machine code, compute_90 PTX and sm_90
# machine code, payloads cut to eight bytes.
NVCC = bytes.fromhex(
    "50ed55ba01001000e800000000000000"
    "020001014000000008000000000000001e030000000000000800010050000000"
    "000000000000000011800000000000000000000000000000280c000000000000"
    "28b52ffd60280ba5"
    "01000101500000000800000000000000f200000040000000000009005a000000"
    "0000000000000000118000000000000000000000000000008901000000000000"
    "48000000000000000000000000000000"
    "28b52ffd60280ba5"
    "020001014000000008000000000000007303000000000000080001005a000000"
    "000000000000000011800000000000000000000000000000700e000000000000"
    "28b52ffd60700d4d"
)


def test_reads_what_nvcc_wrote() -> None:
    ((begin, held),) = cubins.entries(NVCC)
    assert (begin, [name for name, _ in held]) == (0, ["80-real", "90-virtual", "90-real"])
    assert cubins.header(len(NVCC) - 16) + b"".join(data for _, data in held) == NVCC


def test_goes_over_padding_from_one_unit_to_the_next() -> None:
    section = bytes(16) + fatbin([(2, 80)]) + fatbin([(1, 100)]) + bytes(24)
    assert cubins.architectures(section) == {"80-real", "100-virtual"}
    assert cubins.architectures(b"") == set()


def test_machine_code_is_taken_out_and_ptx_stays_to_the_byte() -> None:
    hopper = fatbin([(2, 90), (2, 90)])  # as of a unit that has no PTX
    section = hopper + fatbin([(2, 80), (1, 80)]) + fatbin([(1, 80)]) + bytes(8)
    made = only_ptx.only_ptx(section)
    assert len(made) == len(section)
    before, after = list(cubins.entries(section)), list(cubins.entries(made))
    assert [begin for begin, _ in after] == [begin for begin, _ in before]
    ptx = before[1][1][1]
    assert [held for _, held in after] == [[ptx], [ptx], [ptx]]
    for wrong, expected in ((hopper, "holds no PTX"), (fatbin([]) + fatbin([(1, 80)]), "no room")):
        with pytest.raises(RefusedError, match=expected):
            only_ptx.only_ptx(wrong)


def test_a_wheel_of_ptx_alone(tmp_path: Path) -> None:
    files = contents(library(tmp_path / "library"))
    made = only_ptx.convert(pack(tmp_path, files), tmp_path / "ptx")
    found, _ = archive.unpack(made.read_bytes())
    differing = {name for name, data in files.items() if found[name] != data}
    assert differing == {check.LIBRARY, check.BUILD_INFO}
    info = json.loads(found[check.BUILD_INFO])
    assert info == {**INFO, "architectures": ["80-virtual"]}


@pytest.mark.parametrize(("section", "expected"), [
    (b"\x01" + NVCC[1:], "expected a fat binary"),
    (NVCC[:100], "expected a fat binary"),
    (fatbin([(7, 80)]), "unknown kind of entry 7"),
], ids=["magic", "cut short", "kind"])  # fmt: skip
def test_an_unknown_layout_is_an_error(section: bytes, expected: str) -> None:
    with pytest.raises(RefusedError, match=expected):
        cubins.architectures(section)
