// Facts about the GPU a call runs on.
#pragma once

#include <cuda_runtime.h>

#include "kernels/plan.h"

namespace fad {

// What plans are made for: the device, but for what the environment variable
// FLASH_ATTENTION_TEST_DEVICE says. Tests set it, to run the schedules of other GPUs on the one at
// hand: "sms=14,shared=101376,path=parts,family=sm80" (path: one_cta, parts, few_rows or
// scores_first; all parts optional). Users set FLASH_ATTENTION_FAMILY to sm80 to run the kernels
// for every GPU on a Hopper GPU too, or to sm90 to run Hopper's kernels wherever they can run. No
// bit depends on either. Throws, naming what this library holds, if it has neither machine code nor
// PTX for the device.
Device planning_device(int device);

cudaStream_t current_stream(int device);

}  // namespace fad
