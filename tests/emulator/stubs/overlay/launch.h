// Runs a kernel on the CPU instead of launching it.
#pragma once

#include <c10/cuda/CUDAException.h>

#include "emulator.h"

inline cudaError_t emulated_memset(void* to, int value, std::size_t bytes, cudaStream_t) {
  emulator::finish_grids();
  std::memset(to, value, bytes);
  return cudaSuccess;
}
#define cudaMemsetAsync emulated_memset

namespace emulator {
// Where set, called instead of running a kernel: the grid, and where the arguments are.
inline std::function<void(dim3, std::vector<const void*>)> observe;
}  // namespace emulator

namespace fad {

extern char smem[];

// A kernel runs when the next one is launched (emulator::finish_grids).
template <auto kKernel, typename... Arguments>
void launch(dim3 grid, int threads, int shared, int, cudaStream_t, const Arguments&... arguments) {
  if (emulator::observe) {
    emulator::observe(grid, {&arguments...});
    return;
  }
  if (grid.x == 0) {
    return;
  }
  emulator::finish_grids();
  emulator::grid_before = [=] {
    emulator::run_grid(grid, threads, smem, shared, /*early=*/false, kKernel, arguments...);
  };
}

template <auto kKernel, typename... Arguments>
void launch_early(dim3 grid, int threads, int shared, int, cudaStream_t,
                  const Arguments&... arguments) {
  if (grid.x == 0) {
    return;
  }
  emulator::run_grid(grid, threads, smem, shared, /*early=*/true, kKernel, arguments...);
  emulator::finish_grids();  // where no thread had to wait
}

}  // namespace fad
