// Sizes of the few-rows kernel, and the layout of its shared memory.
#pragma once

#include <algorithm>

#include "fwd.h"

namespace fad {

// kFp8: keys and values are e4m3; pages then need not be there (kPaged says that they may).
template <typename Element_, int kHeadDim_, int kRows_, bool kPaged_, bool kFp8_ = false>
struct FewRowsTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kPaged = kPaged_;
  static constexpr bool kFp8 = kFp8_;
  static constexpr int kRows = kRows_;
  static constexpr int kKeys = kKeysPerBlock;
  static constexpr int kWarps = kRows > 16 || kHeadDim % 64 == 0 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  // Each 16 rows have so many warps, which share keys (of q k^T) and columns (of P V).
  static constexpr int kSharers = kWarps / (kRows / 16);
  static constexpr int kWarpKeys = kKeys / kSharers;
  static constexpr int kColumns = kHeadDim / kSharers;
  // With 16 rows, a warp's keys and values of a block fit its registers: they are loaded before the
  // first product. With more, they are loaded as products need them.
  static constexpr bool kLoadsAhead = kRows == 16;
  // Rows in shared memory are chunks of 8 elements.
  static constexpr int kChunks = kHeadDim / 8;
  // Copies: 16 bytes to a thread, so many rows at a time. Those in e4m3 come to the first of the
  // two chunks that the thread then puts them to as Element.
  static constexpr int kCopyChunks = kFp8 ? 2 : 1;
  static constexpr int kCopies = kChunks / kCopyChunks;  // of a row
  static constexpr int kRowsAtOnce = kThreads / kCopies;
  // Shared memory: slots, for blocks of keys and of values in turn; probabilities, as fp32 to be
  // summed up and as Element to be multiplied; maxima.
  static constexpr int kSlotBytes = kKeys * kHeadDim * 2;
  static constexpr int kProbsStride = kKeys + 8;  // no bank conflicts
  static constexpr int kProbsBytes = kRows * kProbsStride * (4 + 2);
  static constexpr int kMaximaBytes = kSharers * kRows * 4;
  static constexpr int kSlots = std::min(8, (98 * 1024 - kProbsBytes - kMaximaBytes) / kSlotBytes);
  static constexpr int kSharedBytes = kSlots * kSlotBytes + kProbsBytes + kMaximaBytes;
  // To an SM: one computes while the other waits, where registers suffice.
  static constexpr int kCtas = kRows > 16 && kHeadDim > 128 ? 1 : 2;
  static_assert(kSlots >= 2 && kColumns % 8 == 0 && kSharers >= 2);
  // When the slots of a block's keys and of the values before it are filled again: both once its
  // maxima are known, or one of them after its probabilities. Measured: apart is 4 to 8 % faster
  // where blocks are small and the slots many, at once 3 to 10 % where they are few.
  static constexpr bool kFillsApart = kSlots == 8;
};

// The first of the 16 rows of this warp, and which of the warps that share them this is.
template <typename Traits>
__device__ __forceinline__ int warp_row() {
  return Traits::kRows == 16 ? 0 : threadIdx.x / 32 / Traits::kSharers * 16;
}

template <typename Traits>
__device__ __forceinline__ int sharer() {
  return Traits::kRows == 16 ? threadIdx.x / 32 : threadIdx.x / 32 % Traits::kSharers;
}

// Where 16 bytes of a row of keys or values lie in a slot, so that eight rows can be read at once.
template <int kHeadDim>
__device__ __forceinline__ int slot_offset(int row, int chunk) {
  constexpr int kChunks = kHeadDim / 8;
  const int swizzled = kChunks % 8 == 0 ? chunk ^ (row % 8) : chunk ^ (row / 2 % 4);
  return (row * kChunks + swizzled) * 16;
}

}  // namespace fad
