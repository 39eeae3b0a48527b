// How the backward's tiles share an SM's threads, registers and memory.
//
// A CTA owns a key block and walks row blocks. Scores are transposed, keys by rows, so that P^T and
// dS^T are already in registers as first operands of their products with dO and Q. dQ needs dS of
// all keys: it goes through shared memory.
//
// Two warpgroups compute. Up to head dim 128 a key block has 128 keys, of which each owns 64. Above
// it has 64: one warpgroup computes P and dv, the other dS and dk.
#pragma once

#include "bwd_shape.h"
#include "bwd_walk.h"
#include "sm90/tma.h"

namespace fad::sm90 {

template <typename Element_, int kHeadDim_, int kHeadDimV_, int kRows_, int kKeys_>
struct BwdTile {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;  // of V, dO and dv
  static constexpr int kRows = kRows_;
  static constexpr int kKeys = kKeys_;
  static constexpr bool kSharesKeys = kHeadDim > 128;  // both warpgroups work on the same keys
  static constexpr int kGroups = 2;                    // warpgroups that compute
  static constexpr int kGroupKeys = 64;                // the height of wgmma
  static_assert(kKeys == (kSharesKeys ? 1 : kGroups) * kGroupKeys);
  static_assert(kRows == (kHeadDim <= 64 ? 128 : 64));
  static constexpr int kConsumers = 128 * kGroups;
  static constexpr int kThreads = 128 + kConsumers;
  static constexpr int kConsumerRegisters = kHeadDim == 64 || kHeadDim == 256 ? 240 : 232;
  static constexpr int kHelperRegisters = kHeadDim == 64 || kHeadDim == 256 ? 24 : 40;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kHelperRegisters + kGroups * kConsumerRegisters <=
                (kGroups + 1) * kLaunchRegisters);

  // dq of a row block is computed in parts of 64 rows: the upper and lower rows, or each 64
  // columns. The first warpgroup computes the first one, or two of four, the second one the rest.
  static constexpr bool kSplitsRows = kRows == 128;
  static constexpr int kDqColumns = kSplitsRows ? kHeadDim : 64;
  static constexpr int kDqParts = kSharesKeys ? kHeadDim / 64 : 2;
  static constexpr __host__ __device__ int dq_parts(int group) {
    return group == 0 ? kDqParts / 2 : (kDqParts + 1) / 2;
  }
  static_assert(kHeadDim % (kSharesKeys ? 64 : 32) == 0 && kHeadDim <= 256);
  // Each warpgroup has one of dk and dv where they may be of different widths.
  static_assert(kHeadDimV == kHeadDim || (kSharesKeys && kHeadDimV < kHeadDim));

  // Whether registers are enough to add to dv while dS is computed.
  static constexpr bool kDvBesideScores = kHeadDim != 64;

  // Shared memory: K, V, then for each stage of the ring a row block of Q and dO, dS (64 keys to a
  // box), dq and two numbers for each row; barriers. Warpgroups that share keys hand over P, too.
  static constexpr int kStages = 2;
  static constexpr int kDoStages = kHeadDim == 256 ? 1 : 2;
  static constexpr int kBoxes = (kHeadDim + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kKeyBoxBytes = kKeys * kBoxRowBytes;
  static constexpr int kKeyBytes = kBoxes * kKeyBoxBytes;
  static constexpr int kValueBoxes = (kHeadDimV + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kValueBytes = kValueBoxes * kKeyBoxBytes;
  static constexpr int kRowBoxBytes = kRows * kBoxRowBytes;
  static constexpr int kRowBytes = kBoxes * kRowBoxBytes;
  static constexpr int kDoBytes = kValueBoxes * kRowBoxBytes;
  static constexpr int kScoreBoxBytes = kRows * kBoxRowBytes;
  static constexpr int kScoreBytes = kKeys / kGroupKeys * kScoreBoxBytes;
  static constexpr int kWeightBytes = kSharesKeys ? kRows * kKeys * 4 : 0;
  static constexpr int kDqPartBytes = 64 * kDqColumns * 4;
  static constexpr int kDqBytes = kRows * kHeadDim * 4;
  // Warpgroups that share keys have buffers of their own, for a part: one to each part, or to each
  // warpgroup.
  static constexpr int kDqBuffers = !kSharesKeys ? kStages : kHeadDim == 192 ? kDqParts : kGroups;
  static constexpr int kDqBufferBytes = kSharesKeys ? kDqPartBytes : kDqBytes;
  static constexpr int kNumberBytes = 2 * kRows * 4;

  static constexpr int kKAt = 0;
  static constexpr int kVAt = kKAt + kKeyBytes;
  static constexpr int kQAt = kVAt + kValueBytes;
  static constexpr int kDoAt = kQAt + kStages * kRowBytes;
  static constexpr int kScoresAt = kDoAt + kDoStages * kDoBytes;
  static constexpr int kWeightsAt = kScoresAt + kStages * kScoreBytes;
  static constexpr int kDqAt = kWeightsAt + kWeightBytes;
  static constexpr int kNumbersAt = kDqAt + kDqBuffers * kDqBufferBytes;
  static constexpr int kBarriersAt = kNumbersAt + kStages * kNumberBytes;

  // Barriers, 8 bytes each.
  static constexpr int kKFull = kBarriersAt;
  static constexpr int kVFull = kKFull + 8;
  static constexpr int kQFull = kVFull + 8;
  static constexpr int kQEmpty = kQFull + 8 * kStages;  // Q and the numbers of its rows
  static constexpr int kDoFull = kQEmpty + 8 * kStages;
  static constexpr int kDoEmpty = kDoFull + 8 * kStages;
  static constexpr int kNumbersFull = kDoEmpty + 8 * kStages;
  static constexpr int kDqFull = kNumbersFull + 8 * kStages;
  static constexpr int kDqEmpty = kDqFull + 8 * kDqBuffers;
  static constexpr int kWorkAt = (kDqEmpty + 8 * kDqBuffers + 15) / 16 * 16;
  static constexpr int kSlotAt = kWorkAt + kBwdWorkBytes;  // where sums are kept
  static constexpr int kBytes = kSlotAt + 16;
  static_assert(kBytes <= kBwdSharedBytes);

  // Of a row of dq's part; part 1 of 96 columns has 32.
  static constexpr __host__ __device__ int dq_row_bytes(int part) {
    return part == 1 && kHeadDim == 96 ? 128 : 4 * kDqColumns;
  }
  // The byte of an element of dq in its tile: eights of columns are swizzled by their row.
  static constexpr __host__ __device__ int dq_at(int row, int column) {
    const int part = kSplitsRows ? row / 64 : column / 64;
    const int bytes = dq_row_bytes(part);
    return part * kDqPartBytes + row % 64 * bytes + (column % 64 * 4 ^ row % (bytes / 32) * 32);
  }
};

// The buffer for a part of dq, where warpgroups share keys: its number, and the parity of its
// phase. slot: of the row block, in a ring of two.
template <typename T>
struct DqBuffer {
  int number;
  uint32_t parity;

  __device__ __forceinline__ DqBuffer(int slot, int part) {
    constexpr bool kOneToEach = T::kDqBuffers == T::kDqParts;
    number = kOneToEach ? part : part / 2;
    parity = kOneToEach ? slot : part % 2;
  }
};

// Named barriers; 0 is __syncthreads.
constexpr int kConsumersMeet = 1;
constexpr int kWeightsStored = 2;  // of four: one for each warp of a warpgroup

}  // namespace fad::sm90
