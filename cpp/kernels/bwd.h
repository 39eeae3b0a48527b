// The backward's kernels, for code that knows no CUDA C++.
#pragma once

#include <cuda_runtime.h>

#include "fwd.h"
#include "params.h"

namespace fad {

using BwdLauncher = void (*)(const BwdParams&, cudaStream_t);

// A loop over the row blocks of all key blocks. All of an instance have the same tiles, and give
// the same bits.
struct BwdKernel {
  Family family;
  Features covers;
  int block_m, block_n;  // query rows and keys to a tile
  int shared_bytes;      // of a CTA
  BwdLauncher launch;
  BwdLauncher after;  // dq, from its sums as launch leaves them
  // Whether it takes tensors laid out like this; nullptr: all.
  bool (*takes)(const BwdParams& params) = nullptr;
  int head_dim_v = 0;  // as of a FwdKernel
};

// All kernels of one (dtype, head dim). Of those that cover a call the first one is the fastest.
struct BwdInstance {
  const BwdKernel* kernels;
  int num_kernels;
  BwdLauncher before;  // fills the row sums, clears dq's sums
  BwdLauncher fold;    // dk and dv, from the sums of parts
};

// The instance for a dtype and a head dim (rounded up to the next compiled one), or nullptr if this
// build does not hold it. dtype is a name in instances.json.
const BwdInstance* find_bwd(const char* dtype, int head_dim);

}  // namespace fad
