#include "device.h"

#include <c10/cuda/CUDAException.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <string_view>

#include "checks.h"

namespace fad {

namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

// FAD_ARCHITECTURES is CMAKE_CUDA_ARCHITECTURES, with commas: "80-real,90-real,90-virtual".
// Machine code (real) runs on its own major version, at its minor version or above; PTX (virtual)
// on everything above it. No suffix means both.
bool holds_code_for(int capability) {
  std::string_view rest = FAD_ARCHITECTURES;
  while (!rest.empty()) {
    const auto comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    const int arch = std::atoi(item.data());
    const bool real = item.find("-virtual") == std::string_view::npos;
    const bool ptx = item.find("-real") == std::string_view::npos;
    if ((real && capability / 10 == arch / 10 && capability >= arch) ||
        (ptx && capability >= arch)) {
      return true;
    }
  }
  return false;
}

}  // namespace

void check_architecture(int device) {
  constexpr int kCached = 64;
  static std::array<std::atomic<bool>, kCached> known_good{};
  if (device < kCached && known_good[device].load(std::memory_order_relaxed)) {
    return;
  }
  const int capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                         attribute(cudaDevAttrComputeCapabilityMinor, device);
  check(holds_code_for(capability), "cuda:", device, " has compute capability ", capability / 10,
        ".", capability % 10, "; this build of flash_attn_deterministic holds code for ",
        FAD_ARCHITECTURES);
  if (device < kCached) {
    known_good[device].store(true, std::memory_order_relaxed);
  }
}

int num_sms(int device) { return attribute(cudaDevAttrMultiProcessorCount, device); }

int shared_bytes_per_block(int device) {
  return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace fad
