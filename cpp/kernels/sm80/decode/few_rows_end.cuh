// The end of rows of a few-rows kernel: to the output, or as a part for the merge kernel. A thread
// holds of every eight columns two neighbouring ones of two rows, as mma leaves them.
#pragma once

#include "sm80/row_group.cuh"
#include "tree/row_end.h"

namespace fad {

// A row of this CTA, in params.parts.
__device__ __forceinline__ int64_t part_row(const FwdParams& params, int row) {
  return (static_cast<int64_t>(blockIdx.y) * params.parts.ctas + blockIdx.x) * params.parts.rows +
         row;
}

// half: which of the two rows; column: the first of this thread.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ void write_part_columns(const FwdParams& params, int row, int column,
                                                   const float (&acc)[kTiles][4], int half) {
  float* const part = params.parts.acc + part_row(params, row) * acc_columns(kHeadDim) + column;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    *reinterpret_cast<float2*>(part + tile * 8) =
        make_float2(acc[tile][2 * half], acc[tile][2 * half + 1]);
  }
}

// Writes what is one number of a row. Returns the weight of its accumulator and the inverse of its
// sum.
__device__ __forceinline__ float2 end_row(const FwdParams& params, const SequenceInfo& info,
                                          const RowGroup& rows, int row, float row_max,
                                          float row_sum) {
  const int head = rows.head(row);
  const int token = rows.token(row);
  write_row_max(params, info, rows.bidb, head, token, row_max, row_sum);
  const float weight = merge_sink(params, head, row_max, row_sum);
  write_lse(params, info, rows.bidb, head, token, row_max, row_sum);
  return make_float2(weight, inverse_sum(row_sum));
}

// end: of end_row.
template <typename Element, int kTiles>
__device__ __forceinline__ void write_columns(const FwdParams& params, const SequenceInfo& info,
                                              const RowGroup& rows, int row, int column,
                                              const float (&acc)[kTiles][4], int half, float2 end) {
  Element* const out =
      out_row<Element>(params, info, rows.bidb, rows.head(row), rows.token(row)) + column;
  const auto for_each = [&](auto write) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (column + tile * 8 < params.d) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          write(out + tile * 8 + i,
                normalised(rescaled_acc(acc[tile][2 * half + i], end.x), end.y));
        }
      }
    }
  };
  for_each([](Element* to, float exact) { *to = static_cast<Element>(exact); });
  if (params.residual != nullptr) {
    for_each([&](Element* to, float exact) { keep_residual(params, to, exact); });
  }
}

}  // namespace fad
