// Facts about the GPU a call runs on.
#pragma once

#include <cuda_runtime.h>

#include "kernels/plan.h"

namespace fad {

// Throws, naming what this library holds, if it has neither machine code nor PTX for the device.
void check_architecture(int device);

// What plans are made for: the device, but for what the environment variable
// FLASH_ATTENTION_TEST_DEVICE says. Tests set it, to run the schedules of other GPUs on the one at
// hand: "sms=14,shared=101376,path=parts" (path: one_cta, parts or few_rows; all parts optional).
Device planning_device(int device);

cudaStream_t current_stream(int device);

}  // namespace fad
