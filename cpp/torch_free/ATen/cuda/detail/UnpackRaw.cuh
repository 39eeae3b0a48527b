// Stands in for the torch header of this name: reads the pair out of a PhiloxCudaState.
#pragma once

#include <cstdint>
#include <tuple>

#include <ATen/cuda/CUDAGeneratorImpl.h>

namespace at::cuda::philox {

// Without dropout there is no pair to read.
__device__ __forceinline__ std::tuple<std::uint64_t, std::uint64_t> unpack(
    const at::PhiloxCudaState& state) {
  const std::uint64_t* const pair = state.seed_and_offset;
  return pair == nullptr ? std::make_tuple(std::uint64_t{0}, std::uint64_t{0})
                         : std::make_tuple(pair[0], pair[1]);
}

}  // namespace at::cuda::philox
