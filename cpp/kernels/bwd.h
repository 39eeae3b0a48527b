// The backward's kernels, for code that knows no CUDA C++.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace fad {

using BwdLauncher = void (*)(const BwdParams&, cudaStream_t);

struct BwdInstance {
  BwdLauncher launch;
  int block_m, block_n;  // query rows and keys to a tile
  int shared_bytes;      // of a block
};

// The instance for a dtype and a head dim (rounded up to the next compiled one), or nullptr if this
// build does not hold it. dtype is a name in instances.json.
const BwdInstance* find_bwd(const char* dtype, int head_dim);

}  // namespace fad
