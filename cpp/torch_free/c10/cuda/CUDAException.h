// Stands in for the torch header of this name: a failed CUDA call becomes a C++ exception.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace fad {

// Clears the error that the runtime keeps of the failed call, so that it is reported once.
inline void throw_on_cuda_error(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    cudaGetLastError();
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status) + " (" +
                             cudaGetErrorName(status) + ")");
  }
}

}  // namespace fad

#define C10_CUDA_CHECK(call) ::fad::throw_on_cuda_error((call), #call)
// Upstream's own launchers, which only the baseline for benchmarks compiles, use this one.
#define C10_CUDA_KERNEL_LAUNCH_CHECK() \
  ::fad::throw_on_cuda_error(cudaGetLastError(), "kernel launch")
