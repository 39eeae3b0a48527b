// Upstream's body does not run here.
#pragma once

#include "kernel_traits.h"
#include "utils.h"

namespace FLASH_NAMESPACE {
template <typename Traits, bool, bool, bool, bool, bool, bool, bool, bool, typename Params>
void compute_attn_1rowblock(const Params&, int, int, int);
}

namespace fad {
template <typename>
struct OwnerWalk;
template <typename>
struct PartWalk;
}  // namespace fad
