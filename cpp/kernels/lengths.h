// Lengths of sequences lie on the device, where the host cannot check them. The patched
// block_info.h keeps them to what the host reckoned with, so that a wrong one leaves out rows or
// keys, and never touches the memory of others.
#pragma once

namespace fad {

__device__ __forceinline__ int within(int length, int most) { return max(0, min(length, most)); }

}  // namespace fad
