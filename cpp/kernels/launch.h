// Launching kernels.
#pragma once

#include <c10/cuda/CUDAException.h>

#include <array>
#include <atomic>

namespace fad {

// Lets a kernel use up to max_shared bytes of dynamic shared memory (or all that the device offers,
// if that is less). Above 48 KB a kernel has to ask. Once per device and always the same number:
// a host thread that set it to what its own launch needs could lower it between another thread's
// setting and launch.
template <auto kKernel>
void allow_shared_memory(int max_shared) {
  constexpr int kDevices = 64;
  static std::array<std::atomic<bool>, kDevices> done{};
  int device = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  if (device < kDevices && done[device].load(std::memory_order_acquire)) {
    return;
  }
  int offered = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&offered, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  C10_CUDA_CHECK(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      max_shared < offered ? max_shared : offered));
  if (device < kDevices) {
    done[device].store(true, std::memory_order_release);
  }
}

// shared: bytes of dynamic shared memory of this launch; max_shared: of any launch of this kernel.
// An empty grid launches nothing.
// The launch's own status is checked, not cudaGetLastError: that may hold another call's error.
template <auto kKernel, typename... Arguments>
void launch(dim3 grid, int threads, int shared, int max_shared, cudaStream_t stream,
            const Arguments&... arguments) {
  if (grid.x == 0) {
    return;
  }
  if (max_shared > 48 * 1024) {
    allow_shared_memory<kKernel>(max_shared);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kKernel, arguments...));
}

}  // namespace fad
