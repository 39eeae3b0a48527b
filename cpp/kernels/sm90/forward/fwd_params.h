// What the Hopper forward takes: one struct, and one launcher per (dtype, head dim).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/tma.h"

namespace fad::sm90 {

// Rows of one tensor. Strides in elements; the last dimension is contiguous.
struct Rows {
  const void* data;
  int64_t batch_stride;  // unused where sequences are packed
  int64_t row_stride;
  int64_t head_stride;
};

// Where the splits of a tile of rows write their parts, for the merge kernel, and which tiles one
// launch takes: numbered by head, those of the last rows first.
struct PartRoom {
  // (splits, tiles, rows, head dim of the kernel), not normalised; nullptr: a CTA walks all splits
  // of its tile, and merges them itself
  float* acc;
  float2* state;  // (splits, tiles, rows): maximum and sum
  int splits, first_tile, tiles;
  int rows;  // of a tile
};

struct FwdParams {
  Rows q;  // (batch, seqlen_q, heads, head_dim), or packed: (total_q, heads, head_dim)
  Rows k;  // (kv_batch, seqlen_k, heads_k, head_dim), or packed: (total_k, heads_k, head_dim)
  Rows v;  // like k, with head_dim_v columns
  // Like q, with head_dim_v columns. Before they get their results, its rows also hold accumulators
  // of later splits.
  void* out;
  int64_t out_batch_stride, out_row_stride, out_head_stride;
  void* residual;  // like out, bfloat16: what rounding takes from it; nullptr: it is not kept
  // (batch, heads, seqlen_q), or packed: (heads, total_q); fp32. Rows without keys get +inf.
  float* softmax_lse;
  float* row_max;      // laid out like it: the largest score of each row; nullptr: not wanted
  const float* sinks;  // (heads): of each query head; nullptr: there are none
  int64_t lse_batch_stride, lse_head_stride;

  // Query heads of one key head whose rows stand in one tile: row = token * room + head, where room
  // is the next power of two, at most kGroupRows. Rows beyond the group's heads are computed from
  // whatever Q has there, and not stored.
  int group;

  int batch, kv_batch;
  int seqlen_q, seqlen_k;    // of the longest sequence; below 2^29
  int64_t total_q, total_k;  // rows of packed tensors
  int heads, heads_k, head_dim;
  int head_dim_v;  // of v and out

  const int* cu_seqlens_q;     // (batch + 1): packed queries; nullptr: dense
  const int* cu_seqlens_k;     // (batch + 1): packed keys; nullptr: dense
  const int* seqused_k;        // (batch): keys in use; nullptr: all
  const int* leftpad_k;        // (batch): rows before a sequence's first key; nullptr: none
  const int* cache_batch_idx;  // (batch): which sequence of k and v; nullptr: the same
  // (batch, pages of the longest sequence): which sequences of k and v hold a sequence's keys, in
  // order, page_size keys each; nullptr: k and v are not in pages. Not together with the two above.
  const int* block_table;
  int64_t block_table_batch_stride;
  int page_size;
  int seqlen_new;  // keys in use beyond seqused_k: those appended by this call

  int window_left, window_right;  // keys visible before and after the diagonal; below 0: all.
                                  // The diagonal ends at the last key: causal is (-1, 0).
  float softcap;                  // scores become tanh(score * softcap) first; 0: they do not
  float scale;                    // of scores in softmax_lse
  float scale_log2;               // of scores in exp2
  int split_tokens;               // a multiple of 64; 0: one split
  PartRoom parts;

  // Set to 0 by the launcher, on the stream: CTAs take tiles from it one by one. nullptr: each CTA
  // has a fixed list of tiles.
  unsigned* tile_counter;
};

inline bool keys_are_packed(const FwdParams& params) {
  return params.cu_seqlens_k != nullptr && params.block_table == nullptr;
}

// Rows of one sequence of k and v, or of all where they are packed.
inline int64_t key_rows(const FwdParams& params) {
  return params.block_table != nullptr ? params.page_size
         : keys_are_packed(params)     ? params.total_k
                                       : params.seqlen_k;
}

struct FwdTensors {
  MappedTensor q, k, v;
};

inline FwdTensors fwd_tensors(const FwdParams& params) {
  const auto tensor = [&](const Rows& rows, bool packed, int batch, int64_t count, int heads,
                          int head_dim) {
    return MappedTensor{
        rows.data, rows.batch_stride, rows.row_stride, rows.head_stride, packed ? 1 : batch, count,
        heads,     head_dim};
  };
  const bool packed_q = params.cu_seqlens_q != nullptr;
  const bool packed_k = keys_are_packed(params);
  const int64_t rows_k = key_rows(params);
  return {tensor(params.q, packed_q, params.batch, packed_q ? params.total_q : params.seqlen_q,
                 params.heads, params.head_dim),
          tensor(params.k, packed_k, params.kv_batch, rows_k, params.heads_k, params.head_dim),
          tensor(params.v, packed_k, params.kv_batch, rows_k, params.heads_k, params.head_dim_v)};
}

// Whether the kernel takes tensors laid out like this.
inline bool supports(const FwdParams& params) {
  const auto [q, k, v] = fwd_tensors(params);
  // The kernel numbers its tiles, of 64 rows or more, with an int.
  const int64_t tiles =
      static_cast<int64_t>(params.batch) * params.heads * ((params.seqlen_q + 63) / 64);
  const bool paged = params.block_table != nullptr;
  if (paged && (params.leftpad_k != nullptr || params.cache_batch_idx != nullptr)) {
    return false;
  }
  return tiles < (1 << 30) && params.head_dim % 8 == 0 && params.head_dim_v % 8 == 0 &&
         params.seqlen_q < (1 << 29) && params.seqlen_k < (1 << 29) && can_map(q) && can_map(k) &&
         can_map(v) && reinterpret_cast<uintptr_t>(params.out) % 16 == 0 &&
         params.out_row_stride % 8 == 0 && params.out_head_stride % 8 == 0 &&
         params.out_batch_stride % 8 == 0;
}

}  // namespace fad::sm90
