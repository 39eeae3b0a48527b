// dq from its sums, which lie as tiles do in shared memory. (In the sm80 family each thread keeps
// its part of a tile together.)
#pragma once

#include "bwd_tile.h"
#include "bwd_walk.h"
#include "launch.h"
#include "params.h"
#include "sm90/fragment.h"
#include "turns.h"

namespace fad::sm90 {

constexpr int kDqThreads = 256;

// Scales and rounds a row block. Sums of -0 become 0 first, as in the sm80 family.
template <typename T>
__global__ void __launch_bounds__(kDqThreads)
    bwd_dq_sm90_kernel(const __grid_constant__ BwdParams params) {
  using Element = typename T::Element;
  constexpr int kEights = T::kHeadDim / 8;
  const int num_blocks_q = num_blocks(params.seqlen_q, T::kRows);
  const int head = blockIdx.x / num_blocks_q;
  const int first_row = (static_cast<int>(blockIdx.x) - head * num_blocks_q) * T::kRows;
  const int bidh = head % params.h;
  const BwdWork work = bwd_work(params, {head / params.h, 0, 0, 0});
  const float* const sums =
      static_cast<const float*>(params.dq_accum_ptr) +
      (sum_rows_before(params, work.q_row, work.bidb, bidh) + first_row) * T::kHeadDim;
  Element* const dq = static_cast<Element*>(params.dq_ptr) +
                      (params.cu_seqlens_q == nullptr ? work.bidb * params.dq_batch_stride
                                                      : work.q_row * params.dq_row_stride) +
                      first_row * params.dq_row_stride + bidh * params.dq_head_stride;
  const auto rounded = [&](float a, float b) {
    return packed<Element>(__fmul_rn(__fadd_rn(0.f, a), params.scale_softmax_rp_dropout),
                           __fmul_rn(__fadd_rn(0.f, b), params.scale_softmax_rp_dropout));
  };
  const int rows = min(T::kRows, work.seqlen_q - first_row);
  for (int at = threadIdx.x; at < rows * kEights; at += kDqThreads) {
    const int row = at / kEights;
    const int column = at % kEights * 8;
    if (column < params.d) {
      const auto* const from = reinterpret_cast<const float4*>(sums + T::dq_at(row, column) / 4);
      const float4 low = from[0], high = from[1];
      *reinterpret_cast<uint4*>(dq + row * params.dq_row_stride + column) =
          make_uint4(rounded(low.x, low.y), rounded(low.z, low.w), rounded(high.x, high.y),
                     rounded(high.z, high.w));
    }
  }
}

// The grid is that of the row sums before the loop, which has been checked.
template <typename T>
void launch_bwd_dq(const BwdParams& params, cudaStream_t stream) {
  const auto ctas =
      static_cast<unsigned>(num_blocks(params.seqlen_q, T::kRows)) * params.b * params.h;
  launch<&bwd_dq_sm90_kernel<T>>(ctas, kDqThreads, 0, 0, stream, params);
}

}  // namespace fad::sm90
