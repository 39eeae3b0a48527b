// What is known of a row after some keys, not normalised: (maximum, sum, accumulator). Splits are
// merged last to first by the functions here, on every path, so that the bits of a row do not
// depend on how many CTAs worked on it. Every rounding is spelled out.
#pragma once

#include "arithmetic.h"

namespace fad {

// The weight of one side of a merge: 2^((maximum - merged maximum) * scale). A side without keys
// weighs -0: its accumulator is +0, and t + (+0 * -0) is t for every t, -0 and NaN included.
__device__ __forceinline__ float merge_weight(float row_max, float row_sum, float merged_max,
                                              float scale_log2) {
  return row_sum == 0.f ? -0.f : exp2_approx(__fmul_rn(__fsub_rn(row_max, merged_max), scale_log2));
}

// Sums and accumulators: later * weight + earlier * weight.
__device__ __forceinline__ float merge_value(float later, float later_weight, float earlier,
                                             float earlier_weight) {
  return __fmaf_rn(later, later_weight, __fmul_rn(earlier, earlier_weight));
}

struct MergeWeights {
  float later, earlier;
};

// Merges maximum and sum of the earlier split into those of the later ones, and returns the
// weights for their accumulators.
__device__ __forceinline__ MergeWeights merge_state(float later_max, float later_sum,
                                                    float& row_max, float& row_sum,
                                                    float scale_log2) {
  const float merged_max = fmaxf(later_max, row_max);
  const MergeWeights weights{merge_weight(later_max, later_sum, merged_max, scale_log2),
                             merge_weight(row_max, row_sum, merged_max, scale_log2)};
  row_sum = merge_value(later_sum, weights.later, row_sum, weights.earlier);
  row_max = merged_max;
  return weights;
}

// A sink: one more score of a row, without a value, in the units of softmax_lse. It is merged last,
// as a split before the first one that holds nothing else: no path and no other split changes.
// Returns the weight of the row's accumulator. A sink of -inf changes no bit.
__device__ __forceinline__ float merge_sink(float sink, float scale, float scale_log2,
                                            float& row_max, float& row_sum) {
  float merged_max = __fdiv_rn(sink, scale);
  float merged_sum = sink == -INFINITY ? 0.f : 1.f;
  const float weight = merge_state(row_max, row_sum, merged_max, merged_sum, scale_log2).later;
  row_max = merged_max;
  row_sum = merged_sum;
  return weight;
}

}  // namespace fad
