// How large the forward's tiles are, for each head dim. No bits depend on it.
#pragma once

#include "../tree/tree.h"

namespace fad::sm90 {

constexpr int kStep = kKeysPerBlock;      // keys of one softmax step
constexpr int kGroupRows = 64;            // rows of a consumer warpgroup: the height of wgmma
constexpr int kSharedBytes = 227 * 1024;  // of a CTA on compute capability 9.0: all of it

// keys: of one product q k^T, one or two steps. state_columns: how many eights of columns of the
// waiting accumulator lie in shared memory; the rest, at most half, waits in the rows of the
// output. takes_turns: whether warpgroups issue their products one after another, so that the
// softmax of one falls into the products of the others. (Measured on an H100, as block_m in
// instances.json was.)
//
// queries_in_registers: whether Q is an operand in registers, so that q k^T reads K alone from
// shared memory: a product of 64 keys reads 4 KB for 32 cycles of the tensor cores, which is all
// that shared memory gives, and half of it is Q. Bytes of a whole step, with those that the copy
// engine writes, over those that shared memory gives in the time of its products: 0.92 at head dim
// 128 (192 rows), 0.98 at 192, 1.00 at 256; with Q in registers 0.73 at 192, 0.70 instead of 0.95
// at 96, and 0.75 at 128 with two warpgroups and 128 keys. Registers do not suffice at 256, nor at
// 128 with three warpgroups (C7512). merge_columns: how many eights of columns a merge loads ahead.
// (The last two were not timed yet: tests/benchmarks/hopper_variants.py does it.)
struct FwdShape {
  int keys, state_columns;
  bool takes_turns;
  bool queries_in_registers = false;
  int merge_columns = 4;
};

// block_m: query rows to a CTA, 64 to a warpgroup that computes.
constexpr FwdShape fwd_shape(int head_dim, int block_m) {
  return head_dim == 64                      ? FwdShape{128, 8, false}
         : head_dim == 96                    ? FwdShape{64, 12, true}
         : head_dim == 128 && block_m == 192 ? FwdShape{64, 16, true}
         : head_dim == 128                   ? FwdShape{128, 16, false}
         : head_dim == 192                   ? FwdShape{64, 12, true}
                                             : FwdShape{64, 16, false};
}

// Keys in pages: with 128 keys to a product the code for them spills in the loop (head dim 64 with
// softcap, nvcc 13.0).
constexpr bool takes_pages(int keys) { return keys == kStep; }

}  // namespace fad::sm90
