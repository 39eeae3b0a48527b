// How the backward's tiles share an SM's threads, registers and memory.
//
// A CTA owns a block of 128 keys and walks row blocks. Each of its two computing warpgroups owns 64
// of the keys. Scores are transposed, keys by rows, so that P^T and dS^T are already in registers
// as first operands of their products with dO and Q. dQ needs dS of all keys: it goes through
// shared memory.
#pragma once

#include "bwd_shape.h"
#include "bwd_walk.h"
#include "sm90/tma.h"

namespace fad::sm90 {

template <typename Element_, int kHeadDim_, int kRows_>
struct BwdTile {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRows = kRows_;  // 64 or 128: the row blocks of the sm80 family
  static constexpr int kKeys = kBwdKeys;
  static constexpr int kGroups = 2;      // warpgroups that compute
  static constexpr int kGroupKeys = 64;  // the height of wgmma
  static_assert(kGroups * kGroupKeys == kKeys && (kRows == 64 || kRows == 128));
  static constexpr int kConsumers = 128 * kGroups;
  static constexpr int kThreads = 128 + kConsumers;
  static constexpr int kConsumerRegisters = kHeadDim == 64 ? 240 : 232;
  static constexpr int kHelperRegisters = kHeadDim == 64 ? 24 : 40;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kHelperRegisters + kGroups * kConsumerRegisters <=
                (kGroups + 1) * kLaunchRegisters);

  // dq of a row block is computed in two parts of 64 rows by 64 columns, one to a warpgroup: the
  // upper and lower rows, or the left and right columns.
  static constexpr bool kSplitsRows = kRows == 128;
  static_assert(kSplitsRows == (kHeadDim == 64) && kHeadDim % 32 == 0 && kHeadDim <= 128);

  // Whether registers are enough to add to dv while dS is computed.
  static constexpr bool kDvBesideScores = kRows == 64;

  // Shared memory: K, V, then for each stage of the ring a row block of Q and dO, two numbers for
  // each row, dS (64 keys to a box) and dq; barriers.
  static constexpr int kStages = 2;
  static constexpr int kBoxes = (kHeadDim + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kKeyBoxBytes = kKeys * kBoxRowBytes;
  static constexpr int kKeyBytes = kBoxes * kKeyBoxBytes;
  static constexpr int kRowBoxBytes = kRows * kBoxRowBytes;
  static constexpr int kRowBytes = kBoxes * kRowBoxBytes;
  static constexpr int kScoreBoxBytes = kRows * kBoxRowBytes;
  static constexpr int kScoreBytes = kGroups * kScoreBoxBytes;
  static constexpr int kDqPartBytes = 64 * 64 * 4;
  static constexpr int kDqBytes = kRows * kHeadDim * 4;
  static constexpr int kNumberBytes = 2 * kRows * 4;

  static constexpr int kKAt = 0;
  static constexpr int kVAt = kKAt + kKeyBytes;
  static constexpr int kQAt = kVAt + kKeyBytes;
  static constexpr int kDoAt = kQAt + kStages * kRowBytes;
  static constexpr int kScoresAt = kDoAt + kStages * kRowBytes;
  static constexpr int kDqAt = kScoresAt + kStages * kScoreBytes;
  static constexpr int kNumbersAt = kDqAt + kStages * kDqBytes;
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
  static constexpr int kDqEmpty = kDqFull + 8 * kStages;
  static constexpr int kWorkAt = (kDqEmpty + 8 * kStages + 15) / 16 * 16;
  static constexpr int kSlotAt = kWorkAt + kBwdWorkBytes;  // where sums are kept
  static constexpr int kBytes = kSlotAt + 16;
  static_assert(kBytes <= kBwdSharedBytes);

  // Of a row of dq's part; part 1 of 96 columns has 32.
  static constexpr __host__ __device__ int dq_row_bytes(int part) {
    return !kSplitsRows && part == 1 && kHeadDim == 96 ? 128 : 256;
  }
  // The byte of an element of dq in its tile: eights of columns are swizzled by their row.
  static constexpr __host__ __device__ int dq_at(int row, int column) {
    const int part = kSplitsRows ? row / 64 : column / 64;
    const int bytes = dq_row_bytes(part);
    return part * kDqPartBytes + row % 64 * bytes + (column % 64 * 4 ^ row % (bytes / 32) * 32);
  }
};

// A named barrier; 0 is __syncthreads.
constexpr int kConsumersMeet = 1;

}  // namespace fad::sm90
