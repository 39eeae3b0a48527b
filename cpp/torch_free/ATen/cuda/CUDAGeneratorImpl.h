// Stands in for the torch header of this name, of which upstream's kernels use one struct.
// Our own layout: a device pointer to (seed, offset), or to a seed of each sequence, because
// numbers read on the host would be frozen into a captured CUDA graph.
#pragma once

#include <cstdint>

namespace at {

struct PhiloxCudaState {
  const std::uint64_t* seed_and_offset = nullptr;
  bool seed_to_each = false;
};

}  // namespace at
