"""Faults that the emulator must find in the Hopper forward: file, text, what comes in its place."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of one place that makes a kernel wrong."""

    what: str
    head_dim: int
    file: str
    text: str
    instead: str


_CONSUMER, _PRODUCER, _PRODUCTS, _ROWS, _WALK = (
    f"sm90/forward/fwd_{name}"
    for name in ("consumer.cuh", "producer.cuh", "products.cuh", "rows.cuh", "walk.h")
)
_LAUNCH = "sm90/forward/fwd_launch.cuh"

FAULTS = [
    Fault("values are not waited for", 64, _CONSUMER,
        "    supply.wait_full(v_at);\n    hold(scores);", ""),
    Fault("the last values are not waited for", 96, _CONSUMER,
        "    supply.wait_full(supply.ring);\n    hold(acc);\n", ""),
    Fault("a parity is swapped", 64, _PRODUCER, "kQEmpty + 8 * group, parity ^ 1)",
        "kQEmpty + 8 * group, parity)"),
    Fault("a block of keys is freed while products read it", 64, _CONSUMER,
        "    wgmma_wait<1>();\n    hold(scores);\n    supply.free_block(k_at);\n",
        "    supply.free_block(k_at);\n    wgmma_wait<1>();\n    hold(scores);\n"),
    Fault("scores are read before their products end", 64, _CONSUMER,
        "    supply.end_turn();\n    wgmma_wait<1>();\n",
        "    supply.end_turn();\n    wgmma_wait<2>();\n"),
    Fault("weights are packed before the products of the last ones end", 128, _CONSUMER,
        "wgmma_wait<0>();\n    hold(acc);\n    hold(weights);\n    supply.free_block(v_at);",
        "wgmma_wait<1>();\n    hold(acc);\n    hold(weights);\n    supply.free_block(v_at);"),
    Fault("one fence of registers is left out", 64, _CONSUMER,
        "    supply.await_turn();\n    wgmma_fence();", "    supply.await_turn();"),
    Fault("a mask ends a key late", 96, _CONSUMER, "at >= end || at < begin",
        "at > end || at < begin"),
    Fault("a mask begins a key late", 96, _CONSUMER, "at >= end || at < begin",
        "at >= end || at <= begin"),
    Fault("a block that a mask cuts is taken for one inside", 96, _CONSUMER,
        "block <= keys.inside.end", "block <= keys.inside.end + 1"),
    Fault("heads of a group write to the rows of the first", 96, _ROWS,
        "head_of(row) * head_stride", "0 * head_stride"),
    Fault("rows beyond a group's heads are stored", 96, _ROWS,
        "row < work.rows && head_of(row) < call.group", "row < work.rows"),
    Fault("a group begins at a power of two", 96, _PRODUCER,
        "work.bidb * call.units) * call.group;", "work.bidb * call.units) << call.group_bits;"),
    Fault("a split begins a block late", 96, _CONSUMER, "block / call.split_blocks *",
        "(block + 1) / call.split_blocks *"),
    Fault("a part takes a block of the next split", 96, _WALK,
        "min(seen.end, first + call.part_blocks)", "min(seen.end, first + call.part_blocks + 1)"),
    Fault("masks of a left window take a warp's first row for its last", 96, _CONSUMER,
        "last_token = (warp_row + 15) >>", "last_token = warp_row >>"),
    Fault("parts: Q of the wrong queries", 96, _PRODUCER,
        "((work.first_row + group * kGroupRows) >> call.group_bits)",
        "(work.first_row + group * kGroupRows)"),
    Fault("parts: the order of tiles is not that of the merge", 96, _ROWS,
        "(unit + 1) * call.row_tiles - 1 - work.first_row / T::kRows",
        "unit * call.row_tiles + work.first_row / T::kRows"),
    Fault("cleared rows lack the proxy fence", 64, _PRODUCER,
        "      fence_async_proxy();\n      __syncwarp();", "      __syncwarp();"),
    Fault("cleared rows lack __syncwarp", 64, _PRODUCER,
        "      fence_async_proxy();\n      __syncwarp();", "      fence_async_proxy();"),
    Fault("keys of a page begin at its first row", 64, _PRODUCER,
        "used ? key - page * call.page_size", "used ? key % call.box_keys"),
    Fault("the tail lies in another block", 64, _PRODUCER, "(count == 1 ? 1 : 2)", "2"),
    Fault("a single row behind the end is not cleared", 64, _PRODUCER, "behind < T::kKeys;",
        "behind < T::kKeys - 1;"),
    Fault("the counter of tiles is not cleared", 96, _LAUNCH,
        "    C10_CUDA_CHECK(cudaMemsetAsync(params.tile_counter, 0, sizeof(unsigned), stream));\n",
        ""),
    Fault("too few bytes are expected", 64, _PRODUCER,
        "barrier_expect(full, kBoxes * T::kBoxBytes)",
        "barrier_expect(full, kBoxes * T::kBoxBytes - 128)"),
    Fault("too many bytes are expected", 64, _PRODUCER,
        "barrier_expect(full, kBoxes * T::kBoxBytes)",
        "barrier_expect(full, kBoxes * T::kBoxBytes + 128)"),
    Fault("a descriptor has the wrong stride", 128, _PRODUCTS,
        "operand(block + first * kBoxRowBytes, T::kBoxBytes)",
        "operand(block + first * kBoxRowBytes, T::kBoxBytes / 2)"),
    Fault("the next sixteen of k lie elsewhere", 64, "sm90/wgmma.h", "kOperandColumns16 = 32 >> 4",
        "kOperandColumns16 = 64 >> 4"),
    Fault("words of Q are loaded without the swizzle", 256, _PRODUCTS,
        "(i % 4 * 2 + half) ^ (row % 8)", "(i % 4 * 2 + half)"),
    Fault("Q of the ring lacks the proxy fence", 256, _CONSUMER,
        "      fence_async_proxy();\n      supply.pass(T::kRingQueryBlocks);",
        "      supply.pass(T::kRingQueryBlocks);"),
    Fault("lanes pass a block by themselves", 256, _CONSUMER,
        "      __syncwarp();  // no lane may still wait for a phase that lane 0 lets pass\n", ""),
    Fault("a turn is left out", 128, _CONSUMER, "      pass(2);\n      pass_turn();",
        "      pass(2);"),
    Fault("a note is not waited for", 64, _PRODUCER,
        "  uint32_t parities = 0;  // a bit for each note\n  for (int turn = 0;; ++turn) {\n"
        "    const int note = turn & 1;\n"
        "    barrier_wait(shared + T::kWorkFull + 8 * note, turn >> 1 & 1);\n",
        "  uint32_t parities = 0;\n  for (int turn = 0;; ++turn) {\n"
        "    const int note = turn & 1;\n"),
    Fault("a note takes a reader too few", 64, _LAUNCH, "kConsumerWarps + 3)",
        "kConsumerWarps + 2)"),
    Fault("a block takes a warp too few", 64, _LAUNCH, "kEmpty + 8 * i, kConsumerWarps)",
        "kEmpty + 8 * i, kConsumerWarps - 1)"),
    Fault("barriers are not made visible to the copy engine", 64, _LAUNCH,
        "    fence_barrier_init();\n", ""),
    Fault("one block more in the ring than there is room for", 96, _LAUNCH,
        "splits && !parts ? T::kBlocks : T::kBlocksAlone", "T::kBlocksAlone"),
    Fault("the accumulator is not brought to the maximum of its sink", 64, _ROWS,
        "      rescale(acc, weights);\n", ""),
    Fault("rows of a group end with the sink of its first head", 64, _ROWS,
        "call.sinks[work.bidh + min(head_of(row + 8 * r), call.group - 1)]",
        "call.sinks[work.bidh]"),
    Fault("largest scores of all heads of a group go to the first", 64, _ROWS,
        "first[offset(row + 8 * r, 1, call.lse", "first[offset(row + 8 * r, 1, 0 * call.lse"),
    Fault("columns are stored that out does not have", 192, _ROWS, "column < call.head_dim_v)",
        "column < call.head_dim)"),
    Fault("the state of later splits is kept in columns that out does not have", 192, _CONSUMER,
        "waiting.out_columns = call.head_dim_v / 8;", "waiting.out_columns = 16;"),
    Fault("the barrier of values counts the bytes of keys", 192, _PRODUCER,
        "kBoxes * T::kBoxBytes);", "T::kBlockBytes);"),
]  # fmt: skip
