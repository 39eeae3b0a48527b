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

constexpr int kScoreRows = 16;     // of a row block
constexpr int kValueColumns = 32;  // of a CTA that computes P V

// Rows of a row block that scores and parts are kept for: 8 where no row block has more.
constexpr int kept_rows(int rows) { return rows <= 8 ? 8 : kScoreRows; }

// Floats that the scores of a row block and a block of keys take, and a part of 32 columns.
constexpr int score_floats(int kept) { return kept * kKeysPerBlock; }
constexpr int part_floats(int kept) { return kept * kValueColumns; }

// Where the arrays of params.h's ScoresFirst begin in scratch memory, and what they take, in bytes.
struct ScoresFirstRoom {
  std::size_t maxima, acc, state, arrivals, end;
};

constexpr ScoresFirstRoom scores_first_room(long long ctas, long long blocks, long long splits,
                                            int head_dim, int rows) {
  const int kept = kept_rows(rows);
  const long long columns = head_dim / kValueColumns;
  const long long parts = splits > 1 ? ctas * columns * splits : 0;
  ScoresFirstRoom room{};
  room.maxima = ctas * blocks * score_floats(kept) * sizeof(float);
  room.acc = room.maxima + ctas * blocks * kScoreRows * sizeof(float);
  room.state = room.acc + parts * part_floats(kept) * sizeof(float);
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

// kRows: that are kept.
template <typename Element_, int kRows_, bool kPaged_>
struct ValuesTraits {
  using Element = Element_;
  static constexpr int kRows = kRows_;
  static constexpr bool kPaged = kPaged_;
  static constexpr int kHalves = kRows / 8;
  // A stage: a block of keys' values, scores and maxima.
  static constexpr int kValueBytes = kKeysPerBlock * kValueColumns * 2;
  static constexpr int kScoreBytes = score_floats(kRows) * 4;
  static constexpr int kMaximaBytes = kScoreRows * 4;
  static constexpr int kStageBytes = kValueBytes + kScoreBytes + kMaximaBytes;
  static constexpr int kThreads = 64;  // a warp computes, a warp copies
  // What lets four CTAs share an SM with 200 KB of shared memory: one for each of its schedulers.
  static constexpr int kStages = kHalves == 1 ? 8 : 6;
  static constexpr int kSharedBytes = kStages * kStageBytes;
};

}  // namespace fad
