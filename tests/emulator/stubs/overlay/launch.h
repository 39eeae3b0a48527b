// Runs a kernel on the CPU instead of launching it.
#pragma once

#include <c10/cuda/CUDAException.h>

#include "emulator.h"

namespace fad {

extern char smem[];

template <auto kKernel, typename... Arguments>
void launch(dim3 grid, int threads, int shared, int, cudaStream_t, const Arguments&... arguments) {
  if (grid.x == 0) {
    return;
  }
  emulator::run_grid(grid, threads, smem, shared, kKernel, arguments...);
}

}  // namespace fad
