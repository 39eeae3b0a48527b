// Finds the launcher of a call among the instances that this build holds.
#include <cstring>

#include "fwd.h"
#include "instances.h"

namespace fad {

#define FAD_DECLARE(dtype, head_dim) void fwd_##dtype##_##head_dim(FwdParams&, cudaStream_t);
FAD_FWD_INSTANCES(FAD_DECLARE)
#undef FAD_DECLARE

namespace {

// Head dims that upstream's kernels are written for; a call takes the next one up.
constexpr int kHeadDims[] = {32, 64, 96, 128, 192, 256};

struct Entry {
  const char* dtype;
  int head_dim;
  FwdLauncher launcher;
};

#define FAD_ENTRY(dtype, head_dim) {#dtype, head_dim, &fwd_##dtype##_##head_dim},
constexpr Entry kFwdEntries[] = {FAD_FWD_INSTANCES(FAD_ENTRY)};
#undef FAD_ENTRY

}  // namespace

int kernel_head_dim(int head_dim) {
  for (const int rounded : kHeadDims) {
    if (rounded >= head_dim) {
      return rounded;
    }
  }
  return 0;
}

FwdLauncher find_fwd(const char* dtype, int head_dim) {
  for (const Entry& entry : kFwdEntries) {
    if (entry.head_dim == kernel_head_dim(head_dim) && std::strcmp(entry.dtype, dtype) == 0) {
      return entry.launcher;
    }
  }
  return nullptr;
}

}  // namespace fad
