// The seed and offset of the random numbers of each (sequence, head).
#pragma once

#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <tuple>

namespace fad {

// Upstream numbers them batch index * nheads + head, so that the mask of a head changes with the
// number of heads beside it. 32 numbers to a head, for the lanes of a warp; 2^16 heads to a
// sequence. A sequence with a seed of its own counts as the first one, wherever it stands.
template <bool kDropout>
__device__ __forceinline__ std::tuple<unsigned long long, unsigned long long> dropout_key(
    const at::PhiloxCudaState& state, int bidb, int bidh) {
  const auto* const numbers = state.seed_and_offset;
  if (!kDropout || numbers == nullptr) {  // the call has no dropout
    return {0, 0};
  }
  const auto head = static_cast<unsigned long long>(bidh) << 5;
  if (state.seed_to_each) {
    return {numbers[bidb], head};
  }
  return {numbers[0], numbers[1] + (static_cast<unsigned long long>(bidb) << 21) + head};
}

}  // namespace fad
