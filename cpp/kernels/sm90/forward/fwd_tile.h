// How the forward's tiles share an SM's threads, registers and memory.
#pragma once

#include <type_traits>

#include "fwd_shape.h"
#include "sm90/tma.h"

namespace fad::sm90 {

template <typename Element_, int kHeadDim_, int kHeadDimV_, int kBlockM, bool kSoftcap_>
struct FwdTile {
  static constexpr FwdShape kShape = fwd_shape(kHeadDim_, kHeadDimV_, kBlockM);
  static constexpr int kKeys = kShape.keys;
  static constexpr int kStateColumns = kShape.state_columns;
  static constexpr bool kTakesTurns = kShape.takes_turns;
  static constexpr bool kWaitsLast = kShape.waits_last;
  static constexpr int kRegisterQueries = kShape.register_queries;
  static constexpr bool kQueriesThroughRing = kShape.queries_through_ring;
  static constexpr bool kWaitsInLines = kShape.waits_in_lines;
  static constexpr bool kLoopsInside = kShape.loops_inside;
  static constexpr int kCtasPerSm = kShape.ctas_per_sm;
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;  // of V and the output
  static constexpr bool kQueriesInRegisters = kRegisterQueries == kHeadDim / 16;
  static constexpr bool kSoftcap = kSoftcap_;
  static constexpr int kWarpgroups = kBlockM / kGroupRows;
  static constexpr int kSteps = kKeys / kStep;
  static constexpr int kRows = kGroupRows * kWarpgroups;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  // A CTA keeps the registers it is launched with, a multiple of 8 for each thread, of an SM's
  // 65536: if warpgroups asked for more in all, one would wait for them forever. The producer needs
  // 24, and gets what is left.
  static constexpr int kLaunchRegisters = 65536 / (kCtasPerSm * kThreads) / 8 * 8;
  static constexpr int kCtaRegisters = (kWarpgroups + 1) * kLaunchRegisters;
  static constexpr int kConsumerRegisters = (kCtaRegisters - 24) / kWarpgroups / 8 * 8;
  static constexpr int kProducerRegisters = kCtaRegisters - kWarpgroups * kConsumerRegisters;
  static_assert(kConsumerRegisters > kLaunchRegisters && kConsumerRegisters <= 240);

  static constexpr int kColumns = kHeadDimV / 8;  // eights of columns of the accumulator
  // Accesses of 16 bytes that a merge has under way where state waits in lines: while the next
  // split begins, and at the end of the rows, where more registers are free.
  static constexpr int kFarColumns = kWaitsInLines ? kColumns - kStateColumns : 1;
  static constexpr int kFarLoads = kFarColumns < 8 ? kFarColumns : 8;
  static constexpr int kLastFarLoads = kFarColumns;
  static_assert(kFarColumns > 0);
  static_assert(2 * kStateColumns >= kColumns && kSteps * kStep == kKeys);
  static_assert(kSteps == 1 || !kWaitsLast);

  // Shared memory: Q, a ring of blocks of K and V, state of the later splits, barriers. The
  // first kRingBoxes boxes of Q come through the ring.
  static constexpr int kBoxes = (kHeadDim + kBoxColumns - 1) / kBoxColumns;  // of Q and K
  static constexpr int kValueBoxes = (kHeadDimV + kBoxColumns - 1) / kBoxColumns;
  static_assert(kValueBoxes <= kBoxes);
  static constexpr int kRingBoxes = kQueriesThroughRing ? kRegisterQueries / 4 : 0;
  static constexpr int kQBoxBytes = kGroupRows * kBoxRowBytes;
  static constexpr int kQGroupBytes = (kBoxes - kRingBoxes) * kQBoxBytes;
  static constexpr int kQBytes = kWarpgroups * kQGroupBytes;
  static constexpr int kBoxBytes = kKeys * kBoxRowBytes;
  static constexpr int kBlockBytes = kBoxes * kBoxBytes;
  static constexpr int kRingQueryBytes = kWarpgroups * kRingBoxes * kQBoxBytes;
  // One block of the ring, or one for each warpgroup.
  static constexpr int kRingQueryBlocks = !kQueriesThroughRing             ? 0
                                          : kRingQueryBytes <= kBlockBytes ? 1
                                                                           : kWarpgroups;
  static_assert(!kQueriesThroughRing || (kRegisterQueries % 4 == 0 && kRingBoxes > 0));
  static_assert(kRingQueryBlocks <= 1 || kRingBoxes * kQBoxBytes <= kBlockBytes);
  // Whether some of Q has shared memory of its own.
  static constexpr bool kQueriesInShared = kRingBoxes < kBoxes;
  static constexpr int kSharedBytes = shared_bytes(kCtasPerSm);
  static constexpr int kStateBytes = kRows * 32 * kStateColumns;
  static constexpr int kBarrierBytes = 512;
  static constexpr int kMaxBlocks = 12;
  static constexpr int blocks_in(int bytes) {
    return bytes / kBlockBytes < kMaxBlocks ? bytes / kBlockBytes : kMaxBlocks;
  }
  // Blocks in the ring beside the state of later splits, and with a single split, which has none.
  static constexpr int kBlocks = blocks_in(kSharedBytes - kBarrierBytes - kQBytes - kStateBytes);
  static constexpr int kBlocksAlone = blocks_in(kSharedBytes - kBarrierBytes - kQBytes);
  // From V's last place in a tile to its first in the next one it is at most this far: a warp that
  // waits for a block to be free must not be two rounds of the ring ahead of the one before.
  static_assert(kBlocks >= kRingQueryBlocks + 3);
  static constexpr int kRingAt = kQBytes;
  static constexpr int kStateAt = kRingAt + kBlocks * kBlockBytes;
  static constexpr int kBarriersAt = kSharedBytes - kBarrierBytes;

  // Barriers, 8 bytes each.
  static constexpr int kFull = kBarriersAt;               // of each block of the ring
  static constexpr int kEmpty = kFull + 8 * kMaxBlocks;   // likewise
  static constexpr int kQFull = kEmpty + 8 * kMaxBlocks;  // of each warpgroup's Q
  static constexpr int kQEmpty = kQFull + 8 * kWarpgroups;
  static constexpr int kWorkFull = kQEmpty + 8 * kWarpgroups;  // of the two notes on work
  static constexpr int kWorkEmpty = kWorkFull + 16;
  static constexpr int kTailLoaded = kWorkEmpty + 16;  // V whose rows behind the end must go
  static constexpr int kWorkAt = kBarriersAt + kBarrierBytes - 2 * 32;
  static_assert(kTailLoaded + 16 <= kWorkAt && kWorkAt % 16 == 0);
};

}  // namespace fad::sm90
