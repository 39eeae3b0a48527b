from __future__ import annotations

import json
from pathlib import Path

from flash_attn_deterministic import tree


def test_chunks_of_rows_are_those_of_the_kernels() -> None:
    table = json.loads((Path(__file__).parents[3] / "cpp" / "instances.json").read_text())
    assert table["chunk_rows"] == tree.CHUNK_ROWS
