# ruff: noqa: E501  lines are quoted whole
"""Mutants of the reference that change no result, by the reason why (`tests.mutants`)."""

from __future__ import annotations

# Reason to module, function and the changed line.
EQUIVALENT: dict[str, tuple[str, ...]] = {
    "any negative side of a window means no limit": (
        "reference.walk.of: return cls(max(left, -2), 0 if causal else max(right, -1))",
        "reference.walk.of: return cls(max(left, -1), 0 if causal else max(right, -2))",
        "reference.walk.of: given['window'] = Window.of(given.pop('causal', False), given.get('window', (-2, -1)))",
        "reference.walk.of: given['window'] = Window.of(given.pop('causal', False), given.get('window', (-1, -2)))",
    ),
    "visits more blocks, all of whose keys are hidden: these change no bit": (
        "reference.walk.visible: begin = max(0, rows[0] - self.left) if self.left > 0 else 0",
        "reference.walk.visible: begin = max(0, rows[0] - self.left) if self.left >= 1 else 0",
        "reference.walk.visible: end = min(seqlen_k, rows[-1] + self.right + 1) if self.right > 0 else seqlen_k",
        "reference.walk.visible: end = min(seqlen_k, rows[-1] + self.right + 1) if self.right >= 1 else seqlen_k",
        "reference.walk.visible: end = min(seqlen_k, rows[-1] + self.right + 2) if self.right >= 0 else seqlen_k",
    ),
    "makes a mask where no key is hidden: it hides none": (
        "reference.walk.hidden: beyond = self.right >= 0 and keys[-1] >= rows[0] + self.right",
        "reference.walk.hidden: beyond = self.right >= 0 and keys[-1] > rows[0] - self.right",
        "reference.walk.hidden: before = self.left >= 0 and keys[0] <= rows[-1] - self.left",
        "reference.walk.hidden: before = self.left >= 0 and keys[0] < rows[-1] + self.left",
    ),
    "cuts tiles elsewhere, which changes no bit (contract/test_forward.py::test_tiles)": (
        "reference.batch.tiles: row_elements = group / max(self.walk.block_n, head_dim)",
        "reference.batch.tiles: row_elements = group * min(self.walk.block_n, head_dim)",
        "reference.batch.tiles: most = max(2, min(seqlen_q, _MAX_TILE_ROWS, _TILE_ELEMENTS // row_elements))",
        "reference.batch.tiles: most = max(1, max(seqlen_q, _MAX_TILE_ROWS, _TILE_ELEMENTS // row_elements))",
        "reference.batch.tiles: most = max(1, min(seqlen_q, _MAX_TILE_ROWS, _TILE_ELEMENTS * row_elements))",
        "reference.batch.tiles: pairs = max(2, _TILE_ELEMENTS // (most * row_elements))",
        "reference.batch.tiles: pairs = max(1, _TILE_ELEMENTS * (most * row_elements))",
        "reference.batch.tiles: pairs = max(1, _TILE_ELEMENTS // (most / row_elements))",
        "reference.batch.tiles: for own in _cut(batch, max(2, pairs // nheads_k)):",
        "reference.batch.tiles: for own in _cut(batch, max(1, pairs * nheads_k)):",
    ),
    "no sequence is as long as either border": (
        "reference.batch._cut: def _cut(length: int, most: int, border: int=2 << 62) -> Iterator[slice]:",
        "reference.batch._cut: def _cut(length: int, most: int, border: int=1 << 63) -> Iterator[slice]:",
    ),
    "without dropout the mask keeps all": (
        "reference.batch.kept: if state is None and (not self.walk.dropout_p):",
    ),
    "without a key there is no block, and one key is one split either way": (
        "reference.forward._rows: split_size = walk.split_size or max(end, 2)",
    ),
    "a mask and its scale are both there, or neither": (
        "reference.backward._add_rows: if kept is not None or walk.keep_scale is not None:",
    ),
    "of four dimensions the third is the last but one": (
        "reference.backward._add_rows: add_products(dq, dscores, k.transpose(-1, +2)[:, :, None])",
    ),
    "both are there, or neither: checks refuse one alone": (
        "reference.calls.kvcache_attention: if rotary_cos is None and rotary_sin is None:",
        "reference.calls.kvcache_attention: if k is not None or v is not None:",
    ),
    "sequences that go together have equal lengths all the same, and one without queries computes nothing": (
        "reference.calls.varlen_attention: lengths = [(s.stop + s.start, end - n) for s, end, n in zip(rows, ends, skipped, strict=True)]",
        "reference.calls.varlen_attention_backward: lengths = [(r.stop + r.start, s.stop - s.start) for r, s in zip(rows, keys, strict=True)]",
        "reference.calls.varlen_attention_backward: lengths = [(r.stop - r.start, s.stop + s.start) for r, s in zip(rows, keys, strict=True)]",
    ),
}
