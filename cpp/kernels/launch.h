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

// Whether a kernel holds the instructions of sm80/kernel_order.h: its code for this device was made
// of PTX for 9.0 or above. Graphs support kernels that start early since CUDA 12.3.
template <auto kKernel>
bool can_start_early() {
  constexpr int kDevices = 64;
  static std::array<std::atomic<signed char>, kDevices> known{};  // 0: not yet
  int device = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  if (device < kDevices && known[device].load(std::memory_order_relaxed) != 0) {
    return known[device].load(std::memory_order_relaxed) > 0;
  }
  int driver = 0;
  cudaFuncAttributes attributes{};
  C10_CUDA_CHECK(cudaDriverGetVersion(&driver));
  C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kKernel));
  const bool can = attributes.ptxVersion >= 90 && driver >= 12030;
  if (device < kDevices) {
    known[device].store(can ? 1 : -1, std::memory_order_relaxed);
  }
  return can;
}

// The launch's own status is checked, not cudaGetLastError: that may hold another call's error.
template <auto kKernel, typename... Arguments>
void launch_as(const cudaLaunchConfig_t& config, int max_shared, const Arguments&... arguments) {
  if (config.gridDim.x == 0) {
    return;
  }
  if (max_shared > 48 * 1024) {
    allow_shared_memory<kKernel>(max_shared);
  }
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kKernel, arguments...));
}

inline cudaLaunchConfig_t launch_config(dim3 grid, int threads, int shared, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return config;
}

// shared: bytes of dynamic shared memory of this launch; max_shared: of any launch of this kernel.
// An empty grid launches nothing.
template <auto kKernel, typename... Arguments>
void launch(dim3 grid, int threads, int shared, int max_shared, cudaStream_t stream,
            const Arguments&... arguments) {
  launch_as<kKernel>(launch_config(grid, threads, shared, stream), max_shared, arguments...);
}

// The same for a kernel that may start before the one launched before it has ended, where the
// device supports that: the kernel calls the functions of sm80/kernel_order.h.
template <auto kKernel, typename... Arguments>
void launch_early(dim3 grid, int threads, int shared, int max_shared, cudaStream_t stream,
                  const Arguments&... arguments) {
  cudaLaunchConfig_t config = launch_config(grid, threads, shared, stream);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = can_start_early<kKernel>() ? 1 : 0;
  launch_as<kKernel>(config, max_shared, arguments...);
}

}  // namespace fad
