#include "device.h"

#include <c10/cuda/CUDAException.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "checks.h"

namespace fad {

namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

int capability_of(int device) {
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
         attribute(cudaDevAttrComputeCapabilityMinor, device);
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
    int arch = 0;
    std::from_chars(item.data(), item.data() + item.size(), arch);
    if (item.substr(0, item.find('-')).back() == 'a') {
      continue;  // kernels of the sm90 family alone, which cover some calls only
    }
    const bool real = item.find("-virtual") == std::string_view::npos;
    const bool ptx = item.find("-real") == std::string_view::npos;
    if ((real && capability / 10 == arch / 10 && capability >= arch) ||
        (ptx && capability >= arch)) {
      return true;
    }
  }
  return false;
}

constexpr const char* kTestDevice = "FLASH_ATTENTION_TEST_DEVICE";
constexpr const char* kFamily = "FLASH_ATTENTION_FAMILY";

// A positive number, or throws.
int number(std::string_view key, std::string_view value) {
  int result = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  check(error == std::errc{} && end == value.data() + value.size() && result > 0, kTestDevice, ": ",
        key, ": expected a positive number, got ", value);
  return result;
}

Path path(std::string_view value) {
  constexpr std::pair<std::string_view, Path> kPaths[] = {{"one_cta", Path::kOneCta},
                                                          {"parts", Path::kParts},
                                                          {"few_rows", Path::kFewRows},
                                                          {"scores_first", Path::kScoresFirst}};
  for (const auto& [name, which] : kPaths) {
    if (value == name) {
      return which;
    }
  }
  check(false, kTestDevice, ": path: expected one_cta, parts, few_rows or scores_first, got ",
        value);
  return Path::kOneCta;
}

Family family(const char* variable, std::string_view value) {
  if (value == "sm80" || value == "sm90") {
    return value == "sm80" ? Family::kSm80 : Family::kSm90;
  }
  check(false, variable, ": expected the family sm80 or sm90, got ", value);
  return Family::kSm80;
}

void override(std::string_view rest, Device& device) {
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(item.size() + 1, rest.size()));
    const auto equals = item.find('=');
    const std::string_view key = item.substr(0, equals);
    const std::string_view value =
        equals == std::string_view::npos ? std::string_view{} : item.substr(equals + 1);
    if (key == "sms") {
      device.num_sms = number(key, value);
    } else if (key == "shared") {
      device.shared_bytes_per_block = number(key, value);
    } else if (key == "path") {
      device.path = path(value);
    } else if (key == "family") {
      device.family = family(kTestDevice, value);
    } else if (key == "heads") {
      device.heads_in_flight = number(key, value);
    } else {
      check(false, kTestDevice, ": expected sms, shared, path, family or heads, got ", key);
    }
  }
}

Device read_device(int device) {
  const int capability = capability_of(device);
  check(holds_code_for(capability), "cuda:", device, " has compute capability ", capability / 10,
        ".", capability % 10, "; this build of flash_attn_deterministic holds code for ",
        FAD_ARCHITECTURES);
  return {attribute(cudaDevAttrMultiProcessorCount, device),
          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          capability,
          std::nullopt,
          std::nullopt,
          attribute(cudaDevAttrL2CacheSize, device)};
}

// The runtime is queried once for each device: every call plans, and four attributes take it longer
// than the plan.
Device known_device(int device) {
  constexpr int kCached = 64;
  static std::array<std::atomic<const Device*>, kCached> known{};
  if (device >= kCached) {
    return read_device(device);
  }
  const Device* found = known[device].load(std::memory_order_acquire);
  if (found == nullptr) {
    found = new Device(read_device(device));  // kept for the life of the process
    known[device].store(found, std::memory_order_release);
  }
  return *found;
}

}  // namespace

Device planning_device(int device) {
  Device planned = known_device(device);
  if (const char* name = std::getenv(kFamily)) {
    planned.family = family(kFamily, name);
  }
  if (const char* words = std::getenv(kTestDevice)) {
    override(words, planned);
  }
  return planned;
}

cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace fad
