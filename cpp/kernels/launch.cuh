// Launching a kernel that takes its parameters in one struct.
#pragma once

#include <c10/cuda/CUDAException.h>

#include <stdexcept>
#include <string>

#include "row_block.h"

namespace fad {

// CTAs of a one-dimensional grid: a block of a sequence each, of each head and sequence. what: the
// length, for the message.
template <typename Params>
unsigned grid_of(const Params& params, int seqlen, int block, const char* what) {
  const long long blocks_each = num_blocks(seqlen, block);
  const long long blocks = blocks_each * params.b * params.h;
  if (blocks > 0x7fffffffLL) {
    throw std::runtime_error(std::string("q: expected batch * nheads * ceil(") + what + " / " +
                             std::to_string(block) + ") below 2^31, the size of a CUDA grid, got " +
                             std::to_string(params.b) + " * " + std::to_string(params.h) + " * " +
                             std::to_string(blocks_each));
  }
  return static_cast<unsigned>(blocks);
}

// shared: bytes of dynamic shared memory; above 48 KB a kernel has to ask.
template <typename Params>
void launch(void (*kernel)(Params), dim3 grid, int threads, int shared, const Params& params,
            cudaStream_t stream) {
  if (grid.x == 0) {
    return;
  }
  if (shared > 48 * 1024) {
    C10_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  }
  kernel<<<grid, threads, shared, stream>>>(params);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace fad
