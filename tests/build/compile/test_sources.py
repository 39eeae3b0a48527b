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


@pytest.mark.parametrize("change", ["renamed", "gone", "moved between files"])
def test_every_change_shows_in_its_part_alone(tree: Path, change: str) -> None:
    before = sources.digests(tree)
    kernel = tree / "cpp" / "kernels" / "fwd.cu.in"
    text = kernel.read_text()
    if change == "renamed":
        kernel.rename(kernel.with_name("bwd.cu.in"))
    elif change == "gone":
        kernel.unlink()
    else:
        kernel.write_text(text[:-1])
        follower = tree / "cpp" / "upstream" / "upstream.json"
        follower.write_text(text[-1] + follower.read_text())
    after = sources.digests(tree)
    assert [part for part in after if after[part] != before[part]] == ["cpp"]


def test_a_tree_that_lacks_a_part(tree: Path) -> None:
    for part in sources.PARTS:
        path = tree / part
        kept = path.rename(tree / "kept")
        with pytest.raises(FileNotFoundError, match="no such file"):
            sources.digests(tree)
        kept.rename(path)
