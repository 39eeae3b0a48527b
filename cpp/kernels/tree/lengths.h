// Lengths of sequences lie on the device, where the host cannot check them. The patched
// block_info.h keeps each length between 0 and the bound that the host planned with: a wrong one
// leaves out rows or keys. Where a sequence starts (cu_seqlens) is not checked: a wrong start
// reads, and for rows of q writes, elsewhere.
#pragma once

namespace fad {

__device__ __forceinline__ int within(int length, int most) { return max(0, min(length, most)); }

}  // namespace fad
