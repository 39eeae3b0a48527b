// The softmax of a warpgroup's rows, in registers: in steps of 64 keys, last to first, with the
// functions that every other kernel uses, and in their order.
#pragma once

#include <cmath>

#include "fwd_shape.h"
#include "fwd_walk.h"
#include "tree/softmax_steps.h"

namespace fad::sm90 {

// Over the four threads that share a row, in the order of upstream's Allreduce<4>.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 1));
}

__device__ __forceinline__ float quad_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
  return __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
}

// The running softmax of the thread's two rows.
struct RowState {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};
};

// What one block does to it, for each step of kStep keys: factors of what is there already, and
// the scaled maximum to take scores against.
template <int kSteps>
struct StepScales {
  float factor[kSteps][2], max_scaled[kSteps][2];
};

// Step 0 is the last kStep keys of the block.
template <typename T>
__device__ __forceinline__ constexpr int first_score(int step) {
  return (T::kSteps - 1 - step) * (kStep / 2);
}

template <typename T>
__device__ __forceinline__ void find_maxima(float scale_log2, const float (&scores)[T::kKeys / 2],
                                            RowState& rows, StepScales<T::kSteps>& scales) {
  float maxima[T::kSteps][2];
#pragma unroll
  for (int step = 0; step < T::kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Two chains: a maximum has no order.
      const float* const s = scores + first_score<T>(step) + 2 * r;
      float a = fmaxf(s[0], s[1]);
      float b = fmaxf(s[kStep / 4], s[kStep / 4 + 1]);
#pragma unroll
      for (int j = 4; j < kStep / 4; j += 4) {
        a = fmaxf(a, fmaxf(s[j], s[j + 1]));
        b = fmaxf(b, fmaxf(s[kStep / 4 + j], s[kStep / 4 + j + 1]));
      }
      maxima[step][r] = fmaxf(a, b);
    }
  }
#pragma unroll
  for (int step = 0; step < T::kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maxima[step][r] = quad_max(maxima[step][r]);
    }
  }
#pragma unroll
  for (int step = 0; step < T::kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = rows.max[r];
      rows.max[r] = fmaxf(before, maxima[step][r]);
      const float now = rows.max[r] == -INFINITY ? 0.f : rows.max[r];
      scales.factor[step][r] = rescale_factor(before, now, scale_log2);
      scales.max_scaled[step][r] = scaled_max(now, scale_log2);
    }
  }
}

// Scores become their exponentials, and are added to the rows' sums.
template <typename T>
__device__ __forceinline__ void exponentiate(float scale_log2, float (&scores)[T::kKeys / 2],
                                             RowState& rows, const StepScales<T::kSteps>& scales) {
#pragma unroll
  for (int step = 0; step < T::kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.sum[r] = rescaled_sum(rows.sum[r], scales.factor[step][r]);
    }
#pragma unroll
    for (int j = 0; j < kStep / 2; ++j) {
      const int r = j / 2 % 2;
      float& s = scores[first_score<T>(step) + j];
      s = scaled_exp2(s, scale_log2, scales.max_scaled[step][r]);
      rows.sum[r] = __fadd_rn(rows.sum[r], s);
    }
  }
}

template <int kCount>
__device__ __forceinline__ void rescale(float (&acc)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (__any_sync(~0u, factor[r] != 1.f)) {
#pragma unroll
      for (int j = 2 * r; j < kCount; j += 4) {
        acc[j] = rescaled_acc(acc[j], factor[r]);
        acc[j + 1] = rescaled_acc(acc[j + 1], factor[r]);
      }
    }
  }
}

}  // namespace fad::sm90
