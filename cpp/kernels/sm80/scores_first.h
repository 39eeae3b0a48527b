// Sizes of the path that computes scores first, for its kernels and for the plan.
//
// A split is a chain: each block of 64 keys waits for the accumulator of the block after it. But
// scores wait for nothing, and a column of the accumulator waits for no other column. So one kernel
// computes all scores, a warp to a block of keys; a second one computes probabilities and P V, a
// CTA to 32 columns of a split. A call of one sequence then has so many of them that the whole GPU
// reads its keys and values.
#pragma once

#include <algorithm>
#include <cstddef>

#include "../tree/tree.h"

namespace fad {

constexpr int kScoreRows = 8;  // of a row block: the tensor core computes 16, half of them unused
constexpr int kValueColumns = 32;  // of a CTA that computes P V

// Floats that the scores of a row block and a block of keys take, and a part.
constexpr int kScoreFloats = kScoreRows * kKeysPerBlock;
constexpr int kPartFloats = kScoreRows * kValueColumns;

// Where the arrays of params.h's ScoresFirst begin in scratch memory, and what they take, in bytes.
struct ScoresFirstRoom {
  std::size_t maxima, acc, state, arrivals, end;
};

constexpr ScoresFirstRoom scores_first_room(long long ctas, long long blocks, long long splits,
                                            int head_dim) {
  const long long columns = head_dim / kValueColumns;
  const long long parts = splits > 1 ? ctas * columns * splits : 0;
  ScoresFirstRoom room{};
  room.maxima = ctas * blocks * kScoreFloats * sizeof(float);
  room.acc = room.maxima + ctas * blocks * kScoreRows * sizeof(float);
  room.state = room.acc + parts * kPartFloats * sizeof(float);
  room.arrivals = room.state + parts * kScoreRows * 2 * sizeof(float);
  room.end = room.arrivals + ctas * columns * sizeof(unsigned);
  return room;
}

template <typename Element_, int kHeadDim_>
struct ScoresTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kSlotBytes = kKeysPerBlock * kHeadDim * 2;
  // As many as find room for their blocks of keys on every device.
  static constexpr int kWarps = std::min(4, 96 * 1024 / kSlotBytes);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSharedBytes = kWarps * kSlotBytes;
};

template <typename Element_, bool kPaged_>
struct ValuesTraits {
  using Element = Element_;
  static constexpr bool kPaged = kPaged_;
  static constexpr int kThreads = 64;  // a warp computes, a warp copies
  // A stage: a block of keys' values, scores and maxima.
  static constexpr int kValueBytes = kKeysPerBlock * kValueColumns * 2;
  static constexpr int kScoreBytes = kScoreFloats * 4;
  static constexpr int kMaximaBytes = kScoreRows * 4;
  static constexpr int kStageBytes = kValueBytes + kScoreBytes + kMaximaBytes;
  // What lets four CTAs share an SM with 200 KB of shared memory: one for each of its schedulers.
  static constexpr int kStages = 8;
  static constexpr int kSharedBytes = kStages * kStageBytes;
};

}  // namespace fad
