// How large the forward's tiles are, for each head dim. No bits depend on it.
#pragma once

#include "tree/tree.h"

namespace fad::sm90 {

constexpr int kStep = kKeysPerBlock;  // keys of one softmax step
constexpr int kGroupRows = 64;        // rows of a consumer warpgroup: the height of wgmma

// The most shared memory that a CTA may have on compute capability 9.0 if this many share an SM.
// The system keeps 1 KB for each.
constexpr int shared_bytes(int ctas_per_sm) { return 228 * 1024 / ctas_per_sm - 1024; }

// keys: of one product q k^T, one or two steps.
// state_columns: how many eights of columns of the later splits' accumulator are kept in shared
// memory; the rest, at most half, is kept in the rows of the output.
// takes_turns: whether warpgroups issue their products one after another, so that one computes its
// softmax during the products of the others.
// waits_last: whether the wait for the next keys is bound to come after a step's softmax. Otherwise
// the compiler moves part of the softmax behind that wait.
// register_queries: how many sixteens of columns of Q are operands in registers. A product of 64
// keys with Q from shared memory reads as much as shared memory gives in its time, half of it Q.
// queries_through_ring: whether these sixteens are loaded through the ring of K and V, so that
// their shared memory is one more block of the ring. Where they are all of Q, each warpgroup's is a
// block.
// waits_in_lines: whether state that is kept in the rows of the output fills whole lines there, 16
// bytes a lane, where a warp has all of its rows. Otherwise every thread uses its own two rows.
// loops_inside: whether blocks that no mask cuts have a loop of their own, without the code that
// masks: shorter, but one more to load.
// ctas_per_sm: how many share an SM. A tile of a short sequence has too few steps to hide its own
// waiting times; the tile of another CTA hides them.
//
// Measured on an H200, as block_m in instances.json was: docs/results/hopper_variants.json.
struct FwdShape {
  int keys = 64, state_columns = 16;
  bool takes_turns = false;
  bool waits_last = false;
  int register_queries = 0;
  bool queries_through_ring = false;
  bool waits_in_lines = false;
  bool loops_inside = false;
  int ctas_per_sm = 1;
};

// block_m: query rows to a CTA, 64 to a warpgroup that computes.
constexpr FwdShape fwd_shape(int head_dim, int head_dim_v, int block_m) {
  FwdShape shape;
  if (head_dim == 32) {
    shape.state_columns = 4;
    shape.register_queries = 2;
    shape.ctas_per_sm = 2;
  } else if (head_dim == 64) {
    shape.state_columns = 8;
    shape.loops_inside = true;
  } else if (head_dim == 96) {
    shape.state_columns = 12;
    shape.register_queries = 6;
    shape.loops_inside = true;
  } else if (head_dim == 128 && block_m == 192) {
    shape.takes_turns = true;
    shape.waits_last = true;
    shape.register_queries = 4;
  } else if (head_dim == 128) {
    shape.keys = 128;
  } else if (head_dim_v == 128) {
    shape.state_columns = 8;
    shape.takes_turns = true;
    shape.waits_last = true;
    shape.register_queries = 4;
    shape.queries_through_ring = true;
  } else {
    shape.waits_last = true;
    shape.queries_through_ring = true;
    shape.waits_in_lines = true;
    shape.state_columns = head_dim == 192 ? 20 : 16;
    shape.register_queries = head_dim == 192 ? 12 : 8;
  }
  return shape;
}

}  // namespace fad::sm90
