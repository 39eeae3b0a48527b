// The two products of the forward: scores = Q K^T, and the weights times V, which are added to the
// accumulator. K and V lie in a block of the ring, Q in shared memory, in registers or in both.
#pragma once

#include "fwd_tile.h"
#include "sm90/barrier.h"
#include "sm90/fragment.h"
#include "sm90/wgmma.h"

namespace fad::sm90 {

// The first sixteens of columns of Q as operands in registers: of each, a thread's two rows and two
// pairs of columns. Boxes are swizzled as wgmma.h says.
template <typename T>
using QueryWords = uint32_t[T::kRegisterQueries > 0 ? 4 * T::kRegisterQueries : 1];

template <typename T>
__device__ __forceinline__ void load_query_words(uint32_t queries, int thread,
                                                 QueryWords<T>& words) {
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;
  const uint32_t at = queries + row * kBoxRowBytes + lane % 4 * 4;
#pragma unroll
  for (int i = 0; i < T::kRegisterQueries; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int unit = (i % 4 * 2 + half) ^ (row % 8);
      const uint32_t pair = at + i / 4 * T::kQBoxBytes + unit * 16;
      words[4 * i + 2 * half] = load_shared_word(pair);
      words[4 * i + 2 * half + 1] = load_shared_word(pair + 8 * kBoxRowBytes);
    }
  }
}

template <typename T>
__device__ __forceinline__ void issue_scores(uint32_t queries, const QueryWords<T>& query_words,
                                             uint32_t block, float (&scores)[T::kKeys / 2]) {
  using Element = typename T::Element;
  [[maybe_unused]] const uint64_t q = operand(queries, 16);
  const uint64_t k = operand(block, 16);
#pragma unroll
  for (int i = 0; i < T::kHeadDim / 16; ++i) {
    const int in_box = i % 4 * kOperandColumns16;
    const uint64_t keys = k + (i / 4 * T::kBoxBytes / 16 + in_box);
    if (i < T::kRegisterQueries) {
      RegisterProduct<Element, T::kKeys, Contiguous::kK>::issue(scores, query_words + 4 * i, keys,
                                                                i > 0);
    } else {
      const int box = i / 4 - T::kRingBoxes;
      SharedProduct<Element, T::kKeys>::issue(scores, q + (box * T::kQBoxBytes / 16 + in_box), keys,
                                              i > 0);
    }
  }
}

// Exponentials in 16 bit, as an operand.
template <typename T>
using Weights = uint32_t[T::kKeys / 4];

template <typename T>
__device__ __forceinline__ void pack_weights(const float (&scores)[T::kKeys / 2],
                                             Weights<T>& weights) {
#pragma unroll
  for (int j = 0; j < T::kKeys / 4; ++j) {
    weights[j] = packed<typename T::Element>(scores[2 * j], scores[2 * j + 1]);
  }
}

// The keys of one step of the softmax; step 0 is the last of the block.
template <typename T>
__device__ __forceinline__ void issue_values(uint32_t block, int step, const Weights<T>& weights,
                                             bool accumulate, float (&acc)[T::kHeadDimV / 2]) {
  const int first = (T::kSteps - 1 - step) * kStep;
  const uint64_t v = operand(block + first * kBoxRowBytes, T::kBoxBytes);
#pragma unroll
  for (int i = 0; i < kStep / 16; ++i) {
    RegisterProduct<typename T::Element, T::kHeadDimV>::issue(
        acc, weights + first / 4 + 4 * i, v + i * kOperandRows16, i > 0 || accumulate);
  }
}

}  // namespace fad::sm90
