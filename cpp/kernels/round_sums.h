// The end of dk and dv where the caller keeps their sums.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace fad {

// dk and dv from params.dk_sums and params.dv_sums: adds the query heads of each group, first to
// last, scales and rounds, as the kernels do where they keep the sums themselves.
void round_sums(const BwdParams& params, cudaStream_t stream);

}  // namespace fad
