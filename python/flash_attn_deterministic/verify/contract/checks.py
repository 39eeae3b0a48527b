"""The list of checks, in the order of the contract's table."""

from __future__ import annotations

from . import backward, families, forward, golden, latent, storage
from .check import Check, feature_cases

CHECKS: tuple[Check, ...] = (
    Check("run-to-run", "repeat, stream, other work on the GPU, CUDA graph replay", feature_cases,
          forward.run_to_run),
    Check("batch", "batch size, position in the batch, who else is in it", feature_cases,
          forward.batch),
    Check("chunk", "how the queries are cut", forward.chunk_cases, forward.chunk),
    Check("decode", "a row of a prefill or a step over a cache", forward.decode_cases,
          forward.decode),
    Check("capacity", "room behind the sequence, and what lies in it", feature_cases,
          storage.capacity),
    Check("paged", "contiguous or in pages of any order", storage.paged_cases, storage.paged),
    Check("varlen", "dense, packed or padded", storage.varlen_cases, storage.varlen),
    Check("latent", "multi-head latent attention: batch, pages, heads, one query or several",
          latent.latent_cases, latent.latent),
    Check("heads", "KV groups alone or together; shared or repeated keys", feature_cases,
          forward.head_groups),
    Check("schedule", "one thread block per row block or many", forward.schedule_cases,
          forward.schedule, forward.one_path),
    Check("family", "the kernels for every GPU or Hopper's", families.family_cases,
          families.family, families.unavailable),
    Check("split-size", "hidden splits; cut at multiples of split_size, nowhere else",
          forward.split_size_cases, forward.split_size),
    Check("backward", "dq, dk, dv: repeat, batch, packing, KV groups", backward.backward_cases,
          backward.backward),
    Check("dropout", "repeats with one seed", backward.dropout_cases, backward.dropout),
    Check("dropout-seeds", "a seed of each sequence: batch, position in it, packing",
          backward.dropout_cases, backward.dropout_seeds),
    Check("golden", "another wheel of this bits_version, another GPU of this compute capability",
          golden.golden_cases, golden.golden, golden.unavailable),
)  # fmt: skip
