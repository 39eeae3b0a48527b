// Sizes of the path that computes scores first, for its kernels and for the plan.
//
// A split is a chain: each block of 64 keys waits for the accumulator of the block after it. But
// scores wait for nothing, and a column of the accumulator waits for no other column. So one kernel
// computes all scores, a warp to a block of keys; a second one computes probabilities and P V, a
// CTA to 32 columns of a split. Even one sequence then has enough warps and CTAs for the whole GPU.
#pragma once

#include <algorithm>
#include <cstddef>

#include "fwd.h"
#include "tree/tree.h"

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

// ctas: row blocks, all those of some (sequence, group of heads).
template <typename Element, int kHeadDim>
void launch_scores_first(const FwdParams& params, unsigned ctas, cudaStream_t stream);

template <typename Element_, int kHeadDim_>
struct ScoresTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kSlotBytes = kKeysPerBlock * kHeadDim * 2;
  // As many as fit their blocks of keys into shared memory on every device.
  static constexpr int kWarps = std::min(4, 96 * 1024 / kSlotBytes);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSharedBytes = kWarps * kSlotBytes;
};

template <typename Element_, bool kPaged_>
struct ValuesTraits {
  using Element = Element_;
  static constexpr bool kPaged = kPaged_;
  // Blocks of keys whose probabilities are computed at the same time, by a warp each. One more warp
  // multiplies them by values; one copies values, and sums up the probabilities of each row.
  static constexpr int kChunk = 3;
  static constexpr int kThreads = 32 * (kChunk + 2);
  static constexpr int kCtas = 4;  // to an SM
  // Shared memory: values, of a chunk that is multiplied and of two on their way; probabilities, of
  // a chunk that is multiplied and of the next; maxima and sums in the end.
  static constexpr int kValueChunks = 3;
  static constexpr int kProbsChunks = 2;
  static constexpr int kValueBytes = kKeysPerBlock * kValueColumns * 2;
  static constexpr int kProbsBytes = kScoreFloats * (4 + 2) + kScoreRows * 8;
  static constexpr int kProbs = kValueChunks * kChunk * kValueBytes;
  static constexpr int kEnd = kProbs + kProbsChunks * kChunk * kProbsBytes;
  static constexpr int kSharedBytes = kEnd + kScoreRows * 8;
  // Afterwards: parts that a warp merges, eight columns and the state of each.
  static constexpr int kMergedAtOnce = 40;
  static constexpr int kMergeBytes = kMergedAtOnce * kScoreRows * (8 + 2) * 4;
  static_assert(kValueColumns / 8 * kMergeBytes <= kSharedBytes);
};

}  // namespace fad
