// Which rows and keys belong together where calls have a few queries: the queries of a sequence
// times the query heads of a group (all, or some, of those that share a key head) are rows of one
// tile over the same keys, so that keys are read once for all of them.
#pragma once

#include <cutlass/fast_math.h>
#include <cute/tensor.hpp>

#include "kernel_traits.h"  // upstream; its other headers lean on this one

#include "block_info.h"  // upstream
#include "fwd.h"
#include "row_block.h"
#include "tree/softmax_steps.h"

namespace fad {

using SequenceInfo = FLASH_NAMESPACE::BlockInfo</*Varlen=*/true>;

// Like place_of, of row blocks that hold rows of params.group query heads; bidh is the first one.
__device__ __forceinline__ Place group_place(const FwdParams& params, int block_m, int cta) {
  const int num_m_blocks = num_blocks(params.seqlen_q * params.group, block_m);
  const int groups = params.h / params.group;
  const int unit = cta / num_m_blocks;
  const int bidb = unit / groups;
  return {bidb, (unit - bidb * groups) * params.group,
          num_m_blocks - 1 - (cta - unit * num_m_blocks)};
}

// One row block: row = token * group + head. Its rows are counted from 0 here.
struct RowGroup {
  int bidb, bidh, group;
  int first, count;  // its first row among those of the sequence, and how many there are
  int seqlen_k;
  int shift;               // from a token's index to its position among the keys
  int left, right;         // window, negative for all
  int n_min, n_max;        // blocks of the keys that some row sees
  int all_begin, all_end;  // keys that all rows see

  __device__ __forceinline__ RowGroup(const FwdParams& params, const SequenceInfo& info,
                                      const Place& place, int block_m)
      : bidb(place.bidb),
        bidh(place.bidh),
        group(params.group),
        first(place.m_block * block_m),
        count(min(block_m, info.actual_seqlen_q * params.group - first)),
        seqlen_k(info.actual_seqlen_k),
        shift(seqlen_k - info.actual_seqlen_q),
        left(params.window_size_left),
        // A single query at the end of its sequence sees every key, causal or not.
        right(params.seqlen_q == 1 ? -1
              : params.is_causal   ? 0
                                   : params.window_size_right) {
    const int end = right < 0 ? seqlen_k : min(seqlen_k, last_position() + right + 1);
    const int begin = left < 0 ? 0 : max(0, position(0) - left);
    n_min = begin / kKeysPerBlock;
    n_max = end <= 0 ? 0 : num_blocks(end, kKeysPerBlock);
    all_begin = left < 0 ? 0 : last_position() - left;
    all_end = right < 0 ? seqlen_k : min(seqlen_k, position(0) + right + 1);
  }

  __device__ __forceinline__ int token(int row) const { return (first + row) / group; }
  __device__ __forceinline__ int head(int row) const { return bidh + (first + row) % group; }
  __device__ __forceinline__ int position(int row) const { return token(row) + shift; }
  __device__ __forceinline__ int last_position() const { return position(max(count, 1) - 1); }

  // The part of the keys that belongs to a split.
  __device__ __forceinline__ void limit_to_split(const FwdParams& params, int split) {
    const int split_first = split * params.tree.blocks_per_split;
    n_min = max(n_min, split_first);
    n_max = min(n_max, split_first + params.tree.blocks_per_split);
  }

  // Whether a mask hides a key of this block from some row.
  __device__ __forceinline__ bool is_cut(int first_key) const {
    return first_key < all_begin || first_key + kKeysPerBlock > all_end;
  }
};

// Where a row's query lies.
template <typename Element>
__device__ __forceinline__ const Element* query_row(const FwdParams& params,
                                                    const SequenceInfo& info, const RowGroup& rows,
                                                    int row) {
  return static_cast<const Element*>(params.q_ptr) +
         info.q_offset(params.q_batch_stride, params.q_row_stride, rows.bidb) +
         rows.token(row) * params.q_row_stride + rows.head(row) * params.q_head_stride;
}

struct SplitRange {
  int first, last;  // last < first: no key is visible
};

// The splits that hold the visible keys of a sequence's row (token), whatever tile its parts were
// computed with.
template <typename Info>
__device__ __forceinline__ SplitRange visible_splits(const FwdParams& params, const Info& info,
                                                     int token) {
  const int diagonal = token + info.actual_seqlen_k - info.actual_seqlen_q;
  int begin = 0;
  int end = info.actual_seqlen_k;
  if (params.is_causal || params.window_size_right >= 0) {
    end = min(end, diagonal + 1 + max(params.window_size_right, 0));
  }
  if (params.window_size_left >= 0) {
    begin = max(begin, diagonal - params.window_size_left);
  }
  const int split_tokens = params.tree.blocks_per_split * kKeysPerBlock;
  return {begin / split_tokens, end > begin ? num_blocks(end, split_tokens) - 1 : -1};
}

// What masks and biases need of a thread's two rows: this one, and 8 below.
struct ThreadRows {
  int position[2];
  float slope[2];  // of ALiBi, over the scale of scores

  __device__ __forceinline__ ThreadRows(const FwdParams& params, const RowGroup& rows, int row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Rows past the last are computed, and not written.
      const int inside = min(row + 8 * half, rows.count - 1);
      position[half] = rows.position(inside);
      slope[half] =
          params.alibi_slopes_ptr == nullptr
              ? 0.f
              : static_cast<const float*>(
                    params.alibi_slopes_ptr)[rows.bidb * params.alibi_slopes_batch_stride +
                                             rows.head(inside)] /
                    params.scale_softmax;
    }
  }
};

// Softcap, ALiBi and masks. first_key: of this thread's first score; cut: RowGroup::is_cut.
template <int kTiles>
__device__ __forceinline__ void finish_scores(const FwdParams& params, const RowGroup& rows,
                                              const ThreadRows& mine, int first_key, bool cut,
                                              float (&scores)[kTiles][4]) {
  if (params.softcap > 0.f) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      scores[i / 4][i % 4] = cutlass::fast_tanh(scores[i / 4][i % 4] * params.softcap);
    }
  }
  if (params.alibi_slopes_ptr != nullptr) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      const int distance = mine.position[i / 2 % 2] - (first_key + i / 4 * 8 + i % 2);
      scores[i / 4][i % 4] = alibi_score(scores[i / 4][i % 4], mine.slope[i / 2 % 2], distance);
    }
  }
  if (cut) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      const int position = mine.position[i / 2 % 2];
      const int key = first_key + i / 4 * 8 + i % 2;
      if (key >= rows.seqlen_k || (rows.right >= 0 && key > position + rows.right) ||
          (rows.left >= 0 && key < position - rows.left)) {
        scores[i / 4][i % 4] = -INFINITY;
      }
    }
  }
}

}  // namespace fad
