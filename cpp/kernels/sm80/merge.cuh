// The end of the paths with a CTA per split: merges the parts of each row, last to first, with the
// functions that the one-CTA path uses.
#pragma once

#include "launch.h"
#include "params.h"
#include "row_group.cuh"
#include "tree/row_end.h"
#include "tree/softmax_steps.h"
#include "tree/split_state.h"

namespace fad {

// One warp to a row; a lane takes columns lane, lane + 32, ...
template <typename Element, int kHeadDim>
__global__ void merge_kernel(const __grid_constant__ FwdParams params) {
  constexpr int kColumns = acc_columns(kHeadDim) / 32;
  constexpr int kAhead = kColumns <= 4 ? 8 : 4;
  const int lane = threadIdx.x % 32;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int64_t rows = static_cast<int64_t>(params.parts.ctas) * params.parts.rows;
  if (index >= rows) {
    return;
  }
  const int cta = index / params.parts.rows;
  const auto [bidb, first_head, m_block] =
      group_place(params, params.parts.block_m, params.parts.first_cta + cta);
  const int group_row = m_block * params.parts.block_m + (index - cta * params.parts.rows);
  const int row = group_row / params.group;
  const int bidh = first_head + group_row % params.group;
  const SequenceInfo info(params, bidb);
  if (row >= info.actual_seqlen_q) {
    return;
  }

  const auto [first, last] = visible_splits(params, info, row);
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
        states[ahead] = params.parts.state[part];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          values[ahead][i] = params.parts.acc[part * acc_columns(kHeadDim) + lane + 32 * i];
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

  if (lane == 0) {
    write_row_max(params, info, bidb, bidh, row, row_max, row_sum);
  }
  const float weight = merge_sink(params, bidh, row_max, row_sum);
  const float inverse = __fmul_rn(inverse_sum(row_sum), params.rp_dropout);  // 1 without dropout
  Element* const out = out_row<Element>(params, info, bidb, bidh, row);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (lane + 32 * i < params.d_v) {
      write_out(params, out + lane + 32 * i, normalised(rescaled_acc(acc[i], weight), inverse));
    }
  }
  if (lane == 0) {
    write_lse(params, info, bidb, bidh, row, row_max, row_sum);
  }
}

template <typename Element, int kHeadDim>
void launch_merge(const FwdParams& params, cudaStream_t stream) {
  constexpr int kRowsPerBlock = 4;
  const long long rows = static_cast<long long>(params.parts.ctas) * params.parts.rows;
  launch<&merge_kernel<Element, kHeadDim>>(
      static_cast<unsigned>((rows + kRowsPerBlock - 1) / kRowsPerBlock), 32 * kRowsPerBlock,
      /*shared=*/0, /*max_shared=*/0, stream, params);
}

}  // namespace fad
