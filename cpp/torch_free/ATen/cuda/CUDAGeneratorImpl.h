// Stands in for the torch header of this name, of which upstream's kernels use one struct.
// Our own layout: (seed, offset) by value, or a device pointer to the two, because numbers read on
// the host would be frozen into a captured CUDA graph.
#pragma once

#include <cstdint>

namespace at {

struct PhiloxCudaState {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  const std::uint64_t* seed_and_offset = nullptr;  // device memory; wins over the two above
};

}  // namespace at
