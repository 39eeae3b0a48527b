// The steps of upstream's online softmax in which the compiler is free to fuse a multiply into an
// add. Patches route upstream's softmax.h through here, so that every kernel instance rounds alike.
//
// With FLASH_ATTENTION_DETERMINISTIC each rounding is spelled out; without it the expressions are
// left to the compiler, as upstream leaves them.
#pragma once

#include <cmath>

namespace fad {

__device__ __forceinline__ float scaled_max(float row_max, float scale) {
#ifdef FLASH_ATTENTION_DETERMINISTIC
  return __fmul_rn(row_max, scale);
#else
  return row_max * scale;
#endif
}

// exp2(score * scale - max_scaled), one rounding before the exp2.
__device__ __forceinline__ float scaled_exp2(float score, float scale, float max_scaled) {
#ifdef FLASH_ATTENTION_DETERMINISTIC
  return exp2f(__fmaf_rn(score, scale, -max_scaled));
#else
  return exp2f(score * scale - max_scaled);
#endif
}

// The running row sum, brought to the new maximum. The next operation adds to it, hence the
// explicit rounding.
__device__ __forceinline__ float rescaled_sum(float row_sum, float rescale) {
#ifdef FLASH_ATTENTION_DETERMINISTIC
  return __fmul_rn(row_sum, rescale);
#else
  return row_sum * rescale;
#endif
}

// 1 / sum. A row without a visible key has sum 0 and output 0; a NaN sum must reach the output.
__device__ __forceinline__ float inverse_sum(float row_sum) {
  return row_sum == 0.f ? 1.f : 1.f / row_sum;
}

// An accumulator of zero is +0 in the output: its sign depends on how many blocks without a visible
// key were visited, and with it on the height of the tile.
__device__ __forceinline__ float normalised(float accumulator, float inverse) {
  return __fmaf_rn(accumulator, inverse, 0.f);
}

// One form for every mask: upstream's causal instances add slope * column instead, which gives
// other bits, and which instance runs depends on the lengths of batch mates.
__device__ __forceinline__ float alibi_score(float score, float slope, int distance) {
  return __fmaf_rn(-slope, static_cast<float>(abs(distance)), score);
}

// log(sum(exp(scores))). Upstream sends a NaN sum to `empty` as well, which reads as "no key".
__device__ __forceinline__ float log_sum_exp(float row_max, float scale, float row_sum,
                                             float empty) {
  if (row_sum == 0.f) {
    return empty;
  }
#ifdef FLASH_ATTENTION_DETERMINISTIC
  return __fmaf_rn(row_max, scale, __logf(row_sum));
#else
  return row_max * scale + __logf(row_sum);
#endif
}

// The state before the first key, so that the first step is like every other one.
template <typename Softmax>
__device__ __forceinline__ void start_softmax(Softmax& softmax) {
#pragma unroll
  for (int row = 0; row < size(softmax.row_max); ++row) {
    softmax.row_max(row) = -INFINITY;
    softmax.row_sum(row) = 0.f;
  }
}

}  // namespace fad
