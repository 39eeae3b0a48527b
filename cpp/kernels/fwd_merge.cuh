// The end of the many-CTA path: merges the parts of each row, last to first, with the functions
// that the one-CTA path uses.
#pragma once

#include "block_info.h"  // upstream
#include "params.h"
#include "softmax_steps.h"
#include "split_state.h"

namespace fad {

// One warp to a row; a lane takes columns lane, lane + 32, ...
template <typename Element, int kHeadDim>
__global__ void fwd_merge_kernel(const __grid_constant__ FwdParams params) {
  constexpr int kColumns = kHeadDim / 32;
  const int lane = threadIdx.x % 32;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int64_t rows = static_cast<int64_t>(params.b) * params.h * params.seqlen_q;
  if (index >= rows) {
    return;
  }
  const int row = index % params.seqlen_q;
  const int bidh = index / params.seqlen_q % params.h;
  const int bidb = index / params.seqlen_q / params.h;
  const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, bidb);
  if (row >= info.actual_seqlen_q) {
    return;
  }

  // The row's own visible range, whatever tile its parts were made with.
  const int diagonal = row + info.actual_seqlen_k - info.actual_seqlen_q;
  int begin = 0;
  int end = info.actual_seqlen_k;
  if (params.is_causal || params.window_size_right >= 0) {
    end = min(end, diagonal + 1 + max(params.window_size_right, 0));
  }
  if (params.window_size_left >= 0) {
    begin = max(begin, diagonal - params.window_size_left);
  }

  const int split_tokens = params.split_blocks * 64;
  float row_max = -INFINITY;
  float row_sum = 0.f;
  float acc[kColumns] = {};
  bool first = true;
  for (int split = (end + split_tokens - 1) / split_tokens - 1;
       end > begin && split >= begin / split_tokens; --split) {
    const int64_t part = split * rows + index;
    const float2 state = params.part_state[part];
    const float* const values = params.part_acc + part * kHeadDim + lane;
    float part_max = state.x;
    float part_sum = state.y;
    if (first) {
      row_max = part_max;
      row_sum = part_sum;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        acc[i] = values[32 * i];
      }
      first = false;
      continue;
    }
    const MergeWeights weights =
        merge_state(row_max, row_sum, part_max, part_sum, params.scale_softmax_log2);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      acc[i] = merge_value(acc[i], weights.later, values[32 * i], weights.earlier);
    }
    row_max = part_max;
    row_sum = part_sum;
  }

  const float inverse = inverse_sum(row_sum);
  Element* const out = static_cast<Element*>(params.o_ptr) +
                       info.q_offset(params.o_batch_stride, params.o_row_stride, bidb) +
                       row * params.o_row_stride + bidh * params.o_head_stride;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (lane + 32 * i < params.d) {
      out[lane + 32 * i] = static_cast<Element>(normalised(acc[i], inverse));
    }
  }
  if (lane == 0) {
    // As get_lse_tile in upstream's kernel: (b, h, seqlen_q), or (h, total_q) for packed sequences,
    // or (h, seqlen_q, b) where query groups were turned into rows.
    int64_t at = index;
    if (params.seqlenq_ngroups_swapped) {
      at = (static_cast<int64_t>(bidh) * params.seqlen_q + row) * params.b + bidb;
    } else if (params.unpadded_lse) {
      at = static_cast<int64_t>(bidh) * params.total_q + info.q_offset(params.seqlen_q, 1, bidb) +
           row;
    }
    static_cast<float*>(params.softmax_lse_ptr)[at] =
        log_sum_exp(row_max, params.scale_softmax, row_sum, INFINITY);
  }
}

}  // namespace fad
