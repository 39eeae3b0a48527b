// Stands in for the torch header of this name: reads the pair out of a PhiloxCudaState.
#pragma once

#include <cstdint>
#include <tuple>

#include <ATen/cuda/CUDAGeneratorImpl.h>

namespace at::cuda::philox {

__device__ __forceinline__ std::tuple<std::uint64_t, std::uint64_t> unpack(
    const at::PhiloxCudaState& state) {
  return std::make_tuple(state.seed_and_offset[0], state.seed_and_offset[1]);
}

}  // namespace at::cuda::philox
