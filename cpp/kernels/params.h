// What kernels are called with: upstream's parameters, and ours beside them.
#pragma once

#include <cstdint>

#include "flash.h"  // upstream: Flash_fwd_params, Flash_bwd_params
#include "tree/tree.h"

namespace fad {

// Multi-head latent attention, absorbed: head dim of q and k, whose first columns are v.
constexpr int kLatentHeadDim = 576;
constexpr int kLatentHeadDimV = 512;

// Columns that a kernel of this head dim sums up for a row of the output.
constexpr int acc_columns(int head_dim) {
  return head_dim == kLatentHeadDim ? kLatentHeadDimV : head_dim;
}

// Where CTAs that share a row block write their parts, one per split, and which row blocks one
// launch works on: a call may take several launches, so that parts fit a bounded scratch memory.
struct Parts {
  float* acc;     // (num_splits, ctas, rows, acc_columns of the kernel), not normalised
  float2* state;  // (num_splits, ctas, rows): maximum and sum
  int block_m;    // query rows of a row block, ...
  int rows;       // ... and how many of them the longest sequence can fill
  unsigned first_cta, ctas;
};

// Where the scores kernel leaves its results for the values kernel, by row block of 8 rows and by
// block of 64 keys.
struct ScoresFirst {
  float* scores;       // (ctas, blocks, 16 keys, lanes, 4), as threads hold them
  float* maxima;       // (ctas, blocks, 8)
  float* acc;          // (ctas, columns / 32, num_splits, 8 columns, lanes, 2): parts
  float2* state;       // (ctas, columns / 32, num_splits, 8): maximum and sum
  unsigned* arrivals;  // (ctas, columns / 32): parts that are there
  int blocks;          // of the longest sequence
  bool prefetch;       // whether the scores kernel brings values into L2
};

struct FwdParams : FLASH_NAMESPACE::Flash_fwd_params {
  int d_v;  // head dim of v and the output, at most d
  Tree tree;
  int num_splits;  // of the longest sequence; with one split there is nothing to merge
  int kv_batch;    // sequences, or pages, that k and v have room for, where they are not packed
  int total_k;     // rows of packed k and v
  unsigned* tile_counter;  // for CTAs that take row blocks one after another; nullptr: one to each
  Parts parts;
  // Query heads of one key head whose rows share a row block: row = token * group + head. 1 if each
  // head has its own row blocks, as upstream's body needs it.
  int group;
  ScoresFirst scores;
  // Like the output, bfloat16: what rounding takes from it. nullptr: it is not kept.
  void* residual;
  const float* sinks;  // (h): of each query head; nullptr: there are none
  // Laid out like softmax_lse: the largest score of each row (largest_score). Rows without keys may
  // not be written. nullptr: it is not wanted.
  float* row_max;
  bool kv_fp8;  // keys and values are e4m3, strides in elements as of others
};

constexpr int kTurnCounters = 2;  // of a CTA of the backward, for as many threads that add

struct BwdParams : FLASH_NAMESPACE::Flash_bwd_params {
  int d_v;      // head dim of v, the output and their gradients, at most d
  int total_k;  // rows of packed k and v
  // Whether CTAs wait for each other, to add to a row block of dq in the order of key blocks.
  bool in_turns;
  KeyParts parts;        // of dk and dv: CTAs share each key block
  int shares_in_flight;  // parts of heads whose key blocks run at the same time
  unsigned* tickets;     // how many CTAs have started
  unsigned* progress;    // kTurnCounters of each CTA: how far it has come with dq
  // Room for sums of dk and dv while a CTA adds up others: (num_slots, slot_sums, dk and dv, keys,
  // head dim), as threads hold them; nullptr: none is needed.
  float* slots;
  int num_slots, slot_sums;  // slot_sums: kept_sums of a part
  unsigned* freed_slots;     // how many, then which; chained: heads that have been added to a chunk
  // Where the sums of parts go, fp32, not scaled: (parts, batch, seqlen_k, h_k, d), or packed
  // (parts, total_k, h_k, d). nullptr: there is one part, which is rounded into dk and dv.
  float* dk_sums;
  float* dv_sums;
  // What the forward kept of out, contiguous; nullptr: nothing.
  const void* residual;
  const float* dlse;  // the gradient of softmax_lse, laid out like it; nullptr: 0
};

}  // namespace fad
