// Launching the few-rows kernel.
#pragma once

#include "few_rows.cuh"
#include "launch.h"

namespace fad {

template <typename Traits>
void launch_few_rows(const FwdParams& params, unsigned ctas, cudaStream_t stream) {
  launch<&few_rows_kernel<Traits>>(dim3(ctas, params.num_splits), Traits::kThreads,
                                   Traits::kSharedBytes, Traits::kSharedBytes, stream, params);
}

}  // namespace fad
