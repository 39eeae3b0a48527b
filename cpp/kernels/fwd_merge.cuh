// The end of the many-CTA path: merges the parts of each row, last to first, with the functions
// that the one-CTA path uses.
#pragma once

#include "block_info.h"  // upstream
#include "fwd_rows.cuh"
#include "params.h"
#include "softmax_steps.h"
#include "split_state.h"

namespace fad {

// One warp to a row; a lane takes columns lane, lane + 32, ...
template <typename Element, int kHeadDim>
__global__ void fwd_merge_kernel(const __grid_constant__ FwdParams params) {
  constexpr int kColumns = kHeadDim / 32;
  constexpr int kAhead = kColumns <= 4 ? 8 : 4;
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
  const int batch = row_batch(params, bidb);
  if (row >= info.actual_seqlen_q || batch < 0) {
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
  const int last = end > begin ? (end + split_tokens - 1) / split_tokens - 1 : -1;
  const int first = begin / split_tokens;
  float row_max = -INFINITY;
  float row_sum = 0.f;
  float acc[kColumns] = {};
  // Parts are read several at a time, and merged one after another.
  for (int from = last; from >= first; from -= kAhead) {
    float2 states[kAhead];
    float values[kAhead][kColumns];
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      if (from - ahead >= first) {
        const int64_t part = (from - ahead) * rows + index;
        states[ahead] = params.part_state[part];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          values[ahead][i] = params.part_acc[part * kHeadDim + lane + 32 * i];
        }
      }
    }
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int split = from - ahead;
      if (split == last) {
        row_max = states[ahead].x;
        row_sum = states[ahead].y;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          acc[i] = values[ahead][i];
        }
      } else if (split >= first) {
        const MergeWeights weights = merge_state(row_max, row_sum, states[ahead].x, states[ahead].y,
                                                 params.scale_softmax_log2);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          acc[i] = merge_value(acc[i], weights.later, values[ahead][i], weights.earlier);
        }
        row_max = states[ahead].x;
        row_sum = states[ahead].y;
      }
    }
  }

  const float inverse = __fmul_rn(inverse_sum(row_sum), params.rp_dropout);  // 1 without dropout
  Element* const out = out_row<Element>(params, info, batch, bidh, row);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (lane + 32 * i < params.d) {
      out[lane + 32 * i] = static_cast<Element>(normalised(acc[i], inverse));
    }
  }
  if (lane == 0) {
    write_lse(params, info, batch, bidh, row, row_max, row_sum);
  }
}

}  // namespace fad
