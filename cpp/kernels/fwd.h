// The door to the kernels for code that knows nothing of CUDA C++: one launcher per instance, and
// one function that picks it.
#pragma once

#include <cuda_runtime.h>

#include "flash.h"  // upstream: Flash_fwd_params

namespace fad {

using FwdParams = FLASH_NAMESPACE::Flash_fwd_params;
using FwdLauncher = void (*)(FwdParams&, cudaStream_t);

// The launcher for a dtype and a head dim (rounded up to the next compiled one), or nullptr if this
// build does not hold it. dtype is a name in instances.json.
FwdLauncher find_fwd(const char* dtype, int head_dim);

// How many ways the keys of each row block are split over CTAs, and with it the scratch that the
// caller owes. Always 1 in a deterministic build; otherwise it depends on the number of SMs and on
// the batch, which is what makes that build's bits depend on them.
struct FwdSchedule {
  int num_splits;
};
FwdSchedule schedule_fwd(const FwdParams& params, int num_sms);

}  // namespace fad
