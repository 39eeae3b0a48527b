// Facts about the GPU a call runs on.
#pragma once

#include <cuda_runtime.h>

namespace fad {

// Throws, naming what this library holds, if it has neither machine code nor PTX for the device.
void check_architecture(int device);

int num_sms(int device);

// Shared memory that one block may ask for.
int shared_bytes_per_block(int device);

cudaStream_t current_stream(int device);

}  // namespace fad
