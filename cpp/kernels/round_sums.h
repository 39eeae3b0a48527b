// The end of dk and dv where the caller keeps their sums.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fad {

// The sums of one of dk and dv.
struct KeySums {
  const float* sums;  // (rows, heads, head_dim), contiguous
  void* gradient;     // (rows, heads / group, head_dim), contiguous
  std::int64_t rows;
  int heads, group, head_dim;
  float scale;
  bool scales;  // whether they are multiplied: a product with 1 would still flush denormals
};

// Adds the query heads of each group, first to last, scales and rounds, as the kernels do where
// they keep the sums themselves.
void round_sums(const KeySums& sums, bool is_bf16, cudaStream_t stream);

}  // namespace fad
