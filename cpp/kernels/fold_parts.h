// The end of dk and dv where CTAs, or GPUs, have shared their key blocks.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace fad {

// Parts of a key block at most, so that the sums of runs of them fit a thread.
constexpr int kMostRuns = 256;

// Adds the sums of parts in the order of tree/key_tree.h, scales and rounds them into dk and dv.
// Rows of packed keys behind the last sequence are left as they are.
void fold_parts(const BwdParams& params, cudaStream_t stream);

}  // namespace fad
