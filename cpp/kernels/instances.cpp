// Finds a call's instance among those that this build holds.
#include <cstring>

#include "bwd.h"
#include "fwd.h"
#include "instances.h"

namespace fad {

#define FAD_DECLARE(dtype, head_dim) extern const FwdInstance fwd_##dtype##_##head_dim;
FAD_FWD_INSTANCES(FAD_DECLARE)
#undef FAD_DECLARE
#define FAD_DECLARE(dtype, head_dim) extern const BwdInstance bwd_##dtype##_##head_dim;
FAD_BWD_INSTANCES(FAD_DECLARE)
#undef FAD_DECLARE

namespace {

// Lists end with an empty entry: a build may hold one direction only.
template <typename Instance>
struct Entry {
  const char* dtype;
  int head_dim;
  const Instance* instance;
};

#define FAD_ENTRY(dtype, head_dim) {#dtype, head_dim, &fwd_##dtype##_##head_dim},
constexpr Entry<FwdInstance> kFwdEntries[] = {FAD_FWD_INSTANCES(FAD_ENTRY){"", 0, nullptr}};
#undef FAD_ENTRY
#define FAD_ENTRY(dtype, head_dim) {#dtype, head_dim, &bwd_##dtype##_##head_dim},
constexpr Entry<BwdInstance> kBwdEntries[] = {FAD_BWD_INSTANCES(FAD_ENTRY){"", 0, nullptr}};
#undef FAD_ENTRY

template <typename Instance, std::size_t kCount>
const Instance* find(const Entry<Instance> (&entries)[kCount], const char* dtype, int head_dim) {
  for (const Entry<Instance>& entry : entries) {
    if (entry.head_dim == kernel_head_dim(head_dim) && std::strcmp(entry.dtype, dtype) == 0) {
      return entry.instance;
    }
  }
  return nullptr;
}

}  // namespace

const FwdInstance* find_fwd(const char* dtype, int head_dim) {
  return find(kFwdEntries, dtype, head_dim);
}

const BwdInstance* find_bwd(const char* dtype, int head_dim) {
  return find(kBwdEntries, dtype, head_dim);
}

}  // namespace fad
