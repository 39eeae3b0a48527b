from __future__ import annotations

from pathlib import Path

import pytest
import release_samples
from flash_attn_build.compile import sources
from flash_attn_build.files import write_text


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    release_samples.write_native(tmp_path / "tree")
    return tmp_path / "tree"


def test_the_folder_and_the_order_of_files_have_no_part_in_it(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "else" / "where"
    for name in reversed(release_samples.NATIVE):
        write_text(other / name, release_samples.NATIVE[name])
    write_text(other / "cpp" / "__pycache__" / "a.pyc", "of one machine")
    assert sources.digests(other) == sources.digests(tree)


def test_bytes_that_move_to_the_next_file_and_names_show_in_their_part_alone(tree: Path) -> None:
    before = sources.digests(tree)
    kernel, follower = (
        tree / "cpp" / name for name in ("kernels/fwd.cu.in", "upstream/upstream.json")
    )
    text = kernel.read_text()
    kernel.write_text(text[:-1])
    follower.write_text(text[-1] + follower.read_text())
    after = sources.digests(tree)
    kernel.rename(kernel.with_name("bwd.cu.in"))
    for one, other in ((before, after), (after, sources.digests(tree))):
        assert [part for part in one if one[part] != other[part]] == ["cpp"]
