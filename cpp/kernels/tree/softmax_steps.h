// The steps of the online softmax that decide the bits of a row. Every kernel family calls them:
// upstream's body through patches of its softmax.h and mask.h, ours directly. Each rounding is
// written out (arithmetic.h), so that kernels that schedule the work differently round alike.
#pragma once

#include <cmath>

#include "arithmetic.h"

namespace fad {

__device__ __forceinline__ float scaled_max(float row_max, float scale) {
  return __fmul_rn(row_max, scale);
}

// exp2(score * scale - max_scaled), one rounding before the exp2.
__device__ __forceinline__ float scaled_exp2(float score, float scale, float max_scaled) {
  return exp2_approx(__fmaf_rn(score, scale, -max_scaled));
}

// What brings a sum from the maximum before a block to the one after it. A row without a visible
// key so far has maximum -inf; new_max is then given as 0, as -inf - -inf is NaN.
__device__ __forceinline__ float rescale_factor(float old_max, float new_max, float scale) {
  return exp2_approx(__fmul_rn(__fsub_rn(old_max, new_max), scale));
}

// The running row sum, brought to the new maximum.
__device__ __forceinline__ float rescaled_sum(float row_sum, float factor) {
  return __fmul_rn(row_sum, factor);
}

// An element of the accumulator, brought to the new maximum. Denormals are kept, so that a factor
// of 1 changes no bit and a kernel may leave it out.
__device__ __forceinline__ float rescaled_acc(float accumulator, float factor) {
  return multiply_keeping_denormals(accumulator, factor);
}

// 1 / sum. A row without a visible key has sum 0 and output 0; a NaN sum must reach the output.
__device__ __forceinline__ float inverse_sum(float row_sum) {
  return row_sum == 0.f ? 1.f : reciprocal_approx(row_sum);
}

// An accumulator of zero is +0 in the output: its sign depends on how many blocks without a visible
// key were visited, and with it on the height of the tile.
__device__ __forceinline__ float normalised(float accumulator, float inverse) {
  return __fmaf_rn(accumulator, inverse, 0.f);
}

// The bias of ALiBi, for every mask. (Upstream's causal instances add slope * column instead, which
// gives other bits, and which instance runs depends on the lengths of batch mates.)
__device__ __forceinline__ float alibi_score(float score, float slope, int distance) {
  return __fmaf_rn(-slope, static_cast<float>(abs(distance)), score);
}

// The same where the distance is a float already: exact, and so equal, below kExactInFloat.
__device__ __forceinline__ float alibi_score(float score, float slope, float distance) {
  return __fmaf_rn(-slope, fabsf(distance), score);
}
constexpr int kExactInFloat = 1 << 24;

// log(sum(exp(scores))). Upstream sends a NaN sum to `empty` as well, which reads as "no key".
__device__ __forceinline__ float log_sum_exp(float row_max, float scale, float row_sum,
                                             float empty) {
  return row_sum == 0.f ? empty : __fmaf_rn(row_max, scale, log_approx(row_sum));
}

// The largest score of a row, as the softmax takes it: capped, with the bias of ALiBi, scaled. -inf
// without keys; NaN where the sum is, as maxima leave NaN out. A zero is +0, so that the order in
// which maxima of rows are taken changes no bit.
__device__ __forceinline__ float largest_score(float row_max, float scale, float row_sum) {
  return row_sum == row_sum ? __fadd_rn(__fmul_rn(row_max, scale), 0.f) : row_sum;
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
