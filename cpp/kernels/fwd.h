// The door to the kernels for code that knows nothing of CUDA C++: one launcher per instance, and
// one function that picks it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "params.h"

namespace fad {

using FwdLauncher = void (*)(FwdParams&, cudaStream_t);

// The launcher for a dtype and a head dim (rounded up to the next compiled one), or nullptr if this
// build does not hold it. dtype is a name in instances.json.
FwdLauncher find_fwd(const char* dtype, int head_dim);

// Head dim of the kernel that serves this one.
int kernel_head_dim(int head_dim);

// How a call is spread over CTAs. In deterministic mode bits do not depend on it: split_tokens is
// the caller's. Otherwise split_tokens is chosen here, from the batch and the number of SMs.
struct FwdPlan {
  int split_tokens;  // 0: one split
  int num_splits;    // of the longest sequence
  int block_m;       // query rows to a CTA
  bool few_rows;     // the kernel for a few rows runs
  bool many_ctas;    // a CTA per split and a merge kernel, instead of one CTA per row block
  std::size_t scratch_bytes;
};
FwdPlan plan_fwd(const FwdParams& params, int split_tokens, bool deterministic, int num_sms,
                 int shared_bytes_per_block);

}  // namespace fad
